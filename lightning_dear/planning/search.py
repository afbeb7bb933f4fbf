"""Interfaces and base classes of planners that need measured times, or measured steps of plans.

`lightning_dear/tuning` measures for them while training runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from typing_extensions import override

from lightning_dear.planning import fusion, measured
from lightning_dear.planning.plan import BucketPlan, Specs
from lightning_dear.planning.predict import StepModel

NUM_PROFILED_STEPS = 3
"""Number of steps whose compute times are measured before a search begins (profiled steps)."""

NUM_DROPPED_STEPS = 2
"""Number of steps at the beginning of each measurement of a plan that do not count."""

NUM_MEASURED_STEPS = 5
"""Number of steps whose median time is one measurement of a plan."""

STEPS_PER_TRIAL = NUM_DROPPED_STEPS + NUM_MEASURED_STEPS
"""Number of steps that one measurement of a plan takes."""

STEPS_BEFORE_SEARCH = 1 + NUM_PROFILED_STEPS
"""Number of steps before a search begins: the recorded step (the first one) and the profiled
steps. With a compressor, `STEPS_PER_TRIAL` further steps may come before the search."""

NUM_REPEATED = 3
"""Number of plans that a `Contest` measures twice: the incumbent and the two best others."""


class PlanSearch(Protocol):
    """Search for the plan with the shortest step. It measures nothing itself: the caller does.

    The caller calls `next`, trains some steps with the returned plan, and calls `tell` with the
    measured time. It repeats this until `next` returns None. Then it uses `best`. A search is pure:
    it touches no tensors and does not communicate.

    Attributes:
        best: Plan to use if no further plan is measured.
        reason: One line for people that says what `best` is, and why.
    """

    @property
    def best(self) -> BucketPlan:
        """Returns the plan to use: the best of the measured plans.

        Before enough is measured, returns a plan that is never a bad choice, such as fixed buckets.
        """

    @property
    def reason(self) -> str:
        """Returns one line for people that says what `best` is, and why."""

    def next(self) -> BucketPlan | None:
        """Returns the plan to measure next, perhaps one that was measured before.

        None means that the search is over.
        """

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Stores a measurement.

        Args:
            plan: Plan with which steps were trained.
            step_s: Seconds of a step of the slowest rank.
        """


@runtime_checkable
class SearchingPlanner(fusion.FusionPlanner, Protocol):
    """Interface of planners that search while training runs.

    Their `plan` returns the plan with which training begins, and `search` finds the plan to use
    later. A planner whose class has `plans_for_codecs = True` may be used with a compressor. With a
    compressor, its `search` gets the `CodecCosts` as a fifth argument.
    """

    def search(
        self, tensors: Specs, world_size: int, times: measured.ModelTimes, link: measured.LinkCost
    ) -> PlanSearch:
        """Returns a new search.

        Args:
            tensors: All tensors of the optimizer.
            world_size: Number of ranks.
            times: Measured times of a step without communication.
            link: Measured costs of collectives.
        """


class NoContest(NamedTuple):
    """A `PlanSearch` that is over from the beginning: its plan is used without measuring it.

    Attributes:
        best: Plan to use.
        reason: One line for people that says what `best` is, and why.
    """

    best: BucketPlan
    reason: str

    def next(self) -> BucketPlan | None:
        """Returns None: no plan is to be measured."""
        return None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Does nothing, since there is only one plan."""


@dataclass(eq=False)
class Contest(PlanSearch):
    """A `PlanSearch` that measures all plans once, and the incumbent and the two best others again.

    The two measurements of a plan are apart in time, so that a passing disturbance does not decide.

    Attributes:
        incumbent: Plan that is used unless another plan was measured twice, too, and the mean of
            its measurements is lower.
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

    def next(self) -> BucketPlan | None:
        """Returns the plan to measure next: the same again until `tell` is called with it.

        None means that the search is over.
        """
        if not self._queue and not self._is_repeating:
            self._is_repeating = True
            others = sorted(self.plans[1:], key=self.mean_s)[: NUM_REPEATED - 1]
            # The incumbent is measured between the two others, close in time to both.
            self._queue = [*others[:1], self.incumbent, *others[1:]] if others else []
        return self._queue[0] if self._queue else None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Stores a measurement of one of `plans`, also if `next` has not returned that plan.

        Raises:
            KeyError: If `plan` is none of `plans`.
        """
        self._measured[plan].append(step_s)
        # Only a plan that `next` has returned leaves the queue. Others will still be measured.
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
        # If several plans have the lowest mean, `min` returns the first: the incumbent, if it is
        # one of them.
        return min(twice, key=self.mean_s, default=self.incumbent)


class StepModelPlanner(ABC):
    """Base of searching planners that get all measurements as one `StepModel`."""

    def search(
        self,
        tensors: Specs,
        world_size: int,
        times: measured.ModelTimes,
        link: measured.LinkCost,
        codecs: measured.CodecCosts = measured.NO_CODEC,
    ) -> PlanSearch:
        """Returns a new search; see `SearchingPlanner`.

        Args:
            tensors: All tensors of the optimizer.
            world_size: Number of ranks.
            times: Measured times of a step without communication.
            link: Measured costs of collectives.
            codecs: Measured costs of the codec. The default stands for no codec.
        """
        return self.search_for(StepModel(tensors, world_size, times, link, codecs))

    @abstractmethod
    def search_for(self, model: StepModel) -> PlanSearch:
        """Returns a new search, given the measurements as a `StepModel`."""


class PredictingPlanner(StepModelPlanner):
    """Base of planners that decide by predictions, usually without measuring any plan.

    Training begins with the buckets of `ThresholdFusion`. Once times and costs have been measured,
    the planner decides.

    Attributes:
        name: Name of the planner, as the option `fusion` takes it.
    """

    name: ClassVar[str]

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan with which training begins: see `FusionPlanner`."""
        return fusion.ThresholdFusion().plan(tensors, world_size)

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """Returns a search that is over from the beginning, and whose plan is `best_plan`.

        Subclasses may return a search that measures plans.
        """
        best = self.best_plan(model)
        predicted = f"predicted {1e3 * model.step_s(best):.3g} ms/step"
        return NoContest(best, f"{self.name}: {described(best)}, {predicted}")

    @abstractmethod
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that the planner makes from the measurements. Pure."""


def described(plan: BucketPlan) -> str:
    """Returns a description of the plan's buckets for people, such as `6 buckets of 2-8 MiB`."""
    sizes_mb = [bucket.stepped_bytes / fusion.MIB for bucket in plan.buckets]
    rest = ""
    for named, what in (plan.all_reduced, "all-reduced"), (plan.uncompressed, "uncompressed"):
        count = "all" if len(named) == len(plan.buckets) else f"{len(named)} of them"
        rest += f", {count} {what}" if named else ""
    if len(sizes_mb) == 1:
        return f"1 bucket of {max(sizes_mb):.3g} MiB{rest}"
    return f"{len(sizes_mb)} buckets of {min(sizes_mb):.2g}-{max(sizes_mb):.2g} MiB{rest}"
