"""Two published heuristics: MG-WFBP, and MergeComp's own search with predicted steps.

MG-WFBP (Shi et al., arXiv 1811.11141) merges tensors that would only wait for each other.

MergeComp (Wang et al., arXiv 2103.15195) measures steps; here they are predicted. With two groups
the step is taken to have one minimum over where to cut, so that a binary search finds it in
O(log N); y groups take O(N^(y-2) log N), and y grows until one more group gains too little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from typing_extensions import override

from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.plan import BucketPlan
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import PredictingPlanner
from lightning_dear.planning.step_recurrence import (
    Course,
    backward_order,
    courses_of,
    members_of,
)

_MAX_GROUPS = 3
_MIN_GAIN = 0.01


class MGWFBPFusion(PredictingPlanner):
    """Merges a tensor into the next one of backward where that saves a start and delays nothing.

    Needs measured times: until then it trains with `ThresholdFusion`'s buckets. Its plan is used
    without being measured against others. No tensor is cut. Tensors of different families are
    planned apart, each as if it had the link to itself.
    """

    name = "mgwfbp"

    @override
    def best_plan(self, model: StepModel) -> BucketPlan:
        """The plan that the rule makes, with the costs of a reduce-scatter in the link's.

        The rule knows nothing of codecs, so that the strategy refuses it with a compressor.
        """
        times, link = model.times, model.link
        per_byte_s = link.beta_s * (model.world_size - 1) / model.world_size
        groups: list[list[int]] = []
        for family in backward_order(model.tensors, times):
            ready_s = [times.ready_s.get(t.index, times.backward_s) for t in family]
            runs = merged([t.nbytes for t in family], ready_s, link.alpha_s, per_byte_s)
            groups += [[family[number].index for number in run] for run in runs]
        return fuse_groups(self.name, model.tensors, model.world_size, groups)


def merged(
    sizes: Sequence[float], ready_s: Sequence[float], alpha_s: float, beta_s: float
) -> list[list[int]]:
    """The groups that the MG-WFBP rule makes; both arguments and groups are in backward order.

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
    """A few groups of neighbours, by MergeComp's search over where to cut; all are compressed.

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
        """The plan that the search finds, without early gathers."""
        groups: list[list[int]] = []
        for course in courses_of(model, self.max_pieces):
            groups += members_of(course.pieces, best_cuts(course, self.max_groups, self.min_gain))
        return fuse_groups(self.name, model.tensors, model.world_size, groups)


def best_cuts(
    course: Course, max_groups: int = _MAX_GROUPS, min_gain: float = _MIN_GAIN
) -> list[int]:
    """Where the groups end that the search finds, as numbers of pieces; the last is all of them.

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


def _search(course: Course, before: list[int], num_groups: int) -> tuple[float, list[int]]:
    """Step and cuts of the best way found to go on after the cuts `before` with so many groups."""
    begin, size = (before or [0])[-1], len(course.pieces)
    if num_groups > 2:
        firsts = range(begin + 1, size - num_groups + 2)
        return min(_search(course, [*before, first], num_groups - 1) for first in firsts)

    def at(cut: int) -> tuple[float, list[int]]:
        cuts = [*before, cut, size]
        return course.step_s(cuts), cuts

    # As if the step had one minimum over the cut: the first cut after which it falls no more.
    cuts = range(begin + 1, size - 1)
    return at(begin + 1 + bisect_left(cuts, True, key=lambda cut: at(cut)[0] <= at(cut + 1)[0]))
