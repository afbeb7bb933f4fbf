"""MergeComp's scheme, where every rank gets every rank's bytes, and ours: what is simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_dear.planning import CodecCost, Linear, NoFusion
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.plan import ALIGNMENT
from lightning_dear.planning.predicting import best_cuts
from lightning_dear.planning.programme import (
    Course,
    GroupCost,
    best_groupings,
    families_of_pieces,
    members_of,
)
from lightning_dear.simulator import Network, Program, Workload
from lightning_dear.simulator.strategies import (
    OURS,
    Strategy,
    planned,
    resolve_strategy,
    whole,
)

Search = Callable[[Course], Sequence[int]]
"""Where groups end, as numbers of pieces; the last is all of them."""

_MOST_PIECES = 64
"""Of the exact programme, whose time grows with the square; 128 gain no more than 0.3 %."""


def two_groups(course: Course) -> Sequence[int]:
    """Where MergeComp cuts: a binary search for the one place; one group, if no cut is better."""
    return best_cuts(course, 2, 0.0)


def best_groups(course: Course) -> Sequence[int]:
    """Where to cut for the shortest step, into however many groups."""
    return best_groupings(course)[0].cuts


def grouped(
    search: Search, most_pieces: int | None = None
) -> Callable[[Workload, Network], Program]:
    """Groups that a search finds, each all-gathered as a whole.

    Args:
        search: See `Search`.
        most_pieces: Smallest neighbours are joined beforehand until there are no more than that.
    """

    def build(workload: Workload, network: Network) -> Program:
        groups: list[list[int]] = []
        for itemsize, pieces in families_of_pieces(
            workload.tensors, workload.times, most_pieces or len(workload.tensors)
        ):
            cost = _group_cost(workload.codecs.compressed, itemsize, network)
            unit_bytes = ALIGNMENT * network.world_size * itemsize
            cuts = search(Course(pieces, [cost], workload.times, unit_bytes))
            groups += members_of(pieces, cuts)
        plan = fuse_groups("groups", workload.tensors, network.world_size, groups)
        return OURS.program(whole(plan), workload, network)

    return build


def _group_cost(cost: CodecCost, itemsize: int, network: Network) -> GroupCost:
    """Of a group by its bytes; nothing is left to do when its bytes are decoded and summed."""

    def line(linear: Linear) -> Linear:
        return Linear(linear.alpha, linear.beta / itemsize)

    on_link = line(_on_link(cost, itemsize, network))
    return line(cost.encode), on_link, line(cost.decode_sum), Linear(), Linear(), Linear()


def _on_link(cost: CodecCost, itemsize: int, network: Network) -> Linear:
    """Seconds on the link, of a group's elements: the line through a few and many of them."""
    few, many = 1 << 10, 1 << 24

    def seconds(numel: int) -> float:
        size = cost.of(numel, itemsize, network.world_size).reduce_bytes
        return network.half_s(size) if cost.way == "all_gather" else network.all_reduce_s(size)

    beta = (seconds(many) - seconds(few)) / (many - few)
    return Linear(max(seconds(few) - beta * few, 0.0), beta)


LAYERWISE, TWO_GROUPS, BEST_GROUPS = "layerwise", "two_groups", "best_groups"
OURS_LAYERWISE, OURS_SCHEDULED = "ours_layerwise", "ours"

BY_NAME: dict[str, Strategy] = {
    LAYERWISE: resolve_strategy("wfbp"),
    TWO_GROUPS: Strategy(
        TWO_GROUPS, "MergeComp as released", grouped(two_groups), compresses="whole"
    ),
    BEST_GROUPS: Strategy(
        BEST_GROUPS,
        "the same scheme in the best groups",
        grouped(best_groups, _MOST_PIECES),
        compresses="whole",
    ),
    OURS_LAYERWISE: Strategy(
        OURS_LAYERWISE, "ours, a bucket a tensor", planned(NoFusion().plan), compresses="halves"
    ),
    OURS_SCHEDULED: resolve_strategy("dear_mergecomp"),
}
"""Scheme -> how it is simulated. The first three are MergeComp's; published is the second."""
