"""The states of one optimizer's step, from the first backward to the end of `optimizer.step`.

Events move the step from one `StepState` to the next ("backward" is `Pipeline.backward`):

    state                          event                                        next
    -----------------------------  -------------------------------------------  ------------------
    any                            backward(synchronize=True)                   SENDING
    SENDING                        backward(synchronize=False)                  SENDING
    REDUCED, CHANGED, EXPOSED      backward(synchronize=False)                  ACCUMULATING
    EMPTY                          a gradient in backward(synchronize=False)    ACCUMULATING
    EMPTY, ACCUMULATING, SENDING   a gradient outside any backward              unchanged
    REDUCED, CHANGED, EXPOSED      a gradient outside any backward              raises
    EMPTY, ACCUMULATING, SENDING   reduce (step, norm, clip, unscale, expose)   REDUCED
    EXPOSED                        reduce (by step)                             CHANGED
    EXPOSED                        norm, clip, unscale                          EXPOSED
    REDUCED, CHANGED               clip, unscale                                CHANGED
    REDUCED, CHANGED               expose                                       EXPOSED
    REDUCED, CHANGED               step begins                                  STEPPING
    STEPPING                       step ends                                    EMPTY
    STEPPING                       step raises, and anything else follows       as before the step
    any                            zero_grad                                    EMPTY
    any                            detach                                       ENDED

In ENDED `backward` and `reduce` raise. `backward(synchronize=None)` does what `synchronize=False`
does. Gathering is not a state of the step: each bucket is gathered on its own, and gathers overlap
the next forward.
"""

from collections.abc import Callable
from enum import Enum


class StepState(Enum):
    """State of one optimizer's step. The table at the head of this file has the transitions.

    Without buckets (world size 1 and no compressor) the mean gradient is the user's own `.grad`.
    No hook reports new gradients then. So REDUCED, CHANGED and EXPOSED are never entered: EMPTY is
    entered instead.
    """

    EMPTY = "no gradient since the last step or zero_grad"
    ACCUMULATING = "gradients add up in `.grad`; any means of earlier rounds stay in the shards"
    SENDING = "buckets may have been launched, and other ranks may wait for this rank's buckets"
    REDUCED = "the shards hold the mean gradient, unchanged; `.grad` is None"
    CHANGED = "the shards hold the mean gradient, clipped or otherwise changed; `.grad` is None"
    EXPOSED = "`.grad` holds the whole mean gradient; the step will use it with all changes to it"
    STEPPING = "the optimizer steps bucket by bucket; forwards in other threads wait for the end"
    ENDED = "`detach` was called; a further backward or reduction of this pipeline raises"


class Backward(Enum):
    """The kind of backward that runs at present. It decides whether its gradients go to buckets."""

    NONE = "no backward that the strategy was told of; its gradients add up in `.grad`"
    LOCAL = "gradient accumulation: more backwards of the step follow; gradients add up in `.grad`"
    DROPPED = "of a batch of weight 0: its gradients are dropped, and `.grad` is put back"
    LAST = "the last backward of a step: its gradients are sent while it runs, or before the step"


_MEANS_ARE_THERE = (StepState.REDUCED, StepState.CHANGED, StepState.EXPOSED)


class StepProgress:
    """Holds the state of one optimizer's step.

    `OptimizerPipeline` and `MeanGradient` call it when an event happens. The table at the head of
    this file has the events.

    Args:
        uses_buckets: Returns whether gradients pass through buckets: False at world size 1 without
            a compressor.

    Attributes:
        state: Present state. Callers assign to it only when the training ends.
        is_due: Whether DDP would have averaged gradients since the last step or `zero_grad`, so
            that another backward would add to means; to be assigned to.
    """

    def __init__(self, uses_buckets: Callable[[], bool]) -> None:
        # `_interrupted` is the state before the step, which comes back if the step raises.
        self.state = self._interrupted = StepState.EMPTY
        self.is_due = False
        self._uses_buckets = uses_buckets

    @property
    def has_means(self) -> bool:
        """Whether the mean gradient has been reduced: it lies in the shards, or `.grad` shows it.

        True in REDUCED, CHANGED and EXPOSED.
        """
        return self.state in _MEANS_ARE_THERE

    def check_is_on(self) -> None:
        """Raises `RuntimeError` after `detach` (state ENDED). Otherwise does nothing."""
        if self.state is StepState.ENDED:
            raise RuntimeError("This optimizer's training is over. Start another fit.")

    def enter(self, state: StepState) -> None:
        """Goes on to `state`, or without buckets to EMPTY if `state` is one that needs buckets.

        Also sets `is_due`: True in SENDING, False in EMPTY, and unchanged in other states.

        Raises:
            RuntimeError: After `detach` (state ENDED).
        """
        self.check_is_on()
        if state in _MEANS_ARE_THERE and not self._uses_buckets():
            state = StepState.EMPTY
        self.is_due = state is StepState.SENDING or (self.is_due and state is not StepState.EMPTY)
        self.state = state

    def begin_step(self) -> None:
        """Goes on to STEPPING, and stores the present state for `end_broken_step`."""
        self._interrupted, self.state = self.state, StepState.STEPPING

    def end_broken_step(self) -> None:
        """Goes back to the state before the step, if the step has raised (state STEPPING).

        Does nothing in any other state.
        """
        if self.state is StepState.STEPPING:
            self.state = self._interrupted
