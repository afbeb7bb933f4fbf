"""Planners that decide by predictions: MG-WFBP's rule, MergeComp's search, and its problem solved.

MG-WFBP (Shi et al., arXiv 1811.11141) merges tensors that would only wait for each other.

MergeComp (Wang et al., arXiv 2103.15195) measures steps; here they are predicted. With two groups
the step is taken to have one minimum over where to cut, so that a binary search finds it in
O(log N); y groups take O(N^(y-2) log N), and y grows until one more group gains too little. An
exact programme finds those that make the shortest step.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from typing_extensions import override

from lightning_dear.planning import fusion, programme
from lightning_dear.planning.plan import MAX_BUCKETS, BucketPlan, distinct, with_whole_tensors
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.refine import choose_early
from lightning_dear.planning.search import Contest, PlanSearch, PredictingPlanner, described

_MAX_GROUPS = 3
_MIN_GAIN = 0.01

_SHARES = (1, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Shares of all bytes that a bucket may hold."""

_MIN_STEP_GAIN = 2e-3
"""Share of the step that more buckets must gain: each costs the host work, which no link shows."""

_ROUNDING = 1e-12
"""Share of the step by which equally long ones may differ."""

_SLACK = 1.05
"""How much longer than a known step one may be for the programme: `predict` knows other families,
and in which order forward really reads."""

_NUM_NEAREST = 2
"""Measured plans that tell how far another one's prediction is off."""

_Group = tuple[list[int], bool]
"""Tensors of a bucket, and whether it is left uncompressed."""


class MGWFBPFusion(PredictingPlanner):
    """Merges a tensor into the next one of backward where that saves a start and delays nothing.

    Needs measured times: until then it trains with `ThresholdFusion`'s buckets. Its plan is used
    without being measured against others. No tensor is cut. Tensors of different families are
    planned apart, each as if it had the link to itself.
    """

    name = "mgwfbp"

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the rule's plan, with the costs of a reduce-scatter in the link's.

        The rule knows nothing of codecs, so that the strategy refuses it with a compressor.
        """
        times, link = model.times, model.link
        per_byte_s = link.beta_s * (model.world_size - 1) / model.world_size
        groups: list[list[int]] = []
        for family in programme.backward_order(model.tensors, times):
            ready_s = [times.ready_s.get(t.index, times.backward_s) for t in family]
            runs = merged([t.nbytes for t in family], ready_s, link.alpha_s, per_byte_s)
            groups += [[family[number].index for number in run] for run in runs]
        return fusion.fuse_groups(self.name, model.tensors, model.world_size, groups)


def merged(
    sizes: Sequence[float], ready_s: Sequence[float], alpha_s: float, beta_s: float
) -> list[list[int]]:
    """Returns the groups that the MG-WFBP rule makes; arguments and groups in backward order.

    With `t = alpha + beta x size` and a group `l` that would begin at `c` (when the link is free
    and its last gradient is there), the next tensor, ready at `r`, joins the group if it is ready
    before the group has been sent, `r < c + t`, and either the group has not begun by then,
    `c > r`, or waiting for it costs less than a start, `r - c < alpha`. As alpha is between 0 and
    t, this comes to `r - c < alpha`.

    Args:
        sizes: Bytes of each tensor.
        ready_s: When each gradient is there; not decreasing.
        alpha_s: Start of an exchange, seconds.
        beta_s: Seconds for a byte of a tensor.
    """
    groups: list[list[int]] = []
    free_s = begin_s = end_s = size = 0.0
    for number, (nbytes, at_s) in enumerate(zip(sizes, ready_s, strict=True)):
        # The whole rule: both its conditions come to this, as alpha is at most t.
        if groups and at_s - begin_s < alpha_s:
            groups[-1].append(number)
            size += nbytes
        else:
            groups.append([number])
            free_s, size = end_s, nbytes
        begin_s = max(free_s, at_s)
        end_s = begin_s + alpha_s + beta_s * size
    return groups


class MergeCompHeuristicFusion(PredictingPlanner):
    """Makes a few groups of neighbours, by MergeComp's search for cuts; all are compressed.

    For comparing: with the default options `MergeCompFusion` never predicts a longer step. Needs
    measured times: until then it trains with `ThresholdFusion`'s buckets. Its plan is used without
    being measured against others. No tensor is cut. Tensors of different families are planned
    apart, each as if it had the link to itself.

    Args:
        max_groups: Most groups; each one more multiplies the time to plan by the number of tensors.
        min_gain: Share of the step, 0..1, that one more group must gain for a further one.
        max_pieces: Smallest neighbours are joined beforehand until there are at most so many
            tensors.

    Raises:
        ValueError: If `max_groups` is below 2, `min_gain` is not 0..1, or `max_pieces` is below 1.
    """

    name = "mergecomp_heuristic"
    plans_for_codecs = True

    def __init__(
        self, *, max_groups: int = _MAX_GROUPS, min_gain: float = _MIN_GAIN, max_pieces: int = 128
    ) -> None:
        if max_groups < 2:
            raise ValueError(f"max_groups must be >= 2, got {max_groups}.")
        if not 0 <= min_gain <= 1:
            raise ValueError(f"min_gain must be 0..1, got {min_gain}.")
        if max_pieces < 1:
            raise ValueError(f"max_pieces must be >= 1, got {max_pieces}.")
        self.max_groups = max_groups
        self.min_gain = min_gain
        self.max_pieces = max_pieces

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that the search finds, without early gathers."""
        groups: list[list[int]] = []
        for course in programme.courses_of(model, self.max_pieces):
            cuts = best_cuts(course, self.max_groups, self.min_gain)
            groups += programme.members_of(course.pieces, cuts)
        return fusion.fuse_groups(self.name, model.tensors, model.world_size, groups)


