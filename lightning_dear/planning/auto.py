"""Measures the most promising plans against the fixed one, and keeps that unless one is faster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from lightning_dear.planning.all_reduce import choose_all_reduce, everything_all_reduced
from lightning_dear.planning.bayesian import cap_plans
from lightning_dear.planning.contest import NUM_REPEATED, Contest, distinct
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import SingleFusion, ThresholdFusion
from lightning_dear.planning.mergecomp import MergeCompFusion
from lightning_dear.planning.plan import BucketPlan, TensorSpec, same_buckets
from lightning_dear.planning.predict import predict
from lightning_dear.planning.search import (
    STEPS_BEFORE_SEARCH,
    STEPS_PER_TRIAL,
    PlanSearch,
    described,
)
from lightning_dear.planning.times import ModelTimes

_CAP_RANGE = (1 / 32, 32.0)
"""Of the fixed buckets' cap: 0.25 to 256 MiB at two ranks."""

_MIN_GAIN = 5e-3
"""Share of the step by which predictions must differ."""

_MIN_CAP_RATIO = 2.0
_MAX_SINGLE_RATIO = 1.3
_MAX_DDP_RATIO = 1.2
_DDP_DIVISORS = (1, 4, 16)
"""Of DDP's caps, which leave small models one bucket or two."""


