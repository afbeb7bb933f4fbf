"""Measures the most promising plans against the fixed one, and keeps that unless one is faster."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from lightning_dear.planning.all_reduce import choose_all_reduce, everything_all_reduced
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import SingleFusion, ThresholdFusion
from lightning_dear.planning.plan import BucketPlan, distinct
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.predicting import MergeCompFusion
from lightning_dear.planning.search import (
    NUM_REPEATED,
    STEPS_BEFORE_SEARCH,
    STEPS_PER_TRIAL,
    Contest,
    PlanSearch,
    StepModelPlanner,
    described,
)

_CAP_RANGE = (1 / 32, 32.0)
"""Caps that are tried, as shares of the fixed buckets': 0.25 to 256 MiB at two ranks."""

_MIN_GAIN = 5e-3
"""Share of the step by which predictions must differ."""

_MIN_CAP_RATIO = 2.0
_MAX_SINGLE_RATIO = 1.3
_MAX_DDP_RATIO = 1.2
_DDP_DIVISORS = (1, 4, 16)
"""What DDP's caps are divided by, as they leave small models one bucket or two."""


class AutoFusion(ThresholdFusion, StepModelPlanner):
    """Predicts plans from the measured times, measures the best on real steps, keeps the fastest.

    Against each other stand `ThresholdFusion`'s buckets (always), those of `MergeCompFusion`, the
    caps with the shortest predicted steps, and one bucket for all if it is predicted to be not far
    behind. If all-reducing some buckets is predicted to be better than any of these, that is
    measured too. The fixed buckets and the two best others are measured twice, apart in time, so
    that a passing disturbance does not decide; the fixed ones stay unless another plan's mean is
    lower.

    Args:
        num_steps: Optimizer steps that all of it may take, the recorded and profiled ones included.
        bucket_cap_mb: Cap of the fixed buckets, MiB; see `ThresholdFusion`. Other caps are looked
            for between a 32nd and 32 times as much.
        first_bucket_cap_mb: Cap of the fixed bucket nearest the input, MiB.
        all_reduced_share: Most of all elements, 0..1, that may be all-reduced instead of sharded:
            their optimizer state is then whole on every rank. 0 forbids it; at 1, everything
            all-reduced in DDP's buckets (or, for small models, smaller ones) is measured as well if
            it is predicted to be not far behind.

    Raises:
        ValueError: If the steps are too few to compare two plans, a cap is not positive, or the
            share is not 0..1.
    """

    name = "auto"

    def __init__(
        self,
        *,
        num_steps: int = 60,
        bucket_cap_mb: float | None = None,
        first_bucket_cap_mb: float = 1.0,
        all_reduced_share: float = 0.1,
    ) -> None:
        least = STEPS_BEFORE_SEARCH + 4 * STEPS_PER_TRIAL
        if num_steps < least:
            raise ValueError(f"num_steps must be >= {least}, got {num_steps}.")
        if not 0 <= all_reduced_share <= 1:
            raise ValueError(f"all_reduced_share must be 0..1, got {all_reduced_share}.")
        # The order of attributes is that in which plans found before name their planner's options.
        self.num_steps = num_steps
        super().__init__(bucket_cap_mb=bucket_cap_mb, first_bucket_cap_mb=first_bucket_cap_mb)
        self.all_reduced_share = all_reduced_share

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """See `SearchingPlanner`; `plan` makes what is to be beaten."""
        tensors, world_size = model.tensors, model.world_size
        fixed = self.plan(tensors, world_size)
        _, cap_mb = self.caps_mb(world_size)
        least_mb, most_mb = (cap_mb * factor for factor in _CAP_RANGE)
        others = self.plans_of_caps(tensors, world_size, least_mb, most_mb)
        candidates = _candidates(fixed, others, model)
        without: dict[BucketPlan, BucketPlan] = {}
        if model.times.allows_all_reduce and self.all_reduced_share > 0 and world_size > 1:
            without = _all_reducing([fixed, *candidates[:3]], model, self.all_reduced_share)
            # Beside each of them what it is compared with.
            pairs = [plan for pair in without.items() for plan in pair]
            candidates = [*candidates[:1], *pairs, *candidates[1:]]
        num_trials = (self.num_steps - STEPS_BEFORE_SEARCH) // STEPS_PER_TRIAL
        # All are measured once, the fixed plan among them, and some once more.
        num_candidates = max(num_trials - 1 - NUM_REPEATED, 1)
        _, *candidates = distinct([fixed, *candidates])
        return AutoSearch(fixed, candidates[:num_candidates], model.step_s, without)


