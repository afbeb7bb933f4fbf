"""The sparse exchange: of about k numbers of each rank about k sums come back (Ok-Topk).

    gradients / P + residual -> local threshold -> to the regions' owners -> sum       (backward)
    sums -> each owner's share of k, the largest of its own -> u           (before the step)
    u -> to all ranks -> mean gradient; what has arrived leaves the residual   (the next forward)

Neither half waits for another rank but for what it sums and writes: regions, thresholds and owners'
shares of k follow from what messages of the step before have told. Only now and then ranks wait for
each other in between, for histograms. On gloo messages are as long as what is in them, and say so.

What saves nothing, because it is short, or of a dense step, travels as it is, in equal shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import (
    GRADIENT_NUMBERS,
    SELECTION_NUMBERS,
    Work,
    as_metadata,
)
from lightning_dear.compression import SparseAllReduce, TopkDSA
from lightning_dear.exchange.compressed import CompressedExchange, LossScale
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.entries import Entries
from lightning_dear.exchange.global_selection import keep_all, keep_largest
from lightning_dear.exchange.owned_bucket import OwnedBucket, Sent
from lightning_dear.exchange.region_bucket import RegionBucket, Seen, measure
from lightning_dear.exchange.sparse_bucket import SparseBucket, check_buckets
from lightning_dear.exchange.static_bucket import StaticBucket
from lightning_dear.telemetry.device_work import device_work
from lightning_dear.torch_modes import plain_mode


class SparseExchange(CompressedExchange):
    """Sums a few numbers of each rank at the owners of their regions, and spreads a few sums.

    Args:
        dense: Says what moves the bytes; where each rank has a region, nothing else is as dense.
        codec: Says which.
        uncompressed: Numbers of buckets that travel as they are.
        buckets: All of the plan's, each as long as its mean.
        loss_scale: Asked at each selection.
    """

    def __init__(
        self,
        dense: DenseExchange,
        codec: SparseAllReduce,
        uncompressed: Collection[int],
        buckets: Sequence[Bucket],
        loss_scale: LossScale,
    ) -> None:
        super().__init__(dense, codec, loss_scale)
        check_buckets(codec, uncompressed, self.collectives, buckets)
        self._seen: dict[int, Seen | None] = {}
        self.coded: Sequence[OwnedBucket] = [
            self._kind(
                bucket, codec, self.collectives, is_encoded=bucket.number not in uncompressed
            )
            for bucket in buckets
        ]

    @property
    def _kind(self) -> type[OwnedBucket]:
        return RegionBucket

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if one.is_sparse:
            self._expect_messages("reduce_scatter", one.incoming, number)
        else:
            self.collectives.expect_reduce_scatter(one.received, number)

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        """Selects of the bucket's gradients and starts sending it to the regions' owners."""
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        scale = self._loss_scale()
        if not one.is_sparse:
            return self._launch_as_it_is(one, number, scale)
        with device_work():
            waiting = one.accumulated(scale)
            selected = one.select(waiting)
            self._see(one, waiting, scale)
            # Who is nan or inf is larger than the others.
            self._look_for_inf(not_empty(selected))
            messages = one.messages(waiting, selected, scale)
        work = self._launch_messages(one, messages)
        return Work(work.wait, partial(sum_up, one))

    def _expect_messages(self, lane: str, room: Tensor, number: int) -> None:
        self.collectives.expect_messages(lane, room, number)

    def _launch_messages(self, one: OwnedBucket, messages: Mapping[int, Tensor] | Tensor) -> Work:
        assert isinstance(messages, Mapping)
        return self._send_messages("reduce_scatter", one, messages, one.incoming)

    def _send_messages(
        self,
        lane: str,
        one: OwnedBucket,
        messages: Mapping[int, Tensor],
        room: Tensor,
        number: int | None = None,
    ) -> Work:
        number = self.first_number + one.number if number is None else number
        one.note_sent(messages, lane, room)
        place = range(self.collectives.world_size), room, number
        return self.collectives.launch_messages(lane, messages, *place, 1 + one.notes_in(lane))

    def _see(self, one: OwnedBucket, waiting: Tensor, scale: Tensor | None) -> None:
        period = getattr(one.codec, "xi_every", 0)
        if not period or not one.is_due(period):
            return
        if one.number in self._seen:
            # Gradients came in several rounds, and none had all of them.
            self._seen[one.number] = None
        else:
            gradients = one.bucket.gradients.float()
            unscaled = gradients.clone() if scale is None else gradients / scale
            self._seen[one.number] = Seen(waiting.clone(), unscaled)

    def _launch_as_it_is(self, one: OwnedBucket, number: int, scale: Tensor | None) -> Work:
        with device_work():
            gradients = one.flushed(scale)
            self._look_for_inf(gradients)
        own = one.bucket.mean[one.own_shard]
        launch = self.collectives.launch_reduce_scatter
        work = launch(gradients, one.received, own, number)
        return Work(work.wait, one.clear_others)

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        super().add_earlier(bucket, earlier, is_empty=is_empty)
        self.coded[bucket.number].restore_rejected()

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        super().note_used(used, keeps=keeps)
        # What a rank refuses, all do.
        if keeps and self._refusal is None:
            self._choose([one for one in self.coded if one.is_sparse])
            seen = [(self.coded[at], one) for at, one in self._seen.items() if one is not None]
            measure(seen, self.collectives, self.first_number, self._loss_scale())
            self._seen = dict.fromkeys(self._seen)

    def _choose(self, sparse: Sequence[OwnedBucket]) -> None:
        """Leaves in means what owners keep. All ranks call; now and then blocks."""
        scale, place = self._loss_scale(), (self.collectives, self.first_number)
        factor = 1.0 if scale is None else float(scale)
        buckets = [one for one in sparse if isinstance(one, RegionBucket)]
        if isinstance(self._codec, TopkDSA):
            keep_all(buckets, *place)
            return
        with device_work():
            for one in buckets:
                if not one.is_exact:
                    one.keep_share(factor)
        keep_largest([one for one in buckets if one.is_exact], *place, factor)

    # --- the gather half --------------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if one.is_sparse and not one.is_filled:
            self._expect_messages("all_gather", one.gathered, number)
        else:
            self.collectives.expect_all_gather(bucket.gradients, number)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Packs what this rank's region keeps; what is returned sends it to all."""
        one = self.coded[bucket.number]
        if one.is_sparse and one.is_filled:
            # Of equal regions: all of it arrives.
            one.settle_all(one.take_sent())
            one.note_all()
        if one.is_filled or not one.is_sparse:
            return partial(self._send_as_it_is, one)
        with device_work():
            message = one.message()
        return partial(self._send, one, message, one.gathered, one.take_sent(), self._is_nan)

    def _send(
        self,
        one: OwnedBucket,
        message: Tensor,
        gathered: Tensor,
        sent: Sent,
        is_nan: Tensor | None,
    ) -> Work:
        work = self._spread(one, message, gathered, self.first_number + one.number)
        return Work(work.wait, partial(self._arrive, one, gathered, sent, is_nan))

    def _spread(self, one: OwnedBucket, message: Tensor, gathered: Tensor, number: int) -> Work:
        messages = dict.fromkeys(range(self.collectives.world_size), message)
        return self._send_messages("all_gather", one, messages, gathered, number)

    def _arrive(
        self, one: OwnedBucket, gathered: Tensor, sent: Sent, is_nan: Tensor | None
    ) -> None:
        # In whatever context somebody reads a parameter.
        with device_work(), plain_mode(one.bucket.parameters.device.type):
            one.settle(sent, one.write(gathered))
            one.note_gathered(gathered)
            if is_nan is not None:
                one.bucket.gradients.masked_fill_(is_nan, math.nan)

    def _send_as_it_is(self, one: OwnedBucket) -> Work:
        number = self.first_number + one.number
        work = self.collectives.launch_all_gather(one.bucket.gradients, number)
        # Never done at once, not even with one rank: whoever waits steps the bucket.
        return Work(work.wait)

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        one = self.coded[bucket.number]
        number = self.first_number + bucket.number + GRADIENT_NUMBERS
        if self._refusal is not None:
            # Nothing was chosen, on no rank.
            bucket.gradients.fill_(math.nan)
            return Work.done()
        if one.is_filled or not one.is_sparse:
            return self.collectives.launch_all_gather(bucket.gradients, number)
        gathered, words_sent = torch.empty_like(one.gathered), one.tally.words_sent
        work = self._spread(one, one.message(), gathered, number)
        # It is sent once more to be stepped.
        one.tally.words_sent = words_sent
        return Work(work.wait, partial(one.write, gathered))  # type: ignore[arg-type]

    @override
    def look_again(self) -> None:
        """Of gradients that hooks were shown: this rank's region counts, where they were not 0."""
        if self._refusal is not None:
            for one in self.coded:
                one.bucket.mean.fill_(math.nan)
            return
        sparse = [one for one in self.coded if one.is_sparse]
        is_denser = [one.take_back() for one in sparse]
        for one in self.coded:
            one.clear_others()
            self._look_for_inf(one.bucket.mean)
        flags = torch.zeros(2, dtype=torch.uint8, device=self.coded[0].bucket.mean.device)
        flags[0] = self.take_found_inf()
        flags[1] = torch.stack(is_denser).any() if is_denser else False
        self.collectives.launch_any(flags).wait()
        self.hear_found_inf(flags[0])
        # A hook that clips by a norm of nan changes all.
        if flags[1] and not flags[0]:
            self._refusal = RuntimeError(
                "A hook has changed elements of the mean gradient that were 0, which"
                f" compressor={self._codec.name!r} does not send. No weight has changed. Scale or"
                " clip gradients in hooks, or use another compressor."
            )

    @override
    def commit(self) -> None:
        super().commit()
        self._seen = {}

    @override
    def discard(self) -> None:
        super().discard()
        self._seen = {}

    @property
    @override
    def compression_ratio(self) -> float:
        return compression_ratio(self.coded, self.collectives.world_size)


