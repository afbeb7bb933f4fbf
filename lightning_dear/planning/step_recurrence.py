"""A step as a function of its groups: one group after the other, in the order of gradients.

Group y holds what lies between two cuts of that order. Its gradients are complete at ready_y,
and forward first reads one of them at use_y. Encoding it takes e, its reduce-scatter r, decoding
and summing it s, stepping it and encoding the shard p, its all-gather g, decoding it (and stepping
it, where it is stepped whole) d. Then

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from lightning_dear.planning.gradient_order import Piece, families_of_pieces
from lightning_dear.planning.measured import CodecCost, Linear, ModelTimes, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.planning.predict import StepModel

Rows = np.ndarray
"""[number of ways, 8] seconds; the columns are `FREE` to `DECODED`."""

FREE, SUMMED, LATE, CLOCK, BEHIND, ENCODED, PASSED, DECODED = range(8)
"""f; h; l; c; sum e + sum s; E; sum p + sum d; D."""


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes, by its bytes: e, r, s, p, g and d of the module's words.

    Attributes:
        lines: All six, by the group's bytes, padding included.
        step_s: For each byte that is no padding, on top of p.
        late_step_s: The same on top of d, where the group is stepped whole.
    """

    lines: tuple[Linear, ...]
    step_s: float = 0.0
    late_step_s: float = 0.0


def _group_cost(
    codec: CodecCost, itemsize: int, model: StepModel, step_s: float, late_step_s: float
) -> GroupCost:
    """What `codec` and the link cost, and the optimizer's steps in seconds for a byte."""
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
    return GroupCost((*reduced, *gathered), step_s, late_step_s)


def _least_cost(costs: Sequence[GroupCost]) -> GroupCost:
    """What no group can be cheaper than, however it is encoded; steps do not depend on that."""
    lines = tuple(
        Linear(min(line.alpha for line in ways), min(line.beta for line in ways))
        for ways in zip(*(cost.lines for cost in costs), strict=True)
    )
    return replace(costs[0], lines=lines)


@dataclass(eq=False)
class Course:
    """The step of `pieces`, group by group.

    Attributes:
        pieces: In the order of their gradients.
        costs: What a group costs, for each way to encode it: the codec's, then, if there may be
            any, that of uncompressed ones.
        times: For the lengths of forward and backward.
        unit_bytes: A bucket's size is a multiple of this.
        total: Bytes of the first so many pieces, without padding.
        start: `Rows` of the one way to group no pieces.
    """

    pieces: Sequence[Piece]
    costs: Sequence[GroupCost]
    times: ModelTimes
    unit_bytes: int

    def __post_init__(self) -> None:
        self._least = _least_cost(self.costs)
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
        e, r, s, p, g, d = [line.of(padded) for line in cost.lines]
        # Padding is encoded and sent, but not stepped.
        return e, r, s, p + cost.step_s * nbytes, g, d + cost.late_step_s * nbytes

    def extended(self, rows: Rows, begin: int, end: int, first_use_s: float, kind: int) -> Rows:
        """Ways up to piece `begin`, with a group of the pieces up to `end`, encoded by `kind`.

        Args:
            rows: Not mutated.
            begin: Number of pieces before the group.
            end: Number of pieces with it.
            first_use_s: When forward first reads one of the group.
            kind: Number of the way among `costs`.
        """
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = self._cost_s(
            self.costs[kind], begin, end
        )
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
        """The shortest step that each way could still lead to; the step's length at the end."""
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
        """The step's length with groups that end after so many pieces each; all compressed."""
        rows, begin = self.start, 0
        for end in cuts:
            first_use_s = min(piece.first_use_s for piece in self.pieces[begin:end])
            rows, begin = self.extended(rows, begin, end, first_use_s, 0), end
        return float(self.least_s(rows, begin)[0])


def course_of(pieces: Sequence[Piece], itemsize: int, model: StepModel) -> Course:
    """The `Course` of one family, which has the link and the step to itself."""
    nbytes = max(sum(piece.nbytes for piece in pieces), 1)
    steps_s = model.times.step_s / nbytes, model.times.late_step_s / nbytes
    codecs = model.codecs
    kinds = (codecs.compressed, codecs.uncompressed) if codecs.may_mix else (codecs.compressed,)
    costs = [_group_cost(kind, itemsize, model, *steps_s) for kind in kinds]
    return Course(pieces, costs, model.times, ALIGNMENT * model.world_size * itemsize)


def courses_of(model: StepModel, max_pieces: int) -> list[Course]:
    """A `Course` for each family of the tensors, of at most `max_pieces` each; largest first."""
    families = families_of_pieces(model.tensors, model.times, max_pieces)
    return [course_of(pieces, itemsize, model) for itemsize, pieces in families]
