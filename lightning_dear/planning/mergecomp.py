"""MergeComp's problem, which buckets make the shortest step, solved by an exact programme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from typing_extensions import override

from lightning_dear.planning.dynamic_programme import Grouping, best_groupings
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import (
    FusionPlanner,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
    fuse_groups,
)
from lightning_dear.planning.heuristics import MergeCompHeuristicFusion, best_cuts
from lightning_dear.planning.plan import MAX_BUCKETS, BucketPlan, distinct, with_whole_tensors
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import Contest, PlanSearch, PredictingPlanner, described
from lightning_dear.planning.step_recurrence import Course, courses_of, members_of

_SHARES = (1, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Shares of all bytes that a bucket may hold."""

_MIN_GAIN = 2e-3
"""Share of the step that more buckets must gain: each costs the host work, which no link shows."""

_SLACK = 1.05
"""How much longer than a known step one may be for the programme: `predict` knows other families,
and in which order forward really reads."""

_NUM_NEAREST = 2
"""Measured plans that tell how far another one's prediction is off."""

_Group = tuple[list[int], bool]
"""Tensors of a bucket, and whether it is left uncompressed."""


class MergeCompFusion(PredictingPlanner):
    """The buckets with the shortest predicted step, by an exact dynamic programme.

    What MergeComp (arXiv 2103.15195) searches for with measured steps. Needs measured times: until
    then it trains with `ThresholdFusion`'s buckets. No fixed rule, nor MergeComp's own search, is
    predicted to be faster, and its plan is used without being measured against others.

    With a compressor it also says which buckets travel as they are, from what encoding and decoding
    cost. Those share the host with messages, which no prediction sees to the last percent: so
    simpler plans are measured against it, and it stays unless one of them is faster: that of
    MergeComp's own search, one bucket for all, and, where buckets may be left uncompressed,
    `ThresholdFusion`'s without any compression.

    The programme cuts no tensor. Tensors of different families are planned one after the other,
    each beside the plans of the others.

    Args:
        max_pieces: Smallest neighbours are joined beforehand until there are at most so many
            tensors; the time to plan grows with the square of it.

    Raises:
        ValueError: If `max_pieces` is below 1.
    """

    name = "mergecomp"
    plans_for_codecs = True

    def __init__(self, *, max_pieces: int = 128) -> None:
        if max_pieces < 1:
            raise ValueError(f"max_pieces must be >= 1, got {max_pieces}.")
        self.max_pieces = max_pieces

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """The plan that is predicted fastest, of all unbeaten groupings and of simpler plans.

        Of several as fast that with the fewest buckets. Without a codec, early gathers are
        chosen for each, and a plan counts as fast that is nearly so.

        The programme knows nothing of early gathers, which small buckets suit better: so it is run
        again with groups of at most 1/8 to 1/64 of all bytes. The times are those without encoding.
        """
        courses = courses_of(model, self.max_pieces)
        chosen: list[list[_Group]] = [
            [(group, False) for group in members_of(course.pieces, [len(course.pieces)])]
            for course in courses
        ]
        for family, course in enumerate(courses):
            plans: dict[BucketPlan, list[_Group]] = {}
            before = chosen[family]
            for grouping in _groupings(course, allows_early=_allows_early(model)):
                members = members_of(course.pieces, grouping.cuts)
                chosen[family] = list(zip(members, grouping.uncompressed, strict=True))
                plans.setdefault(_plan_of(chosen, model), chosen[family])
            # None, if what is kept of thousands of ways takes longer than the known step.
            chosen[family] = plans[_fastest(plans, model)] if plans else before
        best = _fastest([_plan_of(chosen, model), *_simple_plans(model)], model)
        return replace(best, name=self.name)

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """As inherited; with a codec, what is measured decides."""
        if model.codecs.are_none:
            return super().search_for(model)
        best, *others = distinct([self.best_plan(model), *_simpler_plans(model)])
        return MergeCompSearch(best, others, model.step_s, model.codecs.fitted_to)


def _allows_early(model: StepModel) -> bool:
    # No codec is there for early buckets, in training or in `predict`.
    return model.times.allows_early and model.codecs.are_none


def _groupings(course: Course, *, allows_early: bool) -> list[Grouping]:
    if not allows_early:
        known_s = _SLACK * course.step_s(best_cuts(course))
        return best_groupings(course, known_s=known_s)
    # Early gathers may make the best of what would take longer without them.
    most_bytes = [share * course.total[-1] for share in _SHARES]
    return [grouping for most in most_bytes for grouping in best_groupings(course, most)]