def compression_ratio(buckets: Sequence[SparseBucket], world_size: int) -> float:
    """Words of dense all-reduces over those that usually travel."""
    dense = [2 * one.numel * (world_size - 1) / world_size for one in buckets]
    sent = [
        one.sparse.usual_words(one.numel, world_size) if one.is_sparse else words
        for one, words in zip(buckets, dense, strict=True)
    ]
    return sum(dense) / sum(sent) if world_size > 1 else 1.0


def sum_up(one: SparseBucket) -> None:
    """See `SparseBucket.sum_up`."""
    with device_work():
        one.sum_up()


def not_empty(entries: Entries) -> Tensor:
    """Its numbers, or a zero."""
    return entries.numbers if len(entries.numbers) else entries.numbers.new_zeros(1)


class StaticSparseExchange(SparseExchange):
    """See above and `SparseExchange`; works with every backend."""

    @property
    @override
    def _kind(self) -> type[OwnedBucket]:
        return StaticBucket

    @override
    def _expect_messages(self, lane: str, room: Tensor, number: int) -> None:
        if lane == "reduce_scatter":
            self.collectives.expect_all_to_all(room, number)
        else:
            self.collectives.expect_all_gather(room.view(-1), number)

    @override
    def _launch_messages(self, one: OwnedBucket, messages: Mapping[int, Tensor] | Tensor) -> Work:
        assert isinstance(messages, Tensor)
        number = self.first_number + one.number
        return self.collectives.launch_all_to_all(messages, one.incoming, number)

    @override
    def _spread(self, one: OwnedBucket, message: Tensor, gathered: Tensor, number: int) -> Work:
        gathered[self.collectives.rank].copy_(message)
        return self.collectives.launch_all_gather(gathered.view(-1), number)

    @override
    def _choose(self, sparse: Sequence[OwnedBucket]) -> None:
        static = [one for one in sparse if isinstance(one, StaticBucket)]
        with device_work():
            for one in static:
                one.keep_largest()
        with as_metadata(self.collectives):
            self._add_up_summaries([one for one in static if one.are_regions_due])

    def _add_up_summaries(self, due: Sequence[StaticBucket]) -> None:
        """Tells buckets of which new regions are due what all ranks have selected. All call."""
        if not due:
            return
        summaries = [one.summary for one in due]
        total = torch.cat(summaries).to(torch.int32)
        self.collectives.launch_all_reduce(total, SELECTION_NUMBERS + self.first_number).wait()
        parts = torch.split(total, [len(one) for one in summaries])
        for one, part in zip(due, parts, strict=True):
            one.note_total(part.long())
