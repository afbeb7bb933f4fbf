"""MergeComp's own search, with predicted steps in the place of measured ones.

Wang et al., "MergeComp" (arXiv 2103.15195): with two groups the step is taken to have one minimum
over the place of the cut, so that a binary search finds it in O(log N); y groups take O(N^(y-2)
log N), and y grows until one more group gains too little.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from lightning_dear.planning.codec_cost import NO_CODEC, CodecCosts
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.group_cost import Course, course_of
from lightning_dear.planning.pieces import families_of_pieces, indices_of
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.search import PredictingPlanner
from lightning_dear.planning.times import ModelTimes

_MAX_GROUPS = 3
_MIN_GAIN = 0.01


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
    def best_plan(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> BucketPlan:
        """The plan that the search finds, without early gathers."""
        groups: list[list[int]] = []
        for itemsize, pieces in families_of_pieces(tensors, times, self.max_pieces):
            course = course_of(pieces, itemsize, world_size, times, link, codecs)
            cuts = best_cuts(course, self.max_groups, self.min_gain)
            groups += [
                indices_of(pieces[begin:end]) for begin, end in zip((0, *cuts), cuts, strict=False)
            ]
        return fuse_groups(self.name, tensors, world_size, groups)


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
    """Of ways to go on after the groups `before` with so many more: one as good as is found."""
    begin, size = (before or [0])[-1], len(course.pieces)
    if num_groups > 2:
        firsts = range(begin + 1, size - num_groups + 2)
        return min(_search(course, [*before, first], num_groups - 1) for first in firsts)

    def at(cut: int) -> tuple[float, list[int]]:
        cuts = [*before, cut, size]
        return course.step_s(cuts), cuts

    low, high = begin + 1, size - 1
    while low < high:
        middle = (low + high) // 2
        if at(middle)[0] <= at(middle + 1)[0]:
            high = middle
        else:
            low = middle + 1
    return at(low)
