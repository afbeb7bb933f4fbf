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
