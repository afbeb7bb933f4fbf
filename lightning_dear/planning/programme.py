"""The exact dynamic programme that MergeComp's heuristic approximates, for both halves of a step.

Tensors in the order of their gradients are cut into groups of neighbours, each compressed or, where
it may be, left as it is. What a group adds to a step rises with what was before it (see
`group_cost`), so that of all ways to group the first i tensors only those need to be kept that no
other one beats in every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_dear.planning.group_cost import Course, Rows

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
        uncompressed: Of each group, whether it is left as it is.
        step_s: What the course of the step says it takes.
    """

    cuts: tuple[int, ...]
    uncompressed: tuple[bool, ...]
    step_s: float


@dataclass(frozen=True)
class _Ways:
    """Ways to group the first so many pieces, in rows; where each came from."""

    rows: Rows
    begins: Rows
    before: Rows
    kinds: Rows
    counts: Rows

    def taken(self, places: Rows) -> _Ways:
        columns = self.rows, self.begins, self.before, self.kinds, self.counts
        return _Ways(*(one[places] for one in columns))


def best_groupings(
    course: Course, max_bytes: float = float("inf"), known_s: float = float("inf")
) -> list[Grouping]:
    """All groupings of the course's pieces that no other beats in every figure, the best first.

    O(N^2) times the number of ways kept for each number of pieces. It is exact for `NUM_EXACT`
    pieces. Of more, at most `MAX_WAYS` are kept for each, those whose steps could still become the
    shortest; without a codec there are seldom so many, with one the best may be lost by a percent.

    Args:
        course: Its pieces may be grouped.
        max_bytes: Of a group with more than one piece.
        known_s: A step that can be had: what must take longer is left out.
    """
    keeps_all = len(course.pieces) <= NUM_EXACT
    zeros = np.zeros(1, dtype=int)
    kept = [_Ways(course.start, zeros, zeros, zeros, zeros)]
    for end in range(1, len(course.pieces) + 1):
        found = _extended(course, kept, end, max_bytes)
        least_s = course.least_s(found.rows, end)
        # A shade more, so that rounding does not leave out the known one itself.
        found = found.taken(np.flatnonzero(least_s <= known_s * (1 + 1e-12)))
        course.level(found.rows, end)
        least_s = course.least_s(found.rows, end)
        kept.append(found.taken(_unbeaten(found, least_s, keeps_all=keeps_all)))
    steps_s = course.least_s(kept[-1].rows, len(course.pieces))
    return [_traced(kept, place, float(steps_s[place])) for place in np.argsort(steps_s)]


def _extended(course: Course, kept: list[_Ways], end: int, max_bytes: float) -> _Ways:
    """Every way kept for fewer pieces, with one more group that ends after `end` pieces."""
    found: list[_Ways] = []
    first_use_s = float("inf")
    for begin in range(end - 1, -1, -1):
        if course.total[end] - course.total[begin] > max_bytes and begin < end - 1:
            break
        first_use_s = min(first_use_s, course.pieces[begin].first_use_s)
        ways = kept[begin]
        size = len(ways.rows)
        for kind in range(len(course.costs)):
            rows = course.extended(ways.rows, begin, end, first_use_s, kind)
            places = np.arange(size), np.full(size, kind), ways.counts + 1
            found.append(_Ways(rows, np.full(size, begin), *places))
    names = ("rows", "begins", "before", "kinds", "counts")
    return _Ways(*(np.concatenate([getattr(one, name) for one in found]) for name in names))


def _unbeaten(found: _Ways, least_s: Rows, *, keeps_all: bool) -> Rows:
    """Places of the ways that no other beats, the most promising first; all, or `MAX_WAYS`."""
    # Of equal ones those with fewer groups.
    order = np.lexsort((found.counts, least_s))[: None if keeps_all else _MAX_CANDIDATES]
    rows = found.rows[order]
    rows = rows[:, np.ptp(rows, axis=0) > 0] if len(rows) else rows
    kept: list[int] = []
    while len(order) and (keeps_all or len(kept) < MAX_WAYS):
        kept.append(order[0])
        is_beaten = np.all(rows >= rows[0], axis=1)
        is_beaten[0] = True
        order, rows = order[~is_beaten], rows[~is_beaten]
    return np.array(kept, dtype=int)


def _traced(kept: list[_Ways], place: int, step_s: float) -> Grouping:
    cuts: list[int] = []
    kinds: list[bool] = []
    end = len(kept) - 1
    while end:
        ways = kept[end]
        cuts.append(end)
        kinds.append(bool(ways.kinds[place]))
        end, place = int(ways.begins[place]), int(ways.before[place])
    return Grouping(tuple(cuts[::-1]), tuple(kinds[::-1]), step_s)