class AutoFusion:
    """Predicts plans from the measured times, measures the best on real steps, keeps the fastest.

    Against each other stand `ThresholdFusion`'s buckets (always), those of `MergeCompFusion`, the
    caps with the shortest predicted steps, and one bucket for all if it is predicted to be not far
    behind. If all-reducing some buckets is predicted to be better than any of these, that is
    measured too. The fixed buckets and the two best others are measured twice, apart in time, so
    that a passing disturbance does not decide; the fixed ones stay unless another plan's mean is
    lower.

    Args:
        num_steps: Optimizer steps that all of it may take, the recorded and profiled ones included.
        bucket_cap_mb: Of the fixed buckets, MiB; see `ThresholdFusion`. Other caps are looked for
            between a 32nd and 32 times as much.
        first_bucket_cap_mb: Of the fixed bucket nearest the input, MiB.
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
        self.num_steps = num_steps
        self.bucket_cap_mb = bucket_cap_mb
        self.first_bucket_cap_mb = first_bucket_cap_mb
        self.all_reduced_share = all_reduced_share
        # Refuses caps that make no buckets.
        self._fixed()

    def _fixed(self) -> ThresholdFusion:
        return ThresholdFusion(
            bucket_cap_mb=self.bucket_cap_mb, first_bucket_cap_mb=self.first_bucket_cap_mb
        )

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        """See `FusionPlanner`: what to start with, and to beat."""
        return self._fixed().plan(tensors, world_size)

    def search(
        self, tensors: Sequence[TensorSpec], world_size: int, times: ModelTimes, link: LinkCost
    ) -> PlanSearch:
        """See `SearchingPlanner`."""
        fixed = self.plan(tensors, world_size)
        num_trials = (self.num_steps - STEPS_BEFORE_SEARCH) // STEPS_PER_TRIAL
        first_mb, cap_mb = self._fixed().caps_mb(world_size)
        least, most = (cap_mb * factor for factor in _CAP_RANGE)
        others = cap_plans(tensors, world_size, least, most, first_mb)

        def step_s(plan: BucketPlan) -> float:
            return predict(plan, tensors, times, link).step_s

        found = _candidates(fixed, others, tensors, times, link, step_s)
        without: dict[BucketPlan, BucketPlan] = {}
        if times.allows_all_reduce and self.all_reduced_share > 0 and world_size > 1:
            share = self.all_reduced_share
            without = _all_reducing([fixed, *found[:3]], tensors, times, link, share, step_s)
            # Beside each of them what it is compared with.
            pairs = [plan for pair in without.items() for plan in pair]
            found = [*found[:1], *pairs, *found[1:]]
        candidates = distinct([fixed, *found])[1:]
        num_candidates = max(num_trials - 1 - NUM_REPEATED, 1)
        return AutoSearch(fixed, candidates[:num_candidates], tensors, without, step_s)


StepOf = Callable[[BucketPlan], float]
"""A plan -> its predicted step, seconds."""


def _all_reducing(
    plans: Sequence[BucketPlan],
    tensors: Sequence[TensorSpec],
    times: ModelTimes,
    link: LinkCost,
    max_share: float,
    step_s: StepOf,
) -> dict[BucketPlan, BucketPlan]:
    """What to try with all-reduced buckets -> the same without; the most promising first."""
    found: dict[BucketPlan, BucketPlan] = {}
    changed = {choose_all_reduce(plan, tensors, times, link, max_share): plan for plan in plans}
    best = min(changed, key=step_s)
    if best.all_reduced and step_s(best) < min(map(step_s, plans)):
        found[best] = changed[best]
    if max_share == 1:
        everything = min(
            (everything_all_reduced(tensors, plans[0].world_size, one) for one in _DDP_DIVISORS),
            key=step_s,
        )
        is_near = step_s(everything) <= _MAX_DDP_RATIO * min(map(step_s, [*plans, *found]))
        if is_near and not any(same_buckets(everything, plan) for plan in found):
            found[everything] = plans[0]
    return found


def _candidates(
    fixed: BucketPlan,
    others: Mapping[float, BucketPlan],
    tensors: Sequence[TensorSpec],
    times: ModelTimes,
    link: LinkCost,
    step_s: StepOf,
) -> list[BucketPlan]:
    """What to try against `fixed`, the most promising first; perhaps some of it twice."""
    world_size = fixed.world_size
    programme = MergeCompFusion().best_plan(tensors, world_size, times, link)
    by_cap = {cap_mb: choose_early(plan, tensors, times, link) for cap_mb, plan in others.items()}
    single = SingleFusion().plan(tensors, world_size)
    best_s = min(map(step_s, by_cap.values()))
    found = [programme]
    # Of equally good ones those with fewer messages.
    order = sorted(
        by_cap, key=lambda cap_mb: (_gains_lost(step_s(by_cap[cap_mb]), best_s), -cap_mb)
    )
    apart: list[float] = []
    for cap_mb in order:
        if all(max(cap_mb, one) >= _MIN_CAP_RATIO * min(cap_mb, one) for one in apart):
            apart.append(cap_mb)
    found += [by_cap[cap_mb] for cap_mb in apart[:2]]
    if step_s(single) <= _MAX_SINGLE_RATIO * min(map(step_s, [fixed, *found])):
        found.append(single)
    return found + [by_cap[cap_mb] for cap_mb in apart[2:]]


def _gains_lost(step_s: float, best_s: float) -> int:
    if step_s <= best_s:
        return 0
    # Where the best takes no time, whatever takes any is worse than all that does not.
    return int((step_s / best_s - 1) / _MIN_GAIN) if best_s else sys.maxsize


class AutoSearch(Contest):
    """See `PlanSearch`: candidates against the fixed plan.

    Args:
        fixed: What to beat.
        candidates: What may beat it; distinct, and none of them `fixed`.
        tensors: What the plans are made of.
        without: Candidate with all-reduced buckets -> what it is compared with.
        step_s: Predicts a plan's step, for the reason.
    """

    def __init__(
        self,
        fixed: BucketPlan,
        candidates: Sequence[BucketPlan],
        tensors: Sequence[TensorSpec],
        without: Mapping[BucketPlan, BucketPlan] | None = None,
        step_s: StepOf | None = None,
    ) -> None:
        super().__init__(fixed, candidates)
        self._tensors = tensors
        self._without = without or {}
        self._predicted_s = step_s

    @property
    @override
    def reason(self) -> str:
        """See `PlanSearch`."""
        best, fixed, fixed_ms = self.best, self.incumbent, 1e3 * self.mean_s(self.incumbent)
        what = f"auto: {described(best, self._tensors)}"
        if not self.num_measured:
            return f"{what}, nothing measured"
        if best is fixed:
            others = f"none of {self.num_measured - 1} others was faster"
            return f"{what} of {best.name} stay: {fixed_ms:.4g} ms/step, {others}"
        against = f"against {fixed_ms:.4g} ms of {fixed.name}"
        reason = f"{what}, {1e3 * self.mean_s(best):.4g} ms/step {against}"
        return f"{reason}{self._why_all_reduced(best)}"

    def _why_all_reduced(self, best: BucketPlan) -> str:
        without = self._without.get(best)
        if without is None or without is self.incumbent:
            return ""
        measured = [plan for plan in self.plans if same_buckets(plan, without)]
        if measured and self.count(measured[0]):
            return f", {1e3 * self.mean_s(measured[0]):.4g} ms without all-reduces"
        if self._predicted_s is None:
            return ""
        steps_s = self._predicted_s(best), self._predicted_s(without)
        with_ms, without_ms = (f"{1e3 * one:.4g}" for one in steps_s)
        return f"; predicted {with_ms} ms, {without_ms} without all-reduces"
