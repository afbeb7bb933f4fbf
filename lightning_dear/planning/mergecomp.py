"""MergeComp's problem, which buckets make the shortest step, solved by an exact programme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from typing_extensions import override

from lightning_dear.planning.codec_cost import NO_CODEC, CodecCosts
from lightning_dear.planning.contest import Contest, distinct
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import (
    FusionPlanner,
    NoFusion,
    SingleFusion,
    ThresholdFusion,
    fuse_groups,
)
from lightning_dear.planning.group_cost import course_of
from lightning_dear.planning.mergecomp_heuristic import MergeCompHeuristicFusion, best_cuts
from lightning_dear.planning.pieces import Piece, families_of_pieces, indices_of
from lightning_dear.planning.plan import MAX_BUCKETS, BucketPlan, TensorSpec, same_buckets
from lightning_dear.planning.predict import predict
from lightning_dear.planning.programme import Grouping, best_groupings
from lightning_dear.planning.search import PlanSearch, PredictingPlanner, described
from lightning_dear.planning.times import ModelTimes
from lightning_dear.planning.whole import with_whole_tensors

_SHARES = (1, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Of all bytes: what a bucket may hold."""

_MIN_GAIN = 2e-3
"""Share of the step that more buckets must gain: each costs the host work, which no link shows."""

_SLACK = 1.05
"""How much longer than a known step one may be for the programme: `predict` knows other families,
and in which order forward really reads."""

_NUM_NEAREST = 2
"""Measured plans that tell how far another one's prediction is off."""


