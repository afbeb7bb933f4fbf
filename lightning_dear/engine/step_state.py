"""Where one optimizer's step is, from the first backward to the next forward.

`StepState` says where the step is, and what happens moves it:

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

Gathering is no state of the step: it is each bucket's own, and overlaps the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class StepState(Enum):
    """Where one optimizer's step is; the table of what follows what heads this file.

    Without buckets (world size 1, nothing to encode) a mean gradient is the user's own `.grad`, and
    nobody tells of a new one: there REDUCED, CHANGED and EXPOSED are never entered.
    """

    EMPTY = "no gradient since the last step or zero_grad"
    ACCUMULATING = "gradients add up in `.grad` or, of earlier rounds, in the shards"
    SENDING = "buckets are on their way, other ranks may wait for ours"
    REDUCED = "the shards hold the mean gradient, as it came"
    CHANGED = "the shards hold the mean gradient, clipped or otherwise changed"
    EXPOSED = "so does `.grad`, whole, and what is done to it counts"
    STEPPING = "the optimizer steps bucket by bucket; others' reads wait"
    ENDED = "the training is over"


class Backward(Enum):
    """What a gradient that arrives just now is part of."""

    NONE = "no backward of ours"
    LOCAL = "a backward after which more of the same step follow"
    LAST = "a backward whose gradients are sent: while it runs, or before the step"


class SendTime(Enum):
    """When the buckets of a step are sent."""

    BEFORE_STEP = "all of them in front of the step"
    IN_BACKWARD = "each in backward, once it is full"
    EARLY = "so, and what the plan calls early is stepped and gathered in backward, too"


_MEANS_ARE_THERE = (StepState.REDUCED, StepState.CHANGED, StepState.EXPOSED)


class StepProgress:
    """Keeps to the table above, whoever tells what happens.

    Args:
        uses_buckets: Says whether mean gradients are anywhere but in the user's `.grad`.

    Attributes:
        state: Where the step is; to be assigned to when the training ends.
        is_due: Whether DDP would have averaged since the last step; to be assigned to.
    """

    def __init__(self, uses_buckets: Callable[[], bool]) -> None:
        # The latter is where a step that raises has to go back to.
        self.state = self._interrupted = StepState.EMPTY
        self.is_due = False
        self._uses_buckets = uses_buckets

    @property
    def has_means(self) -> bool:
        """Whether the shards hold the mean gradient, as it came or changed."""
        return self.state in _MEANS_ARE_THERE

    def check_is_on(self) -> None:
        """Raises `RuntimeError` if the training is over."""
        if self.state is StepState.ENDED:
            raise RuntimeError("This optimizer's training is over; start another fit.")

    def enter(self, state: StepState) -> None:
        """Goes on to `state`, as the table says. Raises as `check_is_on`."""
        self.check_is_on()
        if state in _MEANS_ARE_THERE and not self._uses_buckets():
            state = StepState.EMPTY
        self.is_due = state is StepState.SENDING or (self.is_due and state is not StepState.EMPTY)
        self.state = state

    def begin_step(self) -> None:
        """The step begins, which may raise."""
        self._interrupted, self.state = self.state, StepState.STEPPING

    def end_broken_step(self) -> None:
        """Goes back to before the step, if it raised in the call under way."""
        if self.state is StepState.STEPPING:
            self.state = self._interrupted