def _plan_of(chosen: Sequence[Sequence[_Group]], model: StepModel) -> BucketPlan:
    groups = [group for family in chosen for group in family]
    plan = fuse_groups("", model.tensors, model.world_size, [group for group, _ in groups])
    # Buckets are in another order than groups; any of its tensors tells which one it is.
    left = {index for group, is_left in groups if is_left for index in group}
    uncompressed = (
        number for number, bucket in enumerate(plan.buckets) if bucket.slices[0].tensor in left
    )
    return _with_early(replace(plan, uncompressed=tuple(uncompressed)), model)


def _simpler_plans(model: StepModel) -> list[BucketPlan]:
    """What MergeComp's own search finds, one bucket for all, and what needs no compressor."""
    plans = [MergeCompHeuristicFusion().best_plan(model), _plan_by(SingleFusion(), model)]
    if model.codecs.may_mix:
        threshold = _uncompressed(_plan_by(ThresholdFusion(), model))
        plans.append(replace(threshold, name="threshold_uncompressed"))
    return plans


def _simple_plans(model: StepModel) -> list[BucketPlan]:
    """What fixed rules make, compressed and not, and what MergeComp's own search finds."""
    plans = [_plan_by(rule, model) for rule in (SingleFusion(), NoFusion(), ThresholdFusion())]
    if model.codecs.may_mix:
        plans += [_uncompressed(plan) for plan in plans]
    plans.append(MergeCompHeuristicFusion().best_plan(model))
    return [_with_early(plan, model) for plan in plans if len(plan.buckets) <= MAX_BUCKETS]


def _plan_by(rule: FusionPlanner, model: StepModel) -> BucketPlan:
    plan = rule.plan(model.tensors, model.world_size)
    return plan if model.times.allows_cuts else with_whole_tensors(plan, model.tensors)


def _with_early(plan: BucketPlan, model: StepModel) -> BucketPlan:
    if not _allows_early(model):
        return plan
    return choose_early(plan, model.tensors, model.times, model.link)


def _fastest(plans: Iterable[BucketPlan], model: StepModel) -> BucketPlan:
    steps_s = {plan: model.step_s(plan) for plan in plans}
    # With a codec, what a bucket costs the host has been measured.
    enough_s = (1 + _MIN_GAIN * model.codecs.are_none) * min(steps_s.values())
    good = [plan for plan, step_s in steps_s.items() if step_s <= enough_s]
    return min(good, key=lambda plan: (len(plan.buckets), steps_s[plan]))


def _uncompressed(plan: BucketPlan) -> BucketPlan:
    return replace(plan, uncompressed=tuple(range(len(plan.buckets))))


@dataclass(eq=False)
class MergeCompSearch(Contest):
    """See `PlanSearch`: the programme's plan, which is the incumbent, against simpler ones.

    Attributes:
        fitted_to: A plan that takes what `step_s` says, if one was measured before.
    """

    fitted_to: BucketPlan | None = None

    def expected_s(self, plan: BucketPlan) -> float:
        """The step of `plan`, seconds, as far as others tell: its own measurements have no say.

        Its prediction, and what the two other measured plans with the nearest predictions took
        beyond theirs, on average: several buckets take more beyond theirs than a single one.
        """
        predicted_s = self.step_s(plan)
        measured = [other for other in self.plans if self.count(other)]
        known = [
            (self.step_s(other), self.mean_s(other) - self.step_s(other))
            for other in measured
            if other is not plan
        ]
        start = self.fitted_to
        if start is not None and not any(map(start.has_buckets_of, (plan, *measured))):
            known.append((self.step_s(start), 0.0))
        nearest = sorted(known, key=lambda pair: abs(pair[0] - predicted_s))[:_NUM_NEAREST]
        return predicted_s + (fmean(beyond_s for _, beyond_s in nearest) if nearest else 0.0)

    @property
    @override
    def reason(self) -> str:
        """See `PlanSearch`; a plan's predicted step, then the measured ones, fastest first."""
        best = self.best
        which = "" if best is self.incumbent else f" of {best.name}"
        predicted = f"predicted {1e3 * self.expected_s(best):.3g} ms/step"
        what = f"mergecomp: {described(best)}{which}, {predicted}"
        others = sorted((plan for plan in self.plans if plan is not best), key=self.mean_s)
        measured = [
            f"{1e3 * self.mean_s(plan):.4g} of {plan.name}" for plan in others if self.count(plan)
        ]
        if not self.count(best):
            return f"{what}, nothing measured"
        against = f" against {', '.join(measured)}" if measured else ""
        return f"{what}, measured {1e3 * self.mean_s(best):.4g}{against}"
