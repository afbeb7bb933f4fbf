"""The exact dynamic programme that MergeComp's heuristic approximates, for both halves of a step.

Tensors in the order of their gradients are cut into groups of neighbours, each compressed or, where
it may be, left as it is. What a group adds to a step rises with what was before it (see
`step_recurrence`), so that of all ways to group the first i tensors only those need to be kept that
no other one beats in every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dear.planning.step_recurrence import Course, Rows

MAX_WAYS = 256
"""Kept for each number of pieces, where there are more than `NUM_EXACT`."""

NUM_EXACT = 12
"""Pieces of which all ways are kept that none beats."""

_MAX_CANDIDATES = 4096
"""Compared with each other for each number of pieces, where not all are kept."""


@dataclass(frozen=True)
class Grouping:
    """One way to cut the pieces.

    Attributes:
        cuts: Where groups end, as numbers of pieces.
        uncompressed: For each group, whether it is left as it is.
        step_s: What the course of the step says it takes.
    """

    cuts: tuple[int, ...]
    uncompressed: tuple[bool, ...]
    step_s: float


@dataclass(frozen=True)
class _Ways:
    """Ways to group the first so many pieces, a row each.

    Attributes:
        rows: See `Rows`.
        origins: [number of ways, 4] how the way came about: how many pieces are before its last
            group, the number of the way for those, how the group is encoded, and of how many groups
            it is in all.
    """

    rows: Rows
    origins: Rows

    def taken(self, numbers: Rows) -> _Ways:
        return _Ways(self.rows[numbers], self.origins[numbers])


def best_groupings(
    course: Course, max_bytes: float = float("inf"), known_s: float = float("inf")
) -> list[Grouping]:
    """All groupings of the course's pieces that no other beats in every figure, the best first.

    O(N^2) times the number of ways kept for each number of pieces. It is exact for `NUM_EXACT`
    pieces. Of more, at most `MAX_WAYS` are kept for each, those whose steps could still become the
    shortest; without a codec there are seldom so many, with one the best may be lost by a percent.

    Args:
        course: Its pieces may be grouped.
        max_bytes: Most bytes of a group with more than one piece.
        known_s: A step that can be had: what must take longer is left out.
    """
    keeps_all = len(course.pieces) <= NUM_EXACT
    kept = [_Ways(course.start, np.zeros((1, 4), dtype=int))]
    for end in range(1, len(course.pieces) + 1):
        ways = _extended(course, kept, end, max_bytes)
        least_s = course.least_s(ways.rows, end)
        # A shade more, so that rounding does not leave out the known one itself.
        ways = ways.taken(np.flatnonzero(least_s <= known_s * (1 + 1e-12)))
        course.level(ways.rows, end)
        least_s = course.least_s(ways.rows, end)
        kept.append(ways.taken(_unbeaten(ways, least_s, keeps_all=keeps_all)))
    steps_s = course.least_s(kept[-1].rows, len(course.pieces))
    return [_traced(kept, number, float(steps_s[number])) for number in np.argsort(steps_s)]


def _extended(course: Course, kept: list[_Ways], end: int, max_bytes: float) -> _Ways:
    """Every way kept for fewer pieces, with one more group that ends after `end` pieces."""
    longer: list[tuple[Rows, Rows]] = []
    first_use_s = float("inf")
    for begin in range(end - 1, -1, -1):
        # A single piece is a group, however large it is.
        if course.total[end] - course.total[begin] > max_bytes and begin < end - 1:
            break
        first_use_s = min(first_use_s, course.pieces[begin].first_use_s)
        ways = kept[begin]
        for kind in range(len(course.costs)):
            origins = ways.origins * (0, 0, 0, 1) + (begin, 0, kind, 1)
            origins[:, 1] = np.arange(len(origins))
            longer.append((course.extended(ways.rows, begin, end, first_use_s, kind), origins))
    return _Ways(*(np.concatenate(parts) for parts in zip(*longer, strict=True)))


def _unbeaten(ways: _Ways, least_s: Rows, *, keeps_all: bool) -> Rows:
    """Numbers of the ways that no other beats, the most promising first; all, or `MAX_WAYS`."""
    # Of equal ones those with fewer groups.
    order = np.lexsort((ways.origins[:, 3], least_s))[: None if keeps_all else _MAX_CANDIDATES]
    rows = ways.rows[order]
    # A figure that is the same in all of them decides nothing, and costs time.
    rows = rows[:, np.ptp(rows, axis=0) > 0] if len(rows) else rows
    kept: list[int] = []
    while len(order) and (keeps_all or len(kept) < MAX_WAYS):
        kept.append(order[0])
        is_beaten = np.all(rows >= rows[0], axis=1)
        is_beaten[0] = True
        order, rows = order[~is_beaten], rows[~is_beaten]
    return np.array(kept, dtype=int)


def _traced(kept: list[_Ways], number: int, step_s: float) -> Grouping:
    """The grouping that way `number` for all pieces is, followed back to its first group."""
    cuts: list[int] = []
    kinds: list[bool] = []
    end = len(kept) - 1
    while end:
        cuts.append(end)
        end, number, kind, _ = (int(part) for part in kept[end].origins[number])
        kinds.append(bool(kind))
    return Grouping(tuple(cuts[::-1]), tuple(kinds[::-1]), step_s)
