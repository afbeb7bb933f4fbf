"""Planners that choose the plan with the shortest predicted step, from measured times.

MG-WFBP (Shi et al., arXiv 1811.11141) sends a tensor together with the next tensor of backward if
sending it earlier, by itself, would gain nothing.

MergeComp (Wang et al., arXiv 2103.15195) cuts the N tensors into y groups of neighbours. The paper
measures steps; here they are predicted. For two groups the time of a step, as a function of the
place of the cut, is assumed to have a single minimum. So a binary search finds it with O(log N)
predictions. For y groups the search needs O(N^(y-2) log N) predictions, and y grows until one more
group gains too little. `MergeCompFusion` solves the same problem by the dynamic programme of
`planning/programme.py`, which is exact for few tensors.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from typing_extensions import override

from lightning_dear.planning import fusion, programme, search
from lightning_dear.planning.plan import MAX_BUCKETS, BucketPlan, distinct, with_whole_tensors
from lightning_dear.planning.predict import StepModel

_MAX_GROUPS = 3
"""Default of `max_groups`: most groups that MergeComp's search makes."""

_MIN_GAIN = 0.01
"""Default of `min_gain`: share of the step that one more group must gain in MergeComp's search."""

_MIN_STEP_GAIN = 2e-3
"""Without a codec, a plan with more buckets is chosen only if its step is shorter by this share.
Each bucket costs the host work that predictions without a codec do not count."""

_ROUNDING = 1e-12
"""Predicted steps that differ by this share or less count as equally long, since rounding alone may
cause such a difference."""

_SLACK = 1.05
"""The programme keeps groupings whose step is up to this many times that of a known grouping. Its
own prediction is not exact: only `predict` counts the buckets of other families, and the order in
which forward really reads tensors."""

_NUM_NEAREST = 2
"""Number of measured plans from whose prediction errors the error for another plan is estimated."""

_Group = tuple[list[int], bool]
"""(indices of the tensors of a bucket, whether the bucket is left uncompressed)."""


class MGWFBPFusion(search.PredictingPlanner):
    """Puts a tensor into the bucket of the tensor before it in backward, if that saves time.

    It does if waiting for the tensor costs less than the start of another collective; see `merged`.
    Training begins with the buckets of `ThresholdFusion`. Once times have been measured, the plan
    is made, and used without measuring it against other plans. No tensor is cut. Each family is
    planned separately, as if no other family used the link.
    """

    name = "mgwfbp"

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that the MG-WFBP rule makes with the costs of reduce-scatters.

        The rule does not consider codecs. So the strategy refuses this planner with a compressor.
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
    """Returns the groups of tensors that the MG-WFBP rule makes. Pure.

    Sending a group takes the seconds `t = alpha + beta x size`. It could begin at the time `c`, at
    which the link is free and the group's last gradient is there. Let `r` be the time at which the
    gradient of the next tensor comes. The next tensor joins the group if `r < c + t` (it comes
    before the group would have been sent) and one of two conditions holds: `r < c` (the group is
    not yet being sent), or `r - c < alpha` (waiting for the tensor costs less than the start of
    another collective). Since alpha is between 0 and t, all of this is the same as
    `r - c < alpha`.

    Args:
        sizes: Bytes of each tensor, in the order of backward.
        ready_s: Seconds at which the gradient of each tensor comes; not decreasing.
        alpha_s: Seconds for the start of a collective.
        beta_s: Seconds for each byte of a tensor.

    Returns:
        For each group, the places of its tensors in `sizes`; in the order of backward.
    """
    groups: list[list[int]] = []
    free_s = begin_s = end_s = size = 0.0
    for number, (nbytes, at_s) in enumerate(zip(sizes, ready_s, strict=True)):
        # This is the whole rule; see the docstring.
        if not groups or at_s - begin_s >= alpha_s:
            groups.append([])
            free_s, size = end_s, 0.0
        groups[-1].append(number)
        size += nbytes
        begin_s = max(free_s, at_s)
        end_s = begin_s + alpha_s + beta_s * size
    return groups