def best_cuts(
    course: programme.Course, max_groups: int = _MAX_GROUPS, min_gain: float = _MIN_GAIN
) -> list[int]:
    """Returns where the search's groups end, as numbers of pieces; the last is all of them.

    Args:
        course: Whose pieces are grouped.
        max_groups: See `MergeCompHeuristicFusion`.
        min_gain: The same.
    """
    size = len(course.pieces)
    best_s, best = course.step_s([size]), [size]
    for num_groups in range(2, min(max_groups, size) + 1):
        step_s, cuts = _search(course, [], num_groups)
        if step_s >= best_s or best_s - step_s < min_gain * best_s:
            break
        best_s, best = step_s, cuts
    return best


def _search(course: programme.Course, before: list[int], count: int) -> tuple[float, list[int]]:
    """Step and cuts of the best way found to go on after the cuts `before` with so many groups."""
    begin, size = (before or [0])[-1], len(course.pieces)
    if count > 2:
        firsts = range(begin + 1, size - count + 2)
        return min(_search(course, [*before, first], count - 1) for first in firsts)

    def at(cut: int) -> tuple[float, list[int]]:
        cuts = [*before, cut, size]
        return course.step_s(cuts), cuts

    # As if the step had one minimum over the cut: the first cut after which it falls no more.
    cuts = range(begin + 1, size - 1)
    return at(begin + 1 + bisect_left(cuts, True, key=lambda cut: at(cut)[0] <= at(cut + 1)[0]))


