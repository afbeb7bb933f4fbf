"""Interfaces and base classes of planners that need measured times, or steps of candidate plans.

`lightning_dear/tuning` measures for them.
"""

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
"""Number of steps whose compute times are measured before a search begins."""

NUM_DROPPED_STEPS = 2
"""Number of steps after a change of plan that are left out of the measurement."""

NUM_MEASURED_STEPS = 5
"""Number of steps whose median time is one measurement of a candidate plan."""

STEPS_PER_TRIAL = NUM_DROPPED_STEPS + NUM_MEASURED_STEPS
"""Number of steps that one measurement of a candidate plan takes."""

STEPS_BEFORE_SEARCH = 1 + NUM_PROFILED_STEPS
"""Number of steps before a search begins: the recorded step and the profiled ones."""

NUM_REPEATED = 3
"""Number of plans that are measured twice: the incumbent and the two best others."""


class PlanSearch(Protocol):
    """Search for the plan with the shortest step. It measures nothing itself: the caller does.

    The caller repeats this until `next` returns None: it calls `next`, trains some steps with the
    returned plan, and calls `tell` with the measured time. Then it uses `best`. Pure: it touches no
    tensors and does not communicate.

    Attributes:
        best: Plan to use: the best *measured* one; before any measurement, a safe one.
        reason: One line for people that says what `best` is, and why.
    """

    @property
    def best(self) -> BucketPlan:
        """Returns the plan to use: the best measured one, or a safe one before measurements."""

    @property
    def reason(self) -> str:
        """Returns one line for people that says what `best` is, and why."""

    def next(self) -> BucketPlan | None:
        """Returns the plan to measure next, possibly again. None means that the search is over."""

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Notes a measurement.

        Args:
            plan: Plan with which steps were trained.
            step_s: Seconds of a step of the slowest rank.
        """


@runtime_checkable
class SearchingPlanner(FusionPlanner, Protocol):
    """Interface of planners that search while training runs: `plan` only returns the first plan.

    A planner whose class has `plans_for_codecs = True` may be used with a compressor. With one, its
    `search` gets the `CodecCosts` as a fifth argument.
    """

    def search(
        self, tensors: Specs, world_size: int, times: ModelTimes, link: LinkCost
    ) -> PlanSearch:
        """Returns a new search.

        Args:
            tensors: All tensors of the optimizer.
            world_size: Number of ranks.
            times: Measured times of a step without communication.
            link: Measured costs of collectives.
        """


class NoContest:
    """A `PlanSearch` that is over from the beginning: one plan, which is used without measuring it.

    Args:
        plan: Plan to use.
        reason: One line for people.
    """

    def __init__(self, plan: BucketPlan, reason: str) -> None:
        self.best = plan
        self.reason = reason

    def next(self) -> BucketPlan | None:
        """Returns None: no plan is to be measured."""
        return None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Ignores the measurement, as there is only one plan."""


@dataclass(eq=False)
class Contest(PlanSearch):
    """A `PlanSearch` that measures all plans once, and the incumbent and the two best others again.

    The two measurements of a plan are apart in time, so that a passing disturbance does not decide.

    Attributes:
        incumbent: Plan that is used unless the mean of another plan's measurements is lower.
        others: Plans to compare with the incumbent; distinct, and without the incumbent.
        step_s: Function that predicts the seconds of a step with a plan.
        plans: All plans, the incumbent first.
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
        """Returns the plan to measure next. None means that the search is over."""
        if not self._queue and not self._is_repeating:
            self._is_repeating = True
            others = sorted(self.plans[1:], key=self.mean_s)[: NUM_REPEATED - 1]
            # The incumbent is measured between the two others, close in time to both.
            self._queue = [*others[:1], self.incumbent, *others[1:]] if others else []
        return self._queue[0] if self._queue else None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Notes a measurement, also of a plan that `next` has not returned."""
        self._measured[plan].append(step_s)
        # A plan that `next` has not returned stays in the queue.
        if self._queue and self._queue[0] == plan:
            self._queue.pop(0)

    def mean_s(self, plan: BucketPlan) -> float:
        """Returns the mean of a plan's measurements in seconds; infinity if it was not measured."""
        steps_s = self._measured[plan]
        return sum(steps_s) / len(steps_s) if steps_s else float("inf")

    def count(self, plan: BucketPlan) -> int:
        """Returns how often a plan has been measured."""
        return len(self._measured[plan])

    @property
    def best(self) -> BucketPlan:
        """Returns the plan with the lowest mean, of those that were measured twice.

        Returns the incumbent if no plan was measured twice.
        """
        twice = [plan for plan in self.plans if self.count(plan) > 1]
        # `min` returns the first of equal plans: the incumbent, if it is among them.
        return min(twice, key=self.mean_s, default=self.incumbent)


class StepModelPlanner(ABC):
    """Base of searching planners that get all measurements as one `StepModel`."""

    def search(
        self,
        tensors: Specs,
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> PlanSearch:
        """Returns a new search; see `SearchingPlanner`."""
        return self.search_for(StepModel(tensors, world_size, times, link, codecs))

    @abstractmethod
    def search_for(self, model: StepModel) -> PlanSearch:
        """Returns a new search, given the measurements as a `StepModel`."""


class PredictingPlanner(StepModelPlanner):
    """Base of planners that decide by predictions, usually without measuring any plan.

    Training begins with `ThresholdFusion`'s buckets, until times have been measured.

    Attributes:
        name: Name of the planner, as the option `fusion` takes it.
    """

    name: ClassVar[str]

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan with which training begins: see `FusionPlanner`."""
        return ThresholdFusion().plan(tensors, world_size)

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """Returns a search that is over, whose plan is `best_plan`; subclasses may change that."""
        best = self.best_plan(model)
        predicted = f"predicted {1e3 * model.step_s(best):.3g} ms/step"
        return NoContest(best, f"{self.name}: {described(best)}, {predicted}")

    @abstractmethod
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that the planner makes from the measurements. Pure."""


def described(plan: BucketPlan) -> str:
    """Returns a description of the plan's buckets for people, such as `6 buckets of 2-8 MiB`."""
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
