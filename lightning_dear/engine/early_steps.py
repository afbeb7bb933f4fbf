"""Past the paper: what backward reduced early is stepped and gathered while backward still runs.

DeAR leaves the link idle when backward takes longer than its reduce-scatters. A bucket of the last
layers is reduced early; stepped at once, into a second buffer, its all-gather fills that idle time.
The new values become the parameters' only after the step, since backward still needs the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_dear.engine.active_plan import ActivePlan
from lightning_dear.optimizers.sharded import ShardedOptimizer


class EarlySteps:
    """Steps the plan's early buckets in one backward, each as soon as its gradient has arrived.

    When that is differs from rank to rank, and so may whether it is in backward at all: results do
    not depend on it.

    Args:
        active: The plan at work.
        sharded: Steps the buckets.
        adopt_state: Takes over state that was given since the last step.
        launch_gathers: Called with the number of each bucket, once it is stepped, and with when
            that began.
        mark: The present moment, for the timeline.
    """

    def __init__(
        self,
        active: ActivePlan,
        sharded: ShardedOptimizer,
        adopt_state: Callable[[], object],
        launch_gathers: Callable[[Sequence[int], Any], None],
        mark: Callable[[], Any],
    ) -> None:
        self._active = active
        self._sharded = sharded
        self._adopt_state = adopt_state
        self._launch_gathers = launch_gathers
        self._mark = mark
        self._todo = list(active.plan.early)
        self._may_step = not any(place.was_replaced() for place in active.flat.placements)

    @torch.no_grad()
    def poll(self) -> None:
        """Steps what has arrived, and launches its gathers. Does not block."""
        while self._may_step and self._todo and self._active.reducer.has_arrived(self._todo[0]):
            number = self._todo.pop(0)
            if not self._sharded.stepped_early:
                self._adopt_state()
            self._active.flat.buckets[number].adopt_writes()
            self._active.reducer.finish_bucket(number)
            began = self._mark()
            self._sharded.step_early(number)
            self._launch_gathers([number], began)