@dataclass(frozen=True)
class _Groups:
    """Tensors by bucket, and those of buckets that are left uncompressed."""

    members: list[list[int]]
    uncompressed: frozenset[int] = frozenset()


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
    def search(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> PlanSearch:
        """See `SearchingPlanner`; with a codec, what is measured in the end decides."""
        if codecs.are_none:
            return super().search(tensors, world_size, times, link, codecs)
        task = _Task(tensors, world_size, codecs.restricted(times), link, codecs)
        best = self.best_plan(tensors, world_size, times, link, codecs)
        best, *others = distinct([best, *task.simpler_plans()])
        return MergeCompSearch(best, others, tensors, task.step_s, codecs.fitted_to)

    @override
    def best_plan(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> BucketPlan:
        """Of the unbeaten groupings, and of simpler plans, the one that `predict` finds fastest.

        Of several as fast the one with the fewest buckets. Without a codec, early gathers are
        chosen for each, and a plan counts as fast that is nearly so.

        The programme knows nothing of early gathers, which small buckets suit better: so it is run
        again with groups of at most 1/8 to 1/64 of all bytes. `times` are those without encoding.
        """
        task = _Task(tensors, world_size, codecs.restricted(times), link, codecs)
        return replace(task.best_plan(self.max_pieces), name=self.name)


@dataclass(frozen=True)
class _Task:
    """What is to be planned, and with which costs."""

    tensors: Sequence[TensorSpec]
    world_size: int
    times: ModelTimes
    link: LinkCost
    codecs: CodecCosts

    def best_plan(self, max_pieces: int) -> BucketPlan:
        families = families_of_pieces(self.tensors, self.times, max_pieces)
        chosen = [_Groups([indices_of(pieces)]) for _, pieces in families]
        for place, (itemsize, pieces) in enumerate(families):
            plans: dict[BucketPlan, _Groups] = {}
            before = chosen[place]
            for grouping in self._groupings(pieces, itemsize):
                chosen[place] = _groups_of(pieces, grouping)
                plans.setdefault(self._plan_of(chosen), chosen[place])
            # None, if what is kept of thousands of ways takes longer than the known step.
            chosen[place] = plans[self._fastest(plans)] if plans else before
        return self._fastest([self._plan_of(chosen), *self._simple_plans()])

    def _groupings(self, pieces: Sequence[Piece], itemsize: int) -> list[Grouping]:
        course = course_of(pieces, itemsize, self.world_size, self.times, self.link, self.codecs)
        if not self.times.allows_early:
            known_s = _SLACK * course.step_s(best_cuts(course))
            return best_groupings(course, known_s=known_s)
        # Early gathers may make the best of what would take longer without them.
        most_bytes = [share * course.total[-1] for share in _SHARES]
        return [one for most in most_bytes for one in best_groupings(course, most)]

    def _plan_of(self, chosen: Sequence[_Groups]) -> BucketPlan:
        groups = [group for family in chosen for group in family.members]
        plan = fuse_groups("", self.tensors, self.world_size, groups)
        left = frozenset[int]().union(*(family.uncompressed for family in chosen))
        uncompressed = (
            number for number, one in enumerate(plan.buckets) if one.slices[0].tensor in left
        )
        return self._with_early(replace(plan, uncompressed=tuple(uncompressed)))

    def step_s(self, plan: BucketPlan) -> float:
        """The predicted step, seconds."""
        return predict(plan, self.tensors, self.times, self.link, self.codecs).step_s

    def simpler_plans(self) -> list[BucketPlan]:
        """What MergeComp's own search finds, one bucket for all, and what needs no compressor."""
        plans = [self._heuristic_plan(), self._plan_by(SingleFusion())]
        if self.codecs.may_mix:
            threshold = _uncompressed(self._plan_by(ThresholdFusion()))
            plans.append(replace(threshold, name="threshold_uncompressed"))
        return [self._with_early(plan) for plan in plans]

    def _heuristic_plan(self) -> BucketPlan:
        costs = self.times, self.link, self.codecs
        return MergeCompHeuristicFusion().best_plan(self.tensors, self.world_size, *costs)

    def _simple_plans(self) -> list[BucketPlan]:
        """What fixed rules make, compressed and not, and what MergeComp's own search finds."""
        plans = [self._plan_by(rule) for rule in (SingleFusion(), NoFusion(), ThresholdFusion())]
        if self.codecs.may_mix:
            plans += [_uncompressed(plan) for plan in plans]
        plans.append(self._heuristic_plan())
        return [self._with_early(plan) for plan in plans if len(plan.buckets) <= MAX_BUCKETS]

    def _plan_by(self, rule: FusionPlanner) -> BucketPlan:
        plan = rule.plan(self.tensors, self.world_size)
        return plan if self.times.allows_cuts else with_whole_tensors(plan, self.tensors)

    def _with_early(self, plan: BucketPlan) -> BucketPlan:
        if not self.times.allows_early:
            return plan
        return choose_early(plan, self.tensors, self.times, self.link)

    def _fastest(self, plans: Iterable[BucketPlan]) -> BucketPlan:
        steps_s = {plan: self.step_s(plan) for plan in plans}
        # With a codec, what a bucket costs the host has been measured.
        enough_s = (1 + _MIN_GAIN * self.codecs.are_none) * min(steps_s.values())
        good = [plan for plan, step_s in steps_s.items() if step_s <= enough_s]
        return min(good, key=lambda plan: (len(plan.buckets), steps_s[plan]))


def _uncompressed(plan: BucketPlan) -> BucketPlan:
    return replace(plan, uncompressed=tuple(range(len(plan.buckets))))


def _groups_of(pieces: Sequence[Piece], grouping: Grouping) -> _Groups:
    begins = (0, *grouping.cuts)
    members = [
        indices_of(pieces[begin:end]) for begin, end in zip(begins, grouping.cuts, strict=False)
    ]
    left = [
        index
        for group, is_left in zip(members, grouping.uncompressed, strict=True)
        if is_left
        for index in group
    ]
    return _Groups(members, frozenset(left))


class MergeCompSearch(Contest):
    """See `PlanSearch`: the programme's plan against simpler ones.

    Args:
        programme: The programme's.
        simpler: The others; distinct, and none of them the programme's.
        tensors: What the plans are made of.
        step_s: Predicts a plan's step, seconds.
        fitted_to: A plan that takes what `step_s` says, if one was measured before.
    """

    def __init__(
        self,
        programme: BucketPlan,
        simpler: Sequence[BucketPlan],
        tensors: Sequence[TensorSpec],
        step_s: Callable[[BucketPlan], float],
        fitted_to: BucketPlan | None = None,
    ) -> None:
        super().__init__(programme, simpler)
        self._tensors = tensors
        self._step_s = step_s
        self._fitted_to = fitted_to

    def expected_s(self, plan: BucketPlan) -> float:
        """The step of `plan`, seconds, as far as others tell: its own measurements have no say.

        Its prediction, and what the two other measured plans with the nearest predictions took
        beyond theirs, on average: several buckets take more beyond theirs than a single one.
        """
        predicted_s = self._step_s(plan)
        measured = [one for one in self.plans if self.count(one)]
        known = [
            (self._step_s(one), self.mean_s(one) - self._step_s(one))
            for one in measured
            if one is not plan
        ]
        start = self._fitted_to
        if start is not None and not any(same_buckets(start, one) for one in (plan, *measured)):
            known.append((self._step_s(start), 0.0))
        nearest = sorted(known, key=lambda one: abs(one[0] - predicted_s))[:_NUM_NEAREST]
        return predicted_s + (fmean(beyond_s for _, beyond_s in nearest) if nearest else 0.0)

    @property
    @override
    def reason(self) -> str:
        """See `PlanSearch`; a plan's predicted step, then the measured ones, fastest first."""
        best = self.best
        which = "" if best is self.incumbent else f" of {best.name}"
        predicted = f"predicted {1e3 * self.expected_s(best):.3g} ms/step"
        what = f"mergecomp: {described(best, self._tensors)}{which}, {predicted}"
        others = sorted((one for one in self.plans if one is not best), key=self.mean_s)
        measured = [
            f"{1e3 * self.mean_s(plan):.4g} of {plan.name}" for plan in others if self.count(plan)
        ]
        if not self.count(best):
            return f"{what}, nothing measured"
        against = f" against {', '.join(measured)}" if measured else ""
        return f"{what}, measured {1e3 * self.mean_s(best):.4g}{against}"