class MergeCompHeuristicFusion(search.PredictingPlanner):
    """Makes a few groups of neighbours by MergeComp's own search. No bucket is left uncompressed.

    Meant for comparisons: with the default options, the predicted step of the plan of
    `MergeCompFusion` is at most 0.2 % longer, and with a compressor not longer. Training
    begins with the buckets of `ThresholdFusion`. Once times have been measured, the plan is made,
    and used without measuring it against other plans. No tensor is cut. Each family is planned
    separately, as if no other family used the link.

    Args:
        max_groups: Most groups of a family. Each group beyond two multiplies the time to plan by
            the number of pieces.
        min_gain: Share of the step, 0..1, that one more group must gain. If it gains less, the
            search ends.
        max_pieces: Most pieces of a family that are planned. A piece is a tensor or, if there are
            more tensors, several neighbours, the smallest of which are joined beforehand.

    Raises:
        ValueError: If `max_groups` is below 2, `min_gain` is not 0..1, or `max_pieces` is below 1.
    """

    name = "mergecomp_heuristic"
    plans_for_codecs = True

    def __init__(
        self, *, max_groups: int = _MAX_GROUPS, min_gain: float = _MIN_GAIN, max_pieces: int = 128
    ) -> None:
        if max_groups < 2:
            raise ValueError(f"fusion={self.name!r}: max_groups must be >= 2, got {max_groups}.")
        if not 0 <= min_gain <= 1:
            raise ValueError(f"fusion={self.name!r}: min_gain must be 0..1, got {min_gain}.")
        if max_pieces < 1:
            raise ValueError(f"fusion={self.name!r}: max_pieces must be >= 1, got {max_pieces}.")
        self.max_groups = max_groups
        self.min_gain = min_gain
        self.max_pieces = max_pieces

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan that MergeComp's search finds."""
        groups: list[list[int]] = []
        for course in programme.courses_of(model, self.max_pieces):
            cuts = best_cuts(course, self.max_groups, self.min_gain)
            groups += programme.members_of(course.pieces, cuts)
        return fusion.fuse_groups(self.name, model.tensors, model.world_size, groups)


