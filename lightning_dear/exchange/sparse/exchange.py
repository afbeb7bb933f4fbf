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
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import GRADIENT_NUMBERS, Work
from lightning_dear.compression import SparseAllReduce
from lightning_dear.exchange.base import CompressedExchange, LossScale, Sending
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.sparse.bucket import compression_ratio, not_empty
from lightning_dear.exchange.sparse.entries import Entries
from lightning_dear.exchange.sparse.largest import are_filled, largest_of_all
from lightning_dear.exchange.sparse.region_bucket import RegionBucket
from lightning_dear.exchange.sparse.selection import check_buckets
from lightning_dear.exchange.sparse.sent import Sent
from lightning_dear.exchange.sparse.static_bucket import StaticBucket, add_up_summaries
from lightning_dear.telemetry.device_work import device_work
from lightning_dear.torch_modes import plain_mode

OwnedBucket = RegionBucket | StaticBucket
"""A bucket of which each rank owns a region; the latter works with every backend."""


class SparseExchange(CompressedExchange):
    """Sums a few numbers of each rank at the owners of their regions, and spreads a few sums.

    Args:
        dense: Says what moves the bytes. What is not sparse goes another way here: each rank has
            its shard of a mean that is as long as the bucket.
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
        kind = StaticBucket if codec.is_static else RegionBucket
        self.coded: Sequence[OwnedBucket] = [
            kind(bucket, codec, self.collectives, is_encoded=bucket.number not in uncompressed)
            for bucket in buckets
        ]

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if one.is_sparse:
            one.expect("reduce_scatter", number)
        else:
            self.collectives.expect_reduce_scatter(one.received, number)

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Selects of the bucket's gradients; what is large goes to the regions' owners."""
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if not one.is_sparse:
            gradients = one.flushed(scale)
            self._look_for_inf(gradients)
            return Sending(partial(self._send_gradients, one, gradients, number))
        waiting = one.accumulated(scale)
        selected = one.select(waiting)
        # Who is nan or inf is larger than the others.
        self._look_for_inf(not_empty(selected))
        launch = one.pack(waiting, selected, scale)
        return Sending(partial(launch, number), one.sum_up)

    def _send_gradients(self, one: OwnedBucket, gradients: Tensor, number: int) -> Work:
        own = one.bucket.mean[one.own_shard]
        work = self.collectives.launch_reduce_scatter(gradients, one.received, own, number)
        return Work(work.wait, one.clear_others)

    @override
    def add_earlier(self, bucket: Bucket, earlier: Tensor | None, *, is_empty: bool) -> None:
        super().add_earlier(bucket, earlier, is_empty=is_empty)
        self.coded[bucket.number].restore()

    @override
    def note_used(self, used: Sequence[bool], *, keeps: bool) -> None:
        super().note_used(used, keeps=keeps)
        # What a rank refuses, all do.
        if keeps and self._refusal is None:
            self._choose([one for one in self.coded if one.is_sparse])

    def _choose(self, sparse: Sequence[OwnedBucket]) -> None:
        """Leaves in means what owners keep. All ranks call; now and then blocks."""
        scale, place = self._loss_scale(), (self.collectives, self.first_number)
        factor = 1.0 if scale is None else float(scale)
        asked: list[tuple[RegionBucket, Entries]] = []
        static = [one for one in sparse if isinstance(one, StaticBucket)]
        with device_work():
            for one in sparse:
                if isinstance(one, StaticBucket):
                    one.keep_largest()
                elif (own := one.choose(factor)) is not None:
                    asked.append((one, own))
        # An exact step's, and those of who keeps all: ranks have to hear of each other's.
        buckets, sums = [one for one, _ in asked], [each for _, each in asked]
        if all(one.selection.is_regional for one in buckets):
            ks = [one.selection.k for one in buckets]
            kept = largest_of_all(sums, ks, *place)
            sums = [own.at(which) for own, which in zip(sums, kept, strict=True)]
        else:
            numels = [one.numel for one in buckets]
            for one, is_filled in zip(buckets, are_filled(sums, numels, *place), strict=True):
                one.is_filled = is_filled
        with device_work():
            for one, own in zip(buckets, sums, strict=True):
                one.keep(own, factor)
        add_up_summaries(static, *place)

    # --- the gather half --------------------------------------------------------------------------

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        one, number = self.coded[bucket.number], self.first_number + bucket.number
        if one.is_sparse and not one.is_filled:
            one.expect("all_gather", number)
        else:
            self.collectives.expect_all_gather(bucket.gradients, number)

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        """Packs what this rank's region keeps; what is returned sends it to all."""
        one = self.coded[bucket.number]
        if one.is_sparse and not one.is_filled:
            with device_work():
                message = one.message()
            return partial(self._send, one, message, one.gathered, one.take_sent(), self._is_nan)
        if isinstance(one, RegionBucket) and one.is_sparse:
            # Of equal regions: all of it arrives.
            one.settle_all(one.take_sent())
        return partial(self._send_as_it_is, one)

    def _send(
        self,
        one: OwnedBucket,
        message: Tensor,
        gathered: Tensor,
        sent: Sent,
        is_nan: Tensor | None,
    ) -> Work:
        work = one.spread(message, gathered, self.first_number + one.number)
        return self._decoded(work, partial(self._arrive, one, gathered, sent, is_nan))

    def _arrive(
        self, one: OwnedBucket, gathered: Tensor, sent: Sent, is_nan: Tensor | None
    ) -> None:
        # In whatever context somebody reads a parameter.
        with plain_mode(one.bucket.parameters.device.type):
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
        work = one.spread(one.message(), gathered, number)
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
        is_denser = [one.take_back() for one in self.coded if one.is_sparse]
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

    @property
    @override
    def compression_ratio(self) -> float:
        return compression_ratio(self.coded, self.collectives.world_size)
