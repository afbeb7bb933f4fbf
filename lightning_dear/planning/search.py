"""Searches for a plan that want times, or measurements of candidates on real steps, to decide."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from typing_extensions import override

from lightning_dear.planning.fusion import MIB, FusionPlanner, ThresholdFusion
from lightning_dear.planning.measured import NO_CODEC, CodecCosts, LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, Specs
from lightning_dear.planning.predict import StepModel

NUM_PROFILED_STEPS = 3
"""Steps whose times are measured before a search begins."""

NUM_DROPPED_STEPS = 2
"""Steps after a change of plan that are not counted."""

NUM_MEASURED_STEPS = 5
"""Steps whose time is a candidate's measurement."""

STEPS_PER_TRIAL = NUM_DROPPED_STEPS + NUM_MEASURED_STEPS
STEPS_BEFORE_SEARCH = 1 + NUM_PROFILED_STEPS
"""The recorded step, and those that are profiled."""

NUM_REPEATED = 3
"""Plans measured twice: the incumbent and the two best others."""


class PlanSearch(Protocol):
    """Searches for the plan with the shortest step; pure: whoever drives it measures.

    Call `next`, train some steps with that plan, `tell` what they took, until `next` returns None;
    then use `best`.

    Attributes:
        best: The plan to use: the best *measured* one; before any measurement, a safe one.
        reason: One line for people: what `best` is, and why.
    """

    @property
    def best(self) -> BucketPlan:
        """See the class."""

    @property
    def reason(self) -> str:
        """See the class."""

    def next(self) -> BucketPlan | None:
        """Returns the plan to measure next, perhaps once more; None when the search is over."""

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Notes that the slowest rank took `step_s` seconds a step with `plan`."""


@runtime_checkable
class SearchingPlanner(FusionPlanner, Protocol):
    """Plans by measuring: its `plan` is only where it starts from.

    One whose class says `plans_for_codecs = True` may be used with a compressor, and its `search`
    is then given the `CodecCosts` as a fifth argument.
    """

    def search(
        self, tensors: Specs, world_size: int, times: ModelTimes, link: LinkCost
    ) -> PlanSearch:
        """Begins a search with what was measured."""


class NoContest:
    """Searches nothing: the one plan of a planner is applied without measuring it."""

    def __init__(self, plan: BucketPlan, reason: str) -> None:
        self.best = plan
        self.reason = reason

    def next(self) -> BucketPlan | None:
        """See `PlanSearch`."""
        return None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """See `PlanSearch`; there is nothing to learn."""


@dataclass(eq=False)
class Contest(PlanSearch):
    """See `PlanSearch`: every plan once, then the incumbent and the two best others once more.

    Twice and apart in time, so that a passing disturbance does not decide.

    Attributes:
        incumbent: What stays unless another plan's mean is lower.
        others: What may beat it; distinct, and none of them the incumbent.
        step_s: Predicts a plan's step, seconds.
        plans: All of them, the incumbent first.
    """

    incumbent: BucketPlan
    others: Sequence[BucketPlan]
    step_s: Callable[[BucketPlan], float]

    def __post_init__(self) -> None:
        self.plans = [self.incumbent, *self.others]
        self._queue = list(self.plans)
        self._measured: dict[BucketPlan, list[float]] = {plan: [] for plan in self.plans}
        self._is_repeating = False

    @property
    def num_measured(self) -> int:
        """Returns how many plans have been measured so far."""
        return sum(map(bool, self._measured.values()))

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
        self._measured[plan].append(step_s)
        # Only what was asked for leaves the queue; other measurements count all the same.
        if self._queue and self._queue[0] == plan:
            self._queue.pop(0)

    def mean_s(self, plan: BucketPlan) -> float:
        """Returns the mean of a plan's measured steps, seconds; infinite if there are none."""
        steps_s = self._measured[plan]
        return sum(steps_s) / len(steps_s) if steps_s else float("inf")

    def count(self, plan: BucketPlan) -> int:
        """Returns how often a plan has been measured."""
        return len(self._measured[plan])

    @property
    def best(self) -> BucketPlan:
        """See `PlanSearch`; the incumbent until another was measured twice and has won."""
        twice = [plan for plan in self.plans if self.count(plan) > 1]
        # Ties go to the incumbent, which stands first.
        return min(twice, key=self.mean_s, default=self.incumbent)


class StepModelPlanner(ABC):
    """Searches with a `StepModel`."""

    def search(
        self,
        tensors: Specs,
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> PlanSearch:
        """See `SearchingPlanner`."""
        return self.search_for(StepModel(tensors, world_size, times, link, codecs))

    @abstractmethod
    def search_for(self, model: StepModel) -> PlanSearch:
        """Begins a search with what was measured."""


class PredictingPlanner(StepModelPlanner):
    """Decides by predictions: its one plan is applied as it is, unless it says else.

    Until there are times it trains with `ThresholdFusion`'s buckets.

    Attributes:
        name: In the table of planners.
    """

    name: ClassVar[str]

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """See `FusionPlanner`: what to start with."""
        return ThresholdFusion().plan(tensors, world_size)

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """Returns a search that is over."""
        best = self.best_plan(model)
        predicted = f"predicted {1e3 * model.step_s(best):.3g} ms/step"
        return NoContest(best, f"{self.name}: {described(best)}, {predicted}")

    @abstractmethod
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that the planner makes of what was measured; pure."""


def described(plan: BucketPlan) -> str:
    """Returns `6 buckets of 2-8 MiB`, for people."""
    sizes_mb = [bucket.stepped_bytes / MIB for bucket in plan.buckets]
    sizes = f"{min(sizes_mb):.2g}-{max(sizes_mb):.2g} MiB"
    rest = ""
    for named, what in (plan.all_reduced, "all-reduced"), (plan.uncompressed, "uncompressed"):
        count = "all" if len(named) == len(plan.buckets) else f"{len(named)} of them"
        rest += f", {count} {what}" if named else ""
    if len(sizes_mb) == 1:
        return f"1 bucket of {max(sizes_mb):.3g} MiB{rest}"
    early = f", {len(plan.early)} of them gathered in backward" if plan.early else ""
    return f"{len(sizes_mb)} buckets of {sizes}{early}{rest}"