def best_cuts(
    course: programme.Course, max_groups: int = _MAX_GROUPS, min_gain: float = _MIN_GAIN
) -> list[int]:
    """Returns the cuts that MergeComp's search finds: for each group, the index after its end.

    That is the number of pieces in the group and all groups before it. The last cut is the number
    of all pieces.

    Args:
        course: Pieces to group; computes the step that groups lead to.
        max_groups: Most groups.
        min_gain: Share of the step, 0..1, that one more group must gain. If it gains less, the
            search ends.
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
    """Returns (seconds of a step, cuts) of the best grouping found that begins with some cuts.

    Args:
        course: Pieces to group; computes the step that groups lead to.
        before: Cuts with which the grouping begins.
        count: Number of groups after these cuts, at least 2.
    """
    begin, size = (before or [0])[-1], len(course.pieces)
    if count > 2:
        firsts = range(begin + 1, size - count + 2)
        return min(_search(course, [*before, first], count - 1) for first in firsts)

    def at(cut: int) -> tuple[float, list[int]]:
        cuts = [*before, cut, size]
        return course.step_s(cuts), cuts

    # The step is assumed to have a single minimum as a function of the cut. It is then at the
    # first cut whose step is not longer than that of the next cut.
    cuts = range(begin + 1, size - 1)
    return at(begin + 1 + bisect_left(cuts, True, key=lambda cut: at(cut)[0] <= at(cut + 1)[0]))


class MergeCompFusion(search.PredictingPlanner):
    """Finds the buckets with the shortest predicted step, by a dynamic programme.

    MergeComp (arXiv 2103.15195) searches for the same buckets, but with measured steps. Training
    begins with the buckets of `ThresholdFusion`. Once times have been measured, the plan is made.
    Its predicted step is at most 0.2 % longer (not longer with a compressor) than that of the plans
    of fixed rules and of MergeComp's own search. For up to 12 pieces (see `max_pieces`) the
    programme tries all groupings that could be best. Without a compressor, the plan is used without
    measuring it against other plans.

    With a compressor, the plan also leaves those buckets uncompressed for which encoding and
    decoding cost more than they save (if the compressor allows that). Encoding and messages compete
    for the host, which predictions do not cover exactly. So the plan is measured against simpler
    plans, and used unless one of them is faster: the plan of MergeComp's own search, one bucket for
    all tensors, and, if buckets may be left uncompressed, the buckets of `ThresholdFusion` without
    any compression.

    The programme cuts no tensor. Families are planned one after the other; the prediction for a
    family includes the buckets of all other families.

    Args:
        max_pieces: Most pieces of a family that are planned. A piece is a tensor or, if there are
            more tensors, several neighbours, the smallest of which are joined beforehand. The time
            to plan grows with the square of this number.

    Raises:
        ValueError: If `max_pieces` is below 1.
    """

    name = "mergecomp"
    plans_for_codecs = True

    def __init__(self, *, max_pieces: int = 128) -> None:
        if max_pieces < 1:
            raise ValueError(f"fusion={self.name!r}: max_pieces must be >= 1, got {max_pieces}.")
        self.max_pieces = max_pieces

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """Returns the plan with the shortest predicted step.

        Candidates are all groupings that the programme keeps, the plans of fixed rules, and that of
        MergeComp's search. Of plans that are equally fast the one with the fewest buckets is
        returned. Without a codec, steps that differ by up to 0.2 % count as equally fast.
        """
        courses = programme.courses_of(model, self.max_pieces)
        whole = [programme.members_of(course.pieces, [len(course.pieces)]) for course in courses]
        chosen: list[list[_Group]] = [[(group, False) for group in groups] for groups in whole]
        for family, course in enumerate(courses):
            plans: dict[BucketPlan, list[_Group]] = {}
            before = chosen[family]
            known_s = _SLACK * course.step_s(best_cuts(course))
            for grouping in programme.best_groupings(course, known_s=known_s):
                members = programme.members_of(course.pieces, grouping.cuts)
                chosen[family] = list(zip(members, grouping.uncompressed, strict=True))
                plans.setdefault(_plan_of(chosen, model), chosen[family])
            # `plans` is empty if the programme kept no grouping, since all are slower than the
            # bound.
            chosen[family] = plans[_fastest(plans, model)] if plans else before
        best = _fastest([_plan_of(chosen, model), *_simple_plans(model)], model)
        return replace(best, name=self.name)

    @override
    def search_for(self, model: StepModel) -> search.PlanSearch:
        """Returns the search: without a codec, one that is over at once and uses `best_plan`.

        With a codec, a `MergeCompSearch`, which measures that plan and simpler ones.
        """
        if model.codecs.are_none:
            return super().search_for(model)
        best, *others = distinct([self.best_plan(model), *_simpler_plans(model)])
        return MergeCompSearch(best, others, model.step_s, model.codecs.fitted_to)


def _plan_of(chosen: Sequence[Sequence[_Group]], model: StepModel) -> BucketPlan:
    """Returns the plan of the groups chosen for each family."""
    groups = [group for family in chosen for group in family]
    plan = fusion.fuse_groups("", model.tensors, model.world_size, [group for group, _ in groups])
    # Buckets are in another order than groups. The first tensor of a bucket tells its group.
    left = {index for group, is_left in groups if is_left for index in group}
    uncompressed = (n for n, one in enumerate(plan.buckets) if one.slices[0].tensor in left)
    return replace(plan, uncompressed=tuple(uncompressed))


def _simpler_plans(model: StepModel) -> list[BucketPlan]:
    """Returns the plans that the programme's plan is measured against if there is a codec."""
    plans = [MergeCompHeuristicFusion().best_plan(model), _plan_by(fusion.SingleFusion(), model)]
    if model.codecs.may_mix:
        threshold = _uncompressed(_plan_by(fusion.ThresholdFusion(), model))
        plans.append(replace(threshold, name="threshold_uncompressed"))
    return plans


