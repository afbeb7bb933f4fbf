"""The exact dynamic programme that MergeComp's heuristic approximates, for both halves of a step.

Tensors in the order of their gradients are cut into groups of neighbours, each compressed or, where
it may be, left as it is. What a group adds to a step rises with what was before it, so that of all
ways to group the first i tensors only those need to be kept that no other one beats in every
figure.

A step is a function of its groups, one after the other in the order of gradients. Group y holds
what lies between two cuts of that order. Its gradients are complete at ready_y, and forward first
reads one of them at use_y. Encoding it takes e, its reduce-scatter r, decoding and summing it s,
stepping it and encoding the shard p, its all-gather g, decoding it (and stepping it, where it is
stepped whole) d. Then

    E_y = E_(y-1) + e                              encodings so far, which delay gradients
    f_y = max(f_(y-1), ready_y + E_y) + r          the link is free after its reduce-scatter
    h_y = max(h_(y-1), f_y) + s                    it is summed, if backward ended long before
    D_y = D_(y-1) + d                              decodings of it and of what forward reads later
    l_y = max(l_(y-1), D_y - use_y) + g            delay of forward's end after the link is free
    c_y = max(c_(y-1), l_y) + p                    the same after its shards begin to be stepped

    step = max(backward + sum e + sum s, h_N) + max(sum p + sum d, c_N) + forward

as gathers run, and forward reads, in the opposite order: what is added last is read first. That is
exact if forward does read in that order. Each line rises with what it is made of.

A group costs what `predict` says its bucket costs. It is encoded and sent with its padding: each
tensor rounded up to `ALIGNMENT` elements, their sum to `ALIGNMENT` x number of ranks. That depends
on where the group begins and ends, and on nothing before it: so of two ways to the same place, one
that is behind in no figure stays so, whatever comes next. And groups that are rounded up one by one
are never less than all of them rounded up at once, which is what `Course.least_s` counts for what
is left. Only the optimizer's steps are for tensors alone: it does not step padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from lightning_dear.planning.measured import CodecCost, Linear, ModelTimes, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, Specs, TensorSpec, aligned
from lightning_dear.planning.predict import StepModel

Rows = np.ndarray
"""[number of ways, 8] seconds; the columns are `FREE` to `DECODED`."""

FREE, SUMMED, LATE, CLOCK, BEHIND, ENCODED, PASSED, DECODED = range(8)
"""f; h; l; c; sum e + sum s; E; sum p + sum d; D."""

MAX_WAYS = 256
"""Kept for each number of pieces, where there are more than `NUM_EXACT`."""

NUM_EXACT = 12
"""Pieces of which all ways are kept that none beats."""

_MAX_CANDIDATES = 4096
"""Compared with each other for each number of pieces, where not all are kept."""

GroupCost = tuple[Linear, ...]
"""e, r, s, p, g and d of the module's words, of a group's bytes, padding included."""


def _group_cost(codec: CodecCost, itemsize: int, model: StepModel) -> GroupCost:
    """What `codec` and the link cost."""
    link, world_size = model.link, model.world_size

    def line(linear: Linear, num_shards: int = 1) -> Linear:
        return Linear(linear.alpha, linear.beta / (num_shards * itemsize))

    def sent(row: Linear | None) -> Linear:
        if world_size == 1:
            return Linear()
        size = Linear(0.0, itemsize) if row is None else Linear(world_size * row.alpha, row.beta)
        alpha_s = link.reduce_scatter_s(size.alpha, world_size)
        return Linear(alpha_s, link.beta_s * sent_bytes(size.beta, world_size) / itemsize)

    reduced = line(codec.encode), sent(codec.reduce_bytes), line(codec.decode_sum)
    gathered = line(codec.encode_shard, world_size), sent(codec.gather_bytes), line(codec.decode)
    return *reduced, *gathered


def backward_order(tensors: Specs, times: ModelTimes) -> list[list[TensorSpec]]:
    """Returns tensors in the order of their gradients, family by family; largest first."""
    families: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if tensor.is_used:
            families.setdefault(tensor.family, []).append(tensor)
    for family in families.values():
        # Measured times may be equal; then the recorded order decides.
        family.sort(key=lambda t: (times.ready_s.get(t.index, times.backward_s), t.ready, -t.index))
    return sorted(families.values(), key=lambda family: -sum(t.nbytes for t in family))


@dataclass(frozen=True)
class Piece:
    """Holds tensors that stay together, neighbours in the order of gradients.

    Attributes:
        indices: The tensors' numbers.
        nbytes: Size of all.
        aligned_bytes: The same as they lie in a bucket, each rounded up to whole `ALIGNMENT`s.
        ready_s: When the last gradient is there.
        first_use_s: When forward first reads one of them.
    """

    indices: tuple[int, ...]
    nbytes: int
    aligned_bytes: int
    ready_s: float
    first_use_s: float


def pre_merged(tensors: Specs, most: int) -> list[list[TensorSpec]]:
    """Returns at most so many runs of neighbours, joined while smaller than a size.

    The size is 1 KiB, doubled until few enough are left; so the runs joined are the smallest.
    """
    runs, size = [[tensor] for tensor in tensors], 1 << 10
    while len(runs) > most:
        # Begun anew each time, so that the outcome depends on the last size alone.
        runs, filled = [], 0
        for tensor in tensors:
            if runs and min(filled, tensor.nbytes) < size:
                runs[-1].append(tensor)
                filled += tensor.nbytes
            else:
                runs.append([tensor])
                filled = tensor.nbytes
        size *= 2
    return runs


def families_of_pieces(
    tensors: Specs, times: ModelTimes, max_pieces: int
) -> list[tuple[int, list[Piece]]]:
    """Returns of each family the bytes an element, and pieces in gradient order."""

    def piece_of(run: Sequence[TensorSpec]) -> Piece:
        return Piece(
            tuple(t.index for t in run),
            sum(t.nbytes for t in run),
            sum(aligned(t.numel) * t.itemsize for t in run),
            max(times.ready_s.get(t.index, times.backward_s) for t in run),
            min(times.first_use_s.get(t.index, times.forward_s) for t in run),
        )

    return [
        (family[0].itemsize, [piece_of(run) for run in pre_merged(family, max_pieces)])
        for family in backward_order(tensors, times)
    ]


@dataclass(eq=False)
class Course:
    """Computes the step of `pieces`, group by group.

    Attributes:
        pieces: In the order of their gradients.
        costs: What a group costs, for each way to encode it: the codec's, then, if there may be
            any, that of uncompressed ones.
        times: For the lengths of forward and backward.
        unit_bytes: A bucket's size is a multiple of this.
        per_byte_s: What the optimizer's step takes for each byte that is no padding: on top of p,
            and, where groups are stepped whole, on top of d.
        total: Bytes of the first so many pieces, without padding.
        start: `Rows` of the one way to group no pieces.
    """

    pieces: Sequence[Piece]
    costs: Sequence[GroupCost]
    times: ModelTimes
    unit_bytes: int
    per_byte_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        # What no group can be cheaper than, however it is encoded.
        self._least = tuple(
            Linear(min(line.alpha for line in ways), min(line.beta for line in ways))
            for ways in zip(*self.costs, strict=True)
        )
        self.total = [0, *accumulate(piece.nbytes for piece in self.pieces)]
        self._aligned = [0, *accumulate(piece.aligned_bytes for piece in self.pieces)]
        self._ready_s = list(accumulate((piece.ready_s for piece in self.pieces), max))
        # Nothing is late before the first group, not even by nothing: forward may be early.
        self.start = np.zeros((1, 8))
        self.start[0, [LATE, CLOCK]] = -np.inf

    def _cost_s(self, cost: GroupCost, begin: int, end: int) -> tuple[float, ...]:
        """e, r, s, p, g and d of the bucket that the pieces from `begin` to `end` would make."""
        padded = aligned(self._aligned[end] - self._aligned[begin], self.unit_bytes)
        nbytes = self.total[end] - self.total[begin]
        e, r, s, p, g, d = [line.of(padded) for line in cost]
        step_s, late_step_s = self.per_byte_s
        # Padding is encoded and sent, but not stepped.
        return e, r, s, p + step_s * nbytes, g, d + late_step_s * nbytes

    def extended(self, rows: Rows, begin: int, end: int, first_use_s: float, kind: int) -> Rows:
        """Returns ways up to piece `begin`, with a group up to `end`, encoded by `kind`.

        Args:
            rows: Not mutated.
            begin: Number of pieces before the group.
            end: Number of pieces with it.
            first_use_s: When forward first reads one of the group.
            kind: Number of the way among `costs`.
        """
        costs_s = self._cost_s(self.costs[kind], begin, end)
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = costs_s
        # The four sums; the others are maxima, each made of what stands in the lines above it.
        after = rows + (0, 0, 0, 0, encode_s + sum_s, encode_s, publish_s + decode_s, decode_s)
        launched_s = self._ready_s[end - 1] + after[:, ENCODED]
        after[:, FREE] = np.maximum(rows[:, FREE], launched_s) + reduce_s
        after[:, SUMMED] = np.maximum(rows[:, SUMMED], after[:, FREE]) + sum_s
        read_s = after[:, DECODED] - first_use_s
        after[:, LATE] = np.maximum(rows[:, LATE], read_s) + gather_s
        after[:, CLOCK] = np.maximum(rows[:, CLOCK], after[:, LATE]) + publish_s
        return after

    def level(self, rows: Rows, end: int) -> None:
        """Takes from `rows`, in place, what is no advantage: the next group waits in any case."""
        if end == len(self.pieces):
            return
        for column, least_s in (
            (FREE, self._ready_s[end] + rows[:, ENCODED]),
            (LATE, rows[:, DECODED] - self.pieces[end].first_use_s),
            (SUMMED, self.times.backward_s + rows[:, BEHIND]),
            (CLOCK, rows[:, PASSED]),
        ):
            np.maximum(rows[:, column], least_s, out=rows[:, column])

    def least_s(self, rows: Rows, end: int) -> Rows:
        """Returns the shortest step each way could still lead to; the step's length at the end."""
        size = len(self.pieces)
        left = self._cost_s(self._least, end, size) if end < size else (0.0,) * 6
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = left
        reduced_s = np.maximum(
            self.times.backward_s + rows[:, BEHIND] + (encode_s + sum_s),
            np.maximum(rows[:, SUMMED] + sum_s, rows[:, FREE] + reduce_s),
        )
        passed_s = np.maximum(
            rows[:, PASSED] + (publish_s + decode_s),
            np.maximum(rows[:, CLOCK] + publish_s, rows[:, LATE] + gather_s),
        )
        return reduced_s + passed_s + self.times.forward_s

    def step_s(self, cuts: Sequence[int]) -> float:
        """Returns the step's length with groups that end after so many pieces each; compressed."""
        rows, begin = self.start, 0
        for end in cuts:
            first_use_s = min(piece.first_use_s for piece in self.pieces[begin:end])
            rows, begin = self.extended(rows, begin, end, first_use_s, 0), end
        return float(self.least_s(rows, begin)[0])


