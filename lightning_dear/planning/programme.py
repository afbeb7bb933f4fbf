"""Dynamic programme that finds the groups of tensors with the shortest predicted step.

MergeComp's search (see `planning/predicting.py`) is a heuristic for the same problem. Tensors, in
the order of their gradients, are cut into groups of neighbours, and each group becomes a bucket. It
is compressed or, if the plan may do so, left uncompressed. A way is one choice of groups for the
first i tensors. Its figures are the eight quantities below. If a figure is larger, the step is not
shorter, whatever groups follow. So a way can be dropped if another way for the same tensors has no
larger figure.

Quantities of group y: its gradients are complete at ready_y, and forward first reads one of its
tensors at use_y. Seconds are spent on each group in this order: e to encode it, r for its
reduce-scatter, s to decode and sum it, p to step and encode this rank's shard, g for its
all-gather, d to decode it (and to step it, if every rank steps whole buckets). Then

    E_y = E_(y-1) + e                              encodings so far, which delay gradients
    f_y = max(f_(y-1), ready_y + E_y) + r          the link is free after its reduce-scatter
    h_y = max(h_(y-1), f_y) + s                    it is summed, if backward ended long before
    D_y = D_(y-1) + d                              decodings of it and of what forward reads later
    l_y = max(l_(y-1), D_y - use_y) + g            if its gather begins at t, forward ends not
                                                   before t + l_y + forward
    c_y = max(c_(y-1), l_y) + p                    if its step begins at t, forward ends not
                                                   before t + c_y + forward

    step = max(backward + sum e + sum s, h_N) + max(sum p + sum d, c_N) + forward

since gathers and the reads of forward come in the opposite order: the group that is added last is
read first. This is exact if forward reads tensors in that order.

A group costs what `predict` says that its bucket costs. It is encoded and sent with its padding:
each tensor is rounded up to `ALIGNMENT` elements, and their sum to `ALIGNMENT` x world size. The
padding depends only on where the group begins and ends, not on earlier groups. So if a way is no
worse than another in any figure, it stays so, whatever groups follow both. `Course.least_s` takes
all pieces that are not grouped yet as one group, rounded up once, which is never larger than
several groups that are rounded up separately. Only the optimizer step is counted without padding,
which it does not touch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lightning_dear.planning.measured import CodecCost, Linear, ModelTimes, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, Specs, TensorSpec, aligned
from lightning_dear.planning.predict import StepModel

Rows = np.ndarray
"""numpy array. Usually figures of ways (see the module's docstring): [number of ways, 8] seconds,
with columns `FREE` to `DECODED`."""

FREE, SUMMED, LATE, CLOCK, BEHIND, ENCODED, PASSED, DECODED = range(8)
"""Columns of `Rows`. In the symbols of the module's docstring they are, in this order: f, h, l, c,
sum e + sum s, E, sum p + sum d, D."""

MAX_WAYS = 256
"""Most ways that are kept for each number of pieces, if there are more than `NUM_EXACT` pieces."""

NUM_EXACT = 12
"""With at most this many pieces, a way is dropped only if another way is no worse in any figure. So
the result is exact."""

_MAX_CANDIDATES = 4096
"""With more than `NUM_EXACT` pieces: most ways that are compared with each other for each number of
pieces. Those with the largest lower bounds are dropped before."""

GroupCost = tuple[Linear, ...]
"""Functions: bytes of a group, padding included -> seconds e, r, s, p, g and d of the module's
docstring, in this order."""


def _group_cost(codec: CodecCost, itemsize: int, model: StepModel) -> GroupCost:
    """Returns the costs in seconds of a group that `codec` encodes, as functions of its bytes.

    The optimizer step is not part of p and d here.

    Args:
        codec: Costs of encoding and decoding.
        itemsize: Bytes of an uncompressed element.
        model: Training for which the group is planned.
    """
    link, world_size = model.link, model.world_size

    def line(linear: Linear, num_shards: int = 1) -> Linear:
        return Linear(linear.alpha, linear.beta / (num_shards * itemsize))

    def sent(row: Linear | None) -> Linear:
        size = Linear(0.0, itemsize) if row is None else Linear(world_size * row.alpha, row.beta)
        alpha_s = link.reduce_scatter_s(size.alpha, world_size)
        return Linear(alpha_s, link.beta_s * sent_bytes(size.beta, world_size) / itemsize)

    reduced = line(codec.encode), sent(codec.reduce_bytes), line(codec.decode_sum)
    gathered = line(codec.encode_shard, world_size), sent(codec.gather_bytes), line(codec.decode)
    return *reduced, *gathered


def backward_order(tensors: Specs, times: ModelTimes) -> list[list[TensorSpec]]:
    """Returns the tensors of each family in the order of their gradients; largest family first.

    Tensors without a gradient in the recorded step are left out.
    """
    families: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if tensor.is_used:
            families.setdefault(tensor.family, []).append(tensor)
    for family in families.values():
        # Tensors with equal measured times are in the recorded order of gradients.
        family.sort(key=lambda t: (times.ready_s.get(t.index, times.backward_s), t.ready, -t.index))
    return sorted(families.values(), key=lambda family: -sum(t.nbytes for t in family))


class Piece(NamedTuple):
    """Describes a tensor, or neighbours in the order of gradients, that stay in one group.

    Attributes:
        indices: Indices of the tensors.
        nbytes: Bytes of all tensors of the piece together, without padding.
        aligned_bytes: Bytes of the piece in a bucket, where each tensor is rounded up to a multiple
            of `ALIGNMENT` elements.
        ready_s: Seconds from the beginning of backward to the last gradient of the piece.
        first_use_s: Seconds from the beginning of forward to its first read of the piece.
    """

    indices: tuple[int, ...]
    nbytes: int
    aligned_bytes: int
    ready_s: float
    first_use_s: float


def pre_merged(tensors: Specs, most: int) -> list[list[TensorSpec]]:
    """Returns `tensors` in runs of neighbours, at most `most` runs.

    If there are not more than `most` tensors, each is a run. Otherwise a tensor is joined to the
    run before it if the tensor, or that run, is smaller than a limit. The limit is 1 KiB, doubled
    until there are few enough runs.
    """
    runs, size = [[tensor] for tensor in tensors], 1 << 10
    while len(runs) > most:
        # Each limit starts with single tensors again, so that the runs depend only on the last
        # limit.
        runs, filled = [], 0
        for tensor in tensors:
            if not runs or min(filled, tensor.nbytes) >= size:
                runs.append([])
                filled = 0
            runs[-1].append(tensor)
            filled += tensor.nbytes
        size *= 2
    return runs


def _piece_of(run: Sequence[TensorSpec], times: ModelTimes) -> Piece:
    return Piece(
        tuple(t.index for t in run),
        sum(t.nbytes for t in run),
        sum(aligned(t.numel) * t.itemsize for t in run),
        max(times.ready_s.get(t.index, times.backward_s) for t in run),
        min(times.first_use_s.get(t.index, times.forward_s) for t in run),
    )


@dataclass(eq=False)
class Course:
    """Computes the figures of ways to group `pieces`, group by group, and the step they lead to.

    For the words and symbols, see the module's docstring.

    Attributes:
        pieces: Pieces of one family, in the order of their gradients.
        costs: Costs of a group for each kind of encoding. Kind 0 is the training's codec, or no
            codec if it has none. Kind 1 is to leave the bucket uncompressed; it is missing if plans
            may not do that.
        times: Times of a step; only the lengths of forward and backward are used.
        unit_bytes: The size of a bucket, padding included, is a multiple of this.
        per_byte_s: Seconds of the optimizer step for each byte without padding: (part of p, part
            of d). The second is not 0 if every rank steps whole buckets.
        total: total[i] is the number of bytes of the first i pieces, without padding.
        start: Figures with which grouping begins: of a single way, which has no groups.
    """

    pieces: Sequence[Piece]
    costs: Sequence[GroupCost]
    times: ModelTimes
    unit_bytes: int
    per_byte_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        # Lower bounds for e, r, s, p, g and d of a group of any kind.
        self._least = tuple(
            Linear(min(line.alpha for line in ways), min(line.beta for line in ways))
            for ways in zip(*self.costs, strict=True)
        )
        self.total = [0, *accumulate(piece.nbytes for piece in self.pieces)]
        self._aligned = [0, *accumulate(piece.aligned_bytes for piece in self.pieces)]
        self._ready_s = list(accumulate((piece.ready_s for piece in self.pieces), max))
        # The figures l and c begin with -inf and not with 0, since D - use is negative for a group
        # that forward reads late.
        self.start = np.zeros((1, 8))
        self.start[0, [LATE, CLOCK]] = -np.inf

    def _cost_s(self, cost: GroupCost, begin: int, end: int) -> tuple[float, ...]:
        """Returns the seconds e, r, s, p, g and d (see the module) of a group: pieces [begin, end).

        Args:
            cost: Costs of a group of the wanted kind: an item of `costs`, or `_least`.
            begin: Index of the first piece of the group.
            end: Index after its last piece.
        """
        padded = aligned(self._aligned[end] - self._aligned[begin], self.unit_bytes)
        nbytes = self.total[end] - self.total[begin]
        e, r, s, p, g, d = [line.of(padded) for line in cost]
        step_s, late_step_s = self.per_byte_s
        # Padding is encoded and sent, but not stepped.
        return e, r, s, p + step_s * nbytes, g, d + late_step_s * nbytes

    def extended(self, rows: Rows, begin: int, end: int, first_use_s: float, kind: int) -> Rows:
        """Returns the figures of ways to which one more group is added.

        Args:
            rows: Figures of ways to group the first `begin` pieces; not mutated.
            begin: Number of pieces before the group.
            end: Number of pieces up to the end of the group.
            first_use_s: Seconds from the beginning of forward to its first read of the group.
            kind: Kind of encoding: index in `costs`.

        Returns:
            A new array, with the same ways as `rows`, in the same order.
        """
        costs_s = self._cost_s(self.costs[kind], begin, end)
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = costs_s
        # The last four columns are sums. The first four are maxima, each of which depends on sums
        # and on maxima that are computed before it.
        after = rows + (0, 0, 0, 0, encode_s + sum_s, encode_s, publish_s + decode_s, decode_s)
        launched_s = self._ready_s[end - 1] + after[:, ENCODED]
        after[:, FREE] = np.maximum(rows[:, FREE], launched_s) + reduce_s
        after[:, SUMMED] = np.maximum(rows[:, SUMMED], after[:, FREE]) + sum_s
        after[:, LATE] = np.maximum(rows[:, LATE], after[:, DECODED] - first_use_s) + gather_s
        after[:, CLOCK] = np.maximum(rows[:, CLOCK], after[:, LATE]) + publish_s
        return after

    def level(self, rows: Rows, end: int) -> None:
        """Raises figures that are too small to matter, up to the value at which they would matter.

        In each maximum of the next group, a figure has no effect if it is below the other term. It
        is raised to a lower bound of that term. That makes more ways equal in this figure, so that
        more of them can be dropped. No step changes. Does nothing if all pieces are grouped.

        Args:
            rows: Figures of ways to group the first `end` pieces; mutated.
            end: Number of pieces that are grouped.
        """
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
        """Returns, for each way, a lower bound in seconds for the step, whatever groups follow.

        If all pieces are grouped, it is the step itself. The result is [number of ways].

        Args:
            rows: Figures of ways to group the first `end` pieces; not mutated.
            end: Number of pieces that are grouped.
        """
        size = len(self.pieces)
        left = self._cost_s(self._least, end, size) if end < size else (0.0,) * 6
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = left
        summed_s = np.maximum(rows[:, SUMMED] + sum_s, rows[:, FREE] + reduce_s)
        clock_s = np.maximum(rows[:, CLOCK] + publish_s, rows[:, LATE] + gather_s)
        behind_s = self.times.backward_s + rows[:, BEHIND] + (encode_s + sum_s)
        reduced_s = np.maximum(behind_s, summed_s)
        passed_s = np.maximum(rows[:, PASSED] + (publish_s + decode_s), clock_s)
        return reduced_s + passed_s + self.times.forward_s

    def step_s(self, cuts: Sequence[int]) -> float:
        """Returns the seconds of a step with a grouping, no bucket of which is left uncompressed.

        Args:
            cuts: For each group, the number of pieces up to its end.
        """
        rows, begin = self.start, 0
        for end in cuts:
            first_use_s = min(piece.first_use_s for piece in self.pieces[begin:end])
            rows, begin = self.extended(rows, begin, end, first_use_s, 0), end
        return float(self.least_s(rows, begin)[0])


def _course_of(family: Sequence[TensorSpec], model: StepModel, max_pieces: int) -> Course:
    """Returns the `Course` of one family, as if the model had no other families.

    Args:
        family: Tensors of the family, in the order of their gradients.
        model: Training that is planned for.
        max_pieces: Most pieces.
    """
    times, codecs, itemsize = model.times, model.codecs, family[0].itemsize
    pieces = [_piece_of(run, times) for run in pre_merged(family, max_pieces)]
    nbytes = max(sum(piece.nbytes for piece in pieces), 1)
    steps_s = times.step_s / nbytes, times.late_step_s / nbytes
    kinds = (codecs.compressed, codecs.uncompressed) if codecs.may_mix else (codecs.compressed,)
    costs = [_group_cost(kind, itemsize, model) for kind in kinds]
    return Course(pieces, costs, times, ALIGNMENT * model.world_size * itemsize, steps_s)


def courses_of(model: StepModel, max_pieces: int) -> list[Course]:
    """Returns a `Course` for each family, with at most `max_pieces` pieces; largest family first.

    Each is made as if there were no other families. Tensors without a gradient in the recorded step
    are left out.
    """
    families = backward_order(model.tensors, model.times)
    return [_course_of(family, model, max_pieces) for family in families]


def members_of(pieces: Sequence[Piece], cuts: Iterable[int]) -> list[list[int]]:
    """Returns for each group the indices of its tensors.

    Args:
        pieces: Pieces that are grouped.
        cuts: For each group, the number of pieces up to its end.
    """
    groups = [pieces[begin:end] for begin, end in pairwise([0, *cuts])]
    return [[index for piece in group for index in piece.indices] for group in groups]


class Grouping(NamedTuple):
    """Describes one way to group all pieces.

    Attributes:
        cuts: For each group, the number of pieces up to its end.
        uncompressed: For each group, whether it is left uncompressed.
        step_s: Seconds of a step, as `Course` computes them: without other families.
    """

    cuts: tuple[int, ...]
    uncompressed: tuple[bool, ...]
    step_s: float


class _Ways(NamedTuple):
    """Holds ways to group the first i pieces. A way is a row of both arrays.

    Attributes:
        rows: Figures of the ways: see `Rows`.
        origins: [number of ways, 4] integers that tell how a way was made. For each way: the number
            of pieces before its last group; the row, among the ways for these pieces, of the way
            without this group; the kind of encoding of this group; and the number of groups.
    """

    rows: Rows
    origins: Rows

    def taken(self, numbers: Rows) -> "_Ways":
        """Returns the ways in the rows `numbers`, in this order."""
        return _Ways(self.rows[numbers], self.origins[numbers])


def best_groupings(course: Course, known_s: float = float("inf")) -> list[Grouping]:
    """Returns the groupings of all pieces that the programme keeps, fastest first. Pure.

    A grouping is left out if another one is no worse in any figure. Takes O(N^2) times the number
    of ways that are kept for each number of pieces. The result is exact for up to `NUM_EXACT`
    pieces. With more pieces, for each number of pieces only the `MAX_WAYS` ways with the smallest
    lower bounds are kept. Without a codec there are seldom more. With a codec the best grouping may
    be dropped, and the fastest grouping that is left may be about 1 % slower.

    Args:
        course: Pieces to group, and their costs.
        known_s: Seconds of a step with some known grouping. Ways that can only lead to longer steps
            are left out, so that the result may be empty.
    """
    keeps_all = len(course.pieces) <= NUM_EXACT
    kept = [_Ways(course.start, np.zeros((1, 4), dtype=int))]
    for end in range(1, len(course.pieces) + 1):
        ways = _extended(course, kept, end)
        least_s = course.least_s(ways.rows, end)
        # The bound is a little more than `known_s`, so that rounding does not drop the known
        # grouping itself.
        ways = ways.taken(np.flatnonzero(least_s <= known_s * (1 + 1e-12)))
        course.level(ways.rows, end)
        least_s = course.least_s(ways.rows, end)
        kept.append(ways.taken(_unbeaten(ways, least_s, keeps_all=keeps_all)))
    steps_s = course.least_s(kept[-1].rows, len(course.pieces))
    return [_traced(kept, number, float(steps_s[number])) for number in np.argsort(steps_s)]


def _extended(course: Course, kept: list[_Ways], end: int) -> _Ways:
    """Returns all ways to group `end` pieces that extend a kept way by one group.

    Args:
        course: Pieces to group, and their costs.
        kept: kept[i] holds the ways kept for the first i pieces, for all i < end.
        end: Number of pieces to group.
    """
    longer: list[tuple[Rows, Rows]] = []
    first_use_s = float("inf")
    for begin in range(end - 1, -1, -1):
        first_use_s = min(first_use_s, course.pieces[begin].first_use_s)
        ways = kept[begin]
        for kind in range(len(course.costs)):
            origins = ways.origins * (0, 0, 0, 1) + (begin, 0, kind, 1)
            origins[:, 1] = np.arange(len(origins))
            longer.append((course.extended(ways.rows, begin, end, first_use_s, kind), origins))
    return _Ways(*(np.concatenate(parts) for parts in zip(*longer, strict=True)))


def _unbeaten(ways: _Ways, least_s: Rows, *, keeps_all: bool) -> Rows:
    """Returns row numbers of the ways that no other way beats, smallest lower bound first.

    A way beats another if none of its figures is larger.

    Args:
        ways: Ways to group the same pieces.
        least_s: Lower bound of the step of each way, in seconds.
        keeps_all: Whether all such ways are returned. If not, at most `MAX_WAYS` are returned, and
            only the `_MAX_CANDIDATES` ways with the smallest lower bounds are compared.
    """
    # Ways with equal bounds are ordered by their number of groups, fewest first.
    order = np.lexsort((ways.origins[:, 3], least_s))[: None if keeps_all else _MAX_CANDIDATES]
    rows = ways.rows[order]
    # A figure that all ways share cannot tell them apart, and comparing it takes time.
    rows = rows[:, np.ptp(rows, axis=0) > 0] if len(rows) else rows
    kept: list[int] = []
    while len(order) and (keeps_all or len(kept) < MAX_WAYS):
        kept.append(order[0])
        is_beaten = np.all(rows >= rows[0], axis=1)
        is_beaten[0] = True
        order, rows = order[~is_beaten], rows[~is_beaten]
    return np.array(kept, dtype=int)


def _traced(kept: list[_Ways], number: int, step_s: float) -> Grouping:
    """Returns the grouping of a way, by following its origins back to the first group.

    Args:
        kept: kept[i] holds the ways kept for the first i pieces.
        number: Row of the way in the last of `kept`, which holds ways for all pieces.
        step_s: Seconds of a step with the grouping.
    """
    cuts: list[int] = []
    kinds: list[bool] = []
    end = len(kept) - 1
    while end:
        cuts.append(end)
        end, number, kind, _ = (int(part) for part in kept[end].origins[number])
        kinds.append(bool(kind))
    return Grouping(tuple(cuts[::-1]), tuple(kinds[::-1]), step_s)
