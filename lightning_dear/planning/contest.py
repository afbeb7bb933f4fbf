"""Plans measured against each other on real steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from lightning_dear.planning.plan import BucketPlan, same_buckets

NUM_REPEATED = 3
"""Plans measured twice: the incumbent and the two best others."""


class Contest(ABC):
    """See `PlanSearch`: every plan once, then the incumbent and the two best others once more.

    Twice and apart in time, so that a passing disturbance does not decide.

    Args:
        incumbent: What stays unless another plan's mean is lower.
        others: What may beat it; distinct, and none of them the incumbent.

    Attributes:
        plans: All of them, the incumbent first.
    """

    def __init__(self, incumbent: BucketPlan, others: Sequence[BucketPlan]) -> None:
        self.plans = [incumbent, *others]
        self._queue = list(self.plans)
        self._measured: dict[int, list[float]] = {}
        self._is_repeating = False

    @property
    def incumbent(self) -> BucketPlan:
        """What stays unless another is faster."""
        return self.plans[0]

    @property
    def num_measured(self) -> int:
        """How many plans have been measured so far."""
        return len(self._measured)

    def next(self) -> BucketPlan | None:
        """See `PlanSearch`."""
        if not self._queue and not self._is_repeating:
            self._is_repeating = True
            others = sorted(self.plans[1:], key=self.mean_s)[: NUM_REPEATED - 1]
            # The incumbent between both, so that it is as far from either in time.
            self._queue = [*others[:1], self.incumbent, *others[1:]] if others else []
        return self._queue[0] if self._queue else None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """See `PlanSearch`."""
        self._measured.setdefault(self.plans.index(plan), []).append(step_s)
        if self._queue and self._queue[0] == plan:
            self._queue.pop(0)

    def mean_s(self, plan: BucketPlan) -> float:
        """Of the steps measured with a plan, seconds; infinite if there are none."""
        steps_s = self._measured.get(self.plans.index(plan), [])
        return sum(steps_s) / len(steps_s) if steps_s else float("inf")

    def count(self, plan: BucketPlan) -> int:
        """How often a plan has been measured."""
        return len(self._measured.get(self.plans.index(plan), ()))

    @property
    def best(self) -> BucketPlan:
        """See `PlanSearch`; the incumbent until another was measured twice and has won."""
        twice = [plan for plan in self.plans if self.count(plan) > 1]
        # Ties go to the incumbent, which stands first.
        return min(twice, key=self.mean_s, default=self.incumbent)

    @property
    @abstractmethod
    def reason(self) -> str:
        """See `PlanSearch`."""


def distinct(plans: Iterable[BucketPlan]) -> list[BucketPlan]:
    """The first of all that differ in their names alone."""
    kept: list[BucketPlan] = []
    for plan in plans:
        if not any(same_buckets(plan, other) for other in kept):
            kept.append(plan)
    return kept