class MergeCompFusion(PredictingPlanner):
    """Finds the buckets with the shortest predicted step, by an exact dynamic programme.

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
        """Returns the plan predicted fastest, of all unbeaten groupings and of simpler plans.

        Of several as fast that with the fewest buckets. Without a codec, early gathers are
        chosen for each, and a plan counts as fast that is nearly so.

        The programme knows nothing of early gathers, which small buckets suit better: so it is run
        again with groups of at most 1/8 to 1/64 of all bytes. The times are those without encoding.
        """
        courses = programme.courses_of(model, self.max_pieces)
        chosen: list[list[_Group]] = [
            [(group, False) for group in programme.members_of(course.pieces, [len(course.pieces)])]
            for course in courses
        ]
        for family, course in enumerate(courses):
            plans: dict[BucketPlan, list[_Group]] = {}
            before = chosen[family]
            for grouping in _groupings(course, allows_early=_allows_early(model)):
                members = programme.members_of(course.pieces, grouping.cuts)
                chosen[family] = list(zip(members, grouping.uncompressed, strict=True))
                plans.setdefault(_plan_of(chosen, model), chosen[family])
            # None, if what is kept of thousands of ways takes longer than the known step.
            chosen[family] = plans[_fastest(plans, model)] if plans else before
        best = _fastest([_plan_of(chosen, model), *_simple_plans(model)], model)
        return replace(best, name=self.name)

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        """Searches as inherited; with a codec, what is measured decides."""
        if model.codecs.are_none:
            return super().search_for(model)
        best, *others = distinct([self.best_plan(model), *_simpler_plans(model)])
        return MergeCompSearch(best, others, model.step_s, model.codecs.fitted_to)


def _allows_early(model: StepModel) -> bool:
    # No codec is there for early buckets, in training or in `predict`.
    return model.times.allows_early and model.codecs.are_none


def _groupings(course: programme.Course, *, allows_early: bool) -> list[programme.Grouping]:
    if not allows_early:
        known_s = _SLACK * course.step_s(best_cuts(course))
        return programme.best_groupings(course, known_s=known_s)
    # Early gathers may make the best of what would take longer without them.
    most_bytes = [share * course.total[-1] for share in _SHARES]
    return [grouping for most in most_bytes for grouping in programme.best_groupings(course, most)]


def _plan_of(chosen: Sequence[Sequence[_Group]], model: StepModel) -> BucketPlan:
    groups = [group for family in chosen for group in family]
    plan = fusion.fuse_groups("", model.tensors, model.world_size, [group for group, _ in groups])
    # Buckets are in another order than groups; any of its tensors tells which one it is.
    left = {index for group, is_left in groups if is_left for index in group}
    first_tensors = [bucket.slices[0].tensor for bucket in plan.buckets]
    uncompressed = (number for number, first in enumerate(first_tensors) if first in left)
    return _with_early(replace(plan, uncompressed=tuple(uncompressed)), model)


def _simpler_plans(model: StepModel) -> list[BucketPlan]:
    """What MergeComp's own search finds, one bucket for all, and what needs no compressor."""
    plans = [MergeCompHeuristicFusion().best_plan(model), _plan_by(fusion.SingleFusion(), model)]
    if model.codecs.may_mix:
        threshold = _uncompressed(_plan_by(fusion.ThresholdFusion(), model))
        plans.append(replace(threshold, name="threshold_uncompressed"))
    return plans


def _simple_plans(model: StepModel) -> list[BucketPlan]:
    """What fixed rules make, compressed and not, and what MergeComp's own search finds."""
    rules = fusion.SingleFusion(), fusion.NoFusion(), fusion.ThresholdFusion()
    plans = [_plan_by(rule, model) for rule in rules]
    if model.codecs.may_mix:
        plans += [_uncompressed(plan) for plan in plans]
    plans.append(MergeCompHeuristicFusion().best_plan(model))
    return [_with_early(plan, model) for plan in plans if len(plan.buckets) <= MAX_BUCKETS]


def _plan_by(rule: fusion.FusionPlanner, model: StepModel) -> BucketPlan:
    plan = rule.plan(model.tensors, model.world_size)
    return plan if model.times.allows_cuts else with_whole_tensors(plan, model.tensors)


def _with_early(plan: BucketPlan, model: StepModel) -> BucketPlan:
    if not _allows_early(model):
        return plan
    return choose_early(plan, model.tensors, model.times, model.link)


def _fastest(plans: Iterable[BucketPlan], model: StepModel) -> BucketPlan:
    steps_s = {plan: model.step_s(plan) for plan in plans}
    # With a codec, what a bucket costs the host has been measured.
    slack = _MIN_STEP_GAIN if model.codecs.are_none else _ROUNDING
    enough_s = (1 + slack) * min(steps_s.values())
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
        """Returns the step of `plan`, seconds, as far as others tell, not its own measurements.

        Its prediction, and what the two other measured plans with the nearest predictions took
        beyond theirs, on average: several buckets take more beyond theirs than a single one.
        """
        predicted_s = self.step_s(plan)
        measured = [other for other in self.plans if self.count(other)]
        others = [other for other in measured if other is not plan]
        known = [(self.step_s(one), self.mean_s(one) - self.step_s(one)) for one in others]
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
        others = [plan for plan in self.plans if plan is not best and self.count(plan)]
        others.sort(key=self.mean_s)
        measured = [f"{1e3 * self.mean_s(plan):.4g} of {plan.name}" for plan in others]
        if not self.count(best):
            return f"{what}, nothing measured"
        against = f" against {', '.join(measured)}" if measured else ""
        return f"{what}, measured {1e3 * self.mean_s(best):.4g}{against}"
