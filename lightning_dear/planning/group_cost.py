"""A step as a function of its groups: one group after the other, in the order of gradients.

Group y holds what lies between two places of that order. Its gradients are complete at ready_y,
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
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lightning_dear.planning.codec_cost import CodecCost, CodecCosts, Linear
from lightning_dear.planning.cost import LinkCost, sent_bytes
from lightning_dear.planning.pieces import Piece
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.planning.times import ModelTimes

Rows = np.ndarray
"""[number of ways, 8] seconds; the columns are `FREE` to `DECODED`."""

FREE, SUMMED, LATE, CLOCK, BEHIND, ENCODED, PASSED, DECODED = range(8)
"""f; h; l; c; sum e + sum s; E; sum p + sum d; D."""


@dataclass(frozen=True)
class GroupCost:
    """Seconds that a group takes, by its bytes: e, r, s, p, g and d of the module's words.

    Attributes:
        encode: Of all bytes, padding included, as are all but the last two.
        step_s: For each byte that is no padding, on top of `publish`.
        late_step_s: The same on top of `decode`, where it is stepped whole.
    """

    encode: Linear
    reduce: Linear
    sum: Linear
    publish: Linear
    gather: Linear
    decode: Linear
    step_s: float
    late_step_s: float

    def of(self, padded_bytes: int, nbytes: int) -> tuple[float, ...]:
        """e, r, s, p, g and d of a group of `padded_bytes`, of which `nbytes` are no padding."""
        return (
            self.encode.of(padded_bytes),
            self.reduce.of(padded_bytes),
            self.sum.of(padded_bytes),
            self.publish.of(padded_bytes) + self.step_s * nbytes,
            self.gather.of(padded_bytes),
            self.decode.of(padded_bytes) + self.late_step_s * nbytes,
        )


def group_cost(
    codec: CodecCost,
    itemsize: int,
    world_size: int,
    link: LinkCost,
    step_s: float,
    late_step_s: float,
) -> GroupCost:
    """What `codec` and `link` cost, as lines over a group's bytes, and the optimizer's steps.

    The steps in seconds for a byte: of shards, and of whole buckets in forward.
    """

    def line(linear: Linear, num_shards: int = 1) -> Linear:
        return Linear(linear.alpha, linear.beta / (num_shards * itemsize))

    def sent(row: Linear | None) -> Linear:
        if world_size == 1:
            return Linear()
        size = Linear(0.0, itemsize) if row is None else Linear(world_size * row.alpha, row.beta)
        alpha_s = link.reduce_scatter_s(size.alpha, world_size)
        return Linear(alpha_s, link.beta_s * sent_bytes(size.beta, world_size) / itemsize)

    return GroupCost(
        encode=line(codec.encode),
        reduce=sent(codec.reduce_bytes),
        sum=line(codec.decode_sum),
        publish=line(codec.encode_shard, world_size),
        gather=sent(codec.gather_bytes),
        decode=line(codec.decode),
        step_s=step_s,
        late_step_s=late_step_s,
    )


def least_cost(costs: Sequence[GroupCost]) -> GroupCost:
    """What no group can be cheaper than, however it is encoded; steps do not depend on that."""

    def least(kind: str) -> Linear:
        lines: list[Linear] = [getattr(cost, kind) for cost in costs]
        return Linear(min(one.alpha for one in lines), min(one.beta for one in lines))

    return GroupCost(
        encode=least("encode"),
        reduce=least("reduce"),
        sum=least("sum"),
        publish=least("publish"),
        gather=least("gather"),
        decode=least("decode"),
        step_s=costs[0].step_s,
        late_step_s=costs[0].late_step_s,
    )


class Course:
    """The step of `pieces`, group by group.

    Args:
        pieces: In the order of their gradients.
        costs: Of a group, for each way to encode it: the codec's, then, if there may be any, that
            of uncompressed ones.
        times: For the lengths of forward and backward.
        unit_bytes: Of which a bucket's size is a multiple.

    Attributes:
        total: Bytes of the first so many pieces, without padding.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        costs: Sequence[GroupCost],
        times: ModelTimes,
        unit_bytes: int,
    ) -> None:
        self.pieces = pieces
        self.costs = costs
        self._least = least_cost(costs)
        self._lengths_s = times.forward_s, times.backward_s
        self.total = [0, *accumulate(piece.nbytes for piece in pieces)]
        self._aligned = [0, *accumulate(piece.aligned_bytes for piece in pieces)]
        self._unit_bytes = unit_bytes
        self._ready_s = list(accumulate((piece.ready_s for piece in pieces), max))
        self.start = np.zeros((1, 8))
        self.start[0, [LATE, CLOCK]] = -np.inf

    def _cost_s(self, cost: GroupCost, begin: int, end: int) -> tuple[float, ...]:
        """Of a group of the pieces from `begin` to `end`, in the bucket that they would make."""
        padded = aligned(self._aligned[end] - self._aligned[begin], self._unit_bytes)
        return cost.of(padded, self.total[end] - self.total[begin])

    def extended(self, rows: Rows, begin: int, end: int, first_use_s: float, kind: int) -> Rows:
        """Ways up to piece `begin`, with a group of the pieces up to `end`, encoded by `kind`.

        Args:
            rows: Not mutated.
            begin: Number of pieces before the group.
            end: Number of pieces with it.
            first_use_s: When forward first reads one of the group.
            kind: Place among `costs`.
        """
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = self._cost_s(
            self.costs[kind], begin, end
        )
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
        backward_s = self._lengths_s[1]
        for column, least_s in (
            (FREE, self._ready_s[end] + rows[:, ENCODED]),
            (LATE, rows[:, DECODED] - self.pieces[end].first_use_s),
            (SUMMED, backward_s + rows[:, BEHIND]),
            (CLOCK, rows[:, PASSED]),
        ):
            np.maximum(rows[:, column], least_s, out=rows[:, column])

    def least_s(self, rows: Rows, end: int) -> Rows:
        """The shortest step that each way could still lead to; the step's length at the end."""
        forward_s, backward_s = self._lengths_s
        size = len(self.pieces)
        left = self._cost_s(self._least, end, size) if end < size else (0.0,) * 6
        encode_s, reduce_s, sum_s, publish_s, gather_s, decode_s = left
        reduced_s = np.maximum(
            backward_s + rows[:, BEHIND] + (encode_s + sum_s),
            np.maximum(rows[:, SUMMED] + sum_s, rows[:, FREE] + reduce_s),
        )
        passed_s = np.maximum(
            rows[:, PASSED] + (publish_s + decode_s),
            np.maximum(rows[:, CLOCK] + publish_s, rows[:, LATE] + gather_s),
        )
        return reduced_s + passed_s + forward_s

    def step_s(self, cuts: Sequence[int]) -> float:
        """The step's length with groups that end after so many pieces each; all compressed."""
        rows, begin = self.start, 0
        for end in cuts:
            first_use_s = min(piece.first_use_s for piece in self.pieces[begin:end])
            rows, begin = self.extended(rows, begin, end, first_use_s, 0), end
        return float(self.least_s(rows, begin)[0])


def course_of(
    pieces: Sequence[Piece],
    itemsize: int,
    world_size: int,
    times: ModelTimes,
    link: LinkCost,
    codecs: CodecCosts,
) -> Course:
    """The `Course` of one family, which has the link and the step to itself."""
    nbytes = max(sum(piece.nbytes for piece in pieces), 1)
    steps_s = times.step_s / nbytes, times.late_step_s / nbytes
    kinds = (codecs.compressed, codecs.uncompressed) if codecs.may_mix else (codecs.compressed,)
    costs = [group_cost(kind, itemsize, world_size, link, *steps_s) for kind in kinds]
    return Course(pieces, costs, times, ALIGNMENT * world_size * itemsize)