def course_of(pieces: Sequence[Piece], itemsize: int, model: StepModel) -> Course:
    """Returns the `Course` of one family, which has the link and the step to itself."""
    nbytes = max(sum(piece.nbytes for piece in pieces), 1)
    steps_s = model.times.step_s / nbytes, model.times.late_step_s / nbytes
    codecs = model.codecs
    kinds = (codecs.compressed, codecs.uncompressed) if codecs.may_mix else (codecs.compressed,)
    costs = [_group_cost(kind, itemsize, model) for kind in kinds]
    return Course(pieces, costs, model.times, ALIGNMENT * model.world_size * itemsize, steps_s)


def courses_of(model: StepModel, max_pieces: int) -> list[Course]:
    """Returns a `Course` for each family, of at most `max_pieces` pieces; largest first."""
    families = families_of_pieces(model.tensors, model.times, max_pieces)
    return [course_of(pieces, itemsize, model) for itemsize, pieces in families]


def members_of(pieces: Sequence[Piece], cuts: Iterable[int]) -> list[list[int]]:
    """Returns the tensors' numbers, group by group; `cuts` counts the pieces up to each end."""
    return [
        [index for piece in pieces[begin:end] for index in piece.indices]
        for begin, end in pairwise([0, *cuts])
    ]


@dataclass(frozen=True)
class Grouping:
    """Describes one way to cut the pieces.

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
    """Returns all groupings of the pieces that no other beats in every figure, best first.

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
