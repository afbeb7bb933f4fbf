"""What a planner offers that wants times, or measurements of its candidates, before it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from lightning_dear.planning.codec_cost import NO_CODEC, CodecCosts
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.fusion import FusionPlanner, ThresholdFusion
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.predict import predict
from lightning_dear.planning.times import ModelTimes

NUM_PROFILED_STEPS = 3
"""Steps whose times are measured before a search begins."""

NUM_DROPPED_STEPS = 2
"""Steps after a change of plan that are not counted."""

NUM_MEASURED_STEPS = 5
"""Steps whose time is a candidate's measurement."""

STEPS_PER_TRIAL = NUM_DROPPED_STEPS + NUM_MEASURED_STEPS
STEPS_BEFORE_SEARCH = 1 + NUM_PROFILED_STEPS
"""The recorded step, and those that are profiled."""


class PlanSearch(Protocol):
    """A search for the plan with the shortest step; pure: whoever drives it measures.

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
        """The plan to measure next, perhaps once more; None when the search is over."""

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """Notes that the slowest rank took `step_s` seconds a step with `plan`."""


@runtime_checkable
class SearchingPlanner(FusionPlanner, Protocol):
    """A planner whose `plan` is only where it starts from.

    One whose class says `plans_for_codecs = True` may be used with a compressor, and its `search`
    is then given the `CodecCosts` as a fifth argument.
    """

    def search(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
    ) -> PlanSearch:
        """Begins a search with what was measured."""


class CodecPlanner(SearchingPlanner, Protocol):
    """One that may be used with a compressor."""

    plans_for_codecs: bool

    def search(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = ...,
    ) -> PlanSearch:
        """Begins a search with what was measured, the costs of encoding among it."""


class NoContest:
    """The `PlanSearch` of a planner whose one plan is applied without measuring it."""

    def __init__(self, plan: BucketPlan, reason: str) -> None:
        self.best = plan
        self.reason = reason

    def next(self) -> BucketPlan | None:
        """See `PlanSearch`."""
        return None

    def tell(self, plan: BucketPlan, step_s: float) -> None:
        """See `PlanSearch`; there is nothing to learn."""


def starting_plan(tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
    """What searching planners train with until they know times: `ThresholdFusion`'s defaults."""
    return ThresholdFusion().plan(tensors, world_size)


class PredictingPlanner(ABC):
    """A planner that decides by predictions: its one plan is applied as it is, unless it says else.

    Until there are times it trains with `ThresholdFusion`'s buckets.

    Attributes:
        name: In the table of planners.
    """

    name: ClassVar[str]

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        """See `FusionPlanner`: what to start with."""
        return starting_plan(tensors, world_size)

    def search(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> PlanSearch:
        """See `SearchingPlanner`."""
        plan = self.best_plan(tensors, world_size, times, link, codecs)
        step_s = predict(plan, tensors, times, link, codecs).step_s
        what = described(plan, tensors)
        return NoContest(plan, f"{self.name}: {what}, predicted {1e3 * step_s:.3g} ms/step")

    @abstractmethod
    def best_plan(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> BucketPlan:
        """The plan that the planner makes of what was measured; pure."""


def described(plan: BucketPlan, tensors: Sequence[TensorSpec]) -> str:
    """`6 buckets of 2-8 MiB`, for people."""
    itemsize = {tensor.index: tensor.itemsize for tensor in tensors}
    sizes_mb = [
        bucket.numel * itemsize[bucket.slices[0].tensor] / (1 << 20) for bucket in plan.buckets
    ]
    sizes = f"{min(sizes_mb):.2g}-{max(sizes_mb):.2g} MiB"
    rest = ""
    for named, what in (plan.all_reduced, "all-reduced"), (plan.uncompressed, "uncompressed"):
        count = "all" if len(named) == len(plan.buckets) else f"{len(named)} of them"
        rest += f", {count} {what}" if named else ""
    if len(sizes_mb) == 1:
        return f"1 bucket of {max(sizes_mb):.3g} MiB{rest}"
    early = f", {len(plan.early)} of them gathered in backward" if plan.early else ""
    return f"{len(sizes_mb)} buckets of {sizes}{early}{rest}"
