"""The states of one optimizer's step, from the first backward to the next forward.

Events move the step from one `StepState` to the next:

    state                          event                                        next
    -----------------------------  -------------------------------------------  ------------------
    any                            backward(synchronize=True)                   SENDING
    SENDING                        backward(synchronize=False)                  SENDING
    REDUCED, CHANGED, EXPOSED      backward(synchronize=False)                  ACCUMULATING
    EMPTY                          a gradient in backward(synchronize=False)    ACCUMULATING
    EMPTY, ACCUMULATING            a gradient outside any backward              SENDING
    REDUCED, CHANGED, EXPOSED      a gradient outside any backward              raises
    EMPTY, ACCUMULATING, SENDING   reduce (by step, norm, clip, unscale)        REDUCED
    EXPOSED                        reduce                                       CHANGED
    REDUCED, CHANGED               clip, unscale                                CHANGED
    REDUCED, CHANGED               expose                                       EXPOSED
    REDUCED, CHANGED               step begins                                  STEPPING
    STEPPING                       step ends                                    EMPTY
    STEPPING                       step raises, and anything else follows       as before the step
    any                            zero_grad                                    EMPTY
    any                            detach                                       ENDED: all raise

Gathering is not a state of the step. Each bucket is gathered on its own, and gathers overlap the
next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class StepState(Enum):
    """State of one optimizer's step. The table at the head of this file has the transitions.

    Without buckets (world size 1 and no compressor) the mean gradient is the user's own `.grad`.
    No hook reports new gradients then, so REDUCED, CHANGED and EXPOSED are never entered.
    """

    EMPTY = "no gradient since the last step or zero_grad"
    ACCUMULATING = "gradients add up in `.grad`; means of earlier rounds stay in the shards"
    SENDING = "buckets may have been launched, and other ranks may wait for this rank's buckets"
    REDUCED = "the shards hold the mean gradient, unchanged"
    CHANGED = "the shards hold the mean gradient, clipped or otherwise changed"
    EXPOSED = "`.grad` holds the whole mean gradient, and changes to it count"
    STEPPING = "the optimizer steps bucket by bucket; other threads' reads wait"
    ENDED = "the training is over"


class Backward(Enum):
    """The kind of backward that runs at present, which decides what its gradients mean."""

    NONE = "no backward that the strategy was told of"
    LOCAL = "a backward that other backwards of the same step follow"
    LAST = "the last backward of a step: its gradients are sent while it runs, or before the step"


class SendTime(Enum):
    """When the buckets of a step are launched."""

    BEFORE_STEP = "all buckets right before the step"
    IN_BACKWARD = "each bucket in backward, once it is full"
    EARLY = "each in backward, once it is full; early buckets are also stepped and gathered there"


_MEANS_ARE_THERE = (StepState.REDUCED, StepState.CHANGED, StepState.EXPOSED)


class StepProgress:
    """Holds the state of one optimizer's step. Its owners call it when an event happens.

    Args:
        uses_buckets: Returns whether gradients pass through buckets.

    Attributes:
        state: Present state; assigned to only when the training ends.
        is_due: Whether DDP would have averaged gradients since the last step; to be assigned to.
    """

    def __init__(self, uses_buckets: Callable[[], bool]) -> None:
        # `_interrupted` is the state before the step, for a step that raises.
        self.state = self._interrupted = StepState.EMPTY
        self.is_due = False
        self._uses_buckets = uses_buckets

    @property
    def has_means(self) -> bool:
        """Whether the shards hold the mean gradient, changed or not."""
        return self.state in _MEANS_ARE_THERE

    def check_is_on(self) -> None:
        """Raises `RuntimeError` if the training is over."""
        if self.state is StepState.ENDED:
            raise RuntimeError("This optimizer's training is over. Start another fit.")

    def enter(self, state: StepState) -> None:
        """Goes on to `state`; without buckets to EMPTY in place of states that they have.

        Raises:
            RuntimeError: If the training is over.
        """
        self.check_is_on()
        if state in _MEANS_ARE_THERE and not self._uses_buckets():
            state = StepState.EMPTY
        self.is_due = state is StepState.SENDING or (self.is_due and state is not StepState.EMPTY)
        self.state = state

    def begin_step(self) -> None:
        """Goes on to STEPPING, and keeps the present state for `end_broken_step`."""
        self._interrupted, self.state = self.state, StepState.STEPPING

    def end_broken_step(self) -> None:
        """Goes back to the state before the step, if the step has raised half-way."""
        if self.state is StepState.STEPPING:
            self.state = self._interrupted