def _all_reducing(
    plans: Sequence[BucketPlan], model: StepModel, max_share: float
) -> dict[BucketPlan, BucketPlan]:
    """What to try with all-reduced buckets -> the same without; the most promising first."""
    tensors, step_s = model.tensors, model.step_s
    chosen: dict[BucketPlan, BucketPlan] = {}
    changed = {
        choose_all_reduce(plan, tensors, model.times, model.link, max_share): plan for plan in plans
    }
    best = min(changed, key=step_s)
    if best.all_reduced and step_s(best) < min(map(step_s, plans)):
        chosen[best] = changed[best]
    if max_share == 1:
        everything = min(
            (everything_all_reduced(tensors, model.world_size, d) for d in _DDP_DIVISORS),
            key=step_s,
        )
        is_near = step_s(everything) <= _MAX_DDP_RATIO * min(map(step_s, [*plans, *chosen]))
        if is_near and not any(map(everything.has_buckets_of, chosen)):
            chosen[everything] = plans[0]
    return chosen


def _candidates(
    fixed: BucketPlan, others: Mapping[float, BucketPlan], model: StepModel
) -> list[BucketPlan]:
    """What to try against `fixed`, the most promising first; perhaps some of it twice."""
    tensors, known, step_s = model.tensors, (model.times, model.link), model.step_s
    programme = MergeCompFusion().best_plan(model)
    by_cap = {cap_mb: choose_early(plan, tensors, *known) for cap_mb, plan in others.items()}
    steps_s = {cap_mb: step_s(plan) for cap_mb, plan in by_cap.items()}
    best_s = min(steps_s.values())
    # Of equally good ones those with fewer messages.
    order = sorted(by_cap, key=lambda cap_mb: (_gains_lost(steps_s[cap_mb], best_s), -cap_mb))
    # Neighbouring caps make much the same buckets: measuring both would teach little.
    apart: list[float] = []
    for cap_mb in order:
        if all(max(cap_mb, cap) >= _MIN_CAP_RATIO * min(cap_mb, cap) for cap in apart):
            apart.append(cap_mb)
    chosen = [programme, *(by_cap[cap_mb] for cap_mb in apart[:2])]
    single = SingleFusion().plan(tensors, model.world_size)
    if step_s(single) <= _MAX_SINGLE_RATIO * min(map(step_s, [fixed, *chosen])):
        chosen.append(single)
    return chosen + [by_cap[cap_mb] for cap_mb in apart[2:]]


def _gains_lost(step_s: float, best_s: float) -> int:
    if step_s <= best_s:
        return 0
    # Where the best takes no time, whatever takes any is worse than all that does not.
    return int((step_s / best_s - 1) / _MIN_GAIN) if best_s else sys.maxsize


@dataclass(eq=False)
class AutoSearch(Contest):
    """See `PlanSearch`: candidates against the fixed plan, which is the incumbent.

    Attributes:
        without: Candidate with all-reduced buckets -> what it is compared with.
    """

    without: Mapping[BucketPlan, BucketPlan] = field(default_factory=dict)

    @property
    @override
    def reason(self) -> str:
        """See `PlanSearch`."""
        best, fixed, fixed_ms = self.best, self.incumbent, 1e3 * self.mean_s(self.incumbent)
        what = f"auto: {described(best)}"
        if not self.num_measured:
            return f"{what}, nothing measured"
        if best is fixed:
            others = f"none of {self.num_measured - 1} others was faster"
            return f"{what} of {best.name} stay: {fixed_ms:.4g} ms/step, {others}"
        against = f"against {fixed_ms:.4g} ms of {fixed.name}"
        reason = f"{what}, {1e3 * self.mean_s(best):.4g} ms/step {against}"
        return f"{reason}{self._why_all_reduced(best)}"

    def _why_all_reduced(self, best: BucketPlan) -> str:
        without = self.without.get(best)
        if without is None or without is self.incumbent:
            return ""
        measured = [plan for plan in self.plans if plan.has_buckets_of(without)]
        if measured and self.count(measured[0]):
            return f", {1e3 * self.mean_s(measured[0]):.4g} ms without all-reduces"
        # It was crowded out by better candidates, so only its prediction is known.
        with_ms, without_ms = (f"{1e3 * self.step_s(plan):.4g}" for plan in (best, without))
        return f"; predicted {with_ms} ms, {without_ms} without all-reduces"