def _simple_plans(model: StepModel) -> list[BucketPlan]:
    """Returns the plans of fixed rules, compressed and uncompressed, and of MergeComp's search."""
    rules = fusion.SingleFusion(), fusion.NoFusion(), fusion.ThresholdFusion()
    plans = [_plan_by(rule, model) for rule in rules]
    if model.codecs.may_mix:
        plans += [_uncompressed(plan) for plan in plans]
    plans.append(MergeCompHeuristicFusion().best_plan(model))
    return [plan for plan in plans if len(plan.buckets) <= MAX_BUCKETS]


def _plan_by(rule: fusion.FusionPlanner, model: StepModel) -> BucketPlan:
    """Returns the plan of `rule`, with whole tensors if the training allows no cuts."""
    plan = rule.plan(model.tensors, model.world_size)
    return plan if model.times.allows_cuts else with_whole_tensors(plan, model.tensors)


def _fastest(plans: Iterable[BucketPlan], model: StepModel) -> BucketPlan:
    """Returns the plan with the shortest predicted step.

    If several plans count as equally fast, returns the one with the fewest buckets.
    """
    steps_s = {plan: model.step_s(plan) for plan in plans}
    # With a codec, predictions include what each bucket costs the host, as measured. Without one
    # they do not, so that more buckets have to gain more.
    slack = _MIN_STEP_GAIN if model.codecs.are_none else _ROUNDING
    enough_s = (1 + slack) * min(steps_s.values())
    good = [plan for plan, step_s in steps_s.items() if step_s <= enough_s]
    return min(good, key=lambda plan: (len(plan.buckets), steps_s[plan]))


def _uncompressed(plan: BucketPlan) -> BucketPlan:
    """Returns `plan` with all buckets left uncompressed."""
    return replace(plan, uncompressed=tuple(range(len(plan.buckets))))


@dataclass(eq=False)
class MergeCompSearch(search.Contest):
    """Contest of the plan of `MergeCompFusion`, which is the incumbent, against simpler plans.

    Attributes:
        fitted_to: Plan whose step was measured before the search, so that `step_s` returns exactly
            this measurement for it. None means that no plan was measured.
    """

    fitted_to: BucketPlan | None = None

    def expected_s(self, plan: BucketPlan) -> float:
        """Returns the expected seconds of a step with `plan`, without the measurements of `plan`.

        That is the predicted step plus the mean error of the predictions for two other plans:
        measured minus predicted seconds. Of all other measured plans, the two with the nearest
        predicted steps count, since plans with several buckets have larger errors than plans with
        one bucket. If no other plan was measured, nothing is added.
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
        """Returns a line for people: the best plan, its predicted and measured step, then others'.

        Used once the search is over.
        """
        best = self.best
        which = "" if best is self.incumbent else f" of {best.name}"
        predicted = f"predicted {1e3 * self.expected_s(best):.3g} ms/step"
        what = f"mergecomp: {search.described(best)}{which}, {predicted}"
        others = [plan for plan in self.plans if plan is not best and self.count(plan)]
        others.sort(key=self.mean_s)
        measured = [f"{1e3 * self.mean_s(plan):.4g} of {plan.name}" for plan in others]
        if not self.count(best):
            return f"{what}, nothing measured"
        against = f" against {', '.join(measured)}" if measured else ""
        return f"{what}, measured {1e3 * self.mean_s(best):.4g}{against}"
