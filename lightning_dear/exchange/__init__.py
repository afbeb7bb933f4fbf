"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, FlatBuffers
from lightning_dear.collectives.work import GRADIENT_NUMBERS, Collectives, Work
from lightning_dear.compression import Codec, PowerSGD, SparseAllReduce
from lightning_dear.exchange.base import Exchange, LossScale, Traffic
from lightning_dear.exchange.coded import CodedExchange
from lightning_dear.exchange.compressed_bucket import NO_SEED, CompressedBucket
from lightning_dear.exchange.low_rank import LowRankExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.exchange import (
    SparseExchange,
    TreeExchange,
    WholeSparseExchange,
)


class DenseExchange(Exchange):
    """Reduces and gathers buckets without compression: gradients and parameters as they are.

    A bucket that is all-reduced gives every rank the whole mean gradient at once, by the backend's
    own all-reduce, as DistributedDataParallel does it; nothing of it travels back.

    Exchanges that encode have one, for what they leave as it is.

    Args:
        collectives: See `Exchange`.
        first_number: See `Exchange`.
        is_of_gradients: Whether mean gradients are gathered instead of parameters (the paper).
    """

    def __init__(
        self, collectives: Collectives, first_number: int = 0, *, is_of_gradients: bool = False
    ) -> None:
        super().__init__(collectives, first_number)
        self._is_of_gradients = is_of_gradients

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        # An all-reduce has receives of its own.
        if not bucket.is_all_reduced:
            self.collectives.expect_reduce_scatter(bucket.received, self.number_of(bucket))

    @override
    def launch_reduce(self, bucket: Bucket) -> Work:
        if bucket.is_all_reduced:
            if bucket.has_master:
                # Summed in fp32 as by a reduce-scatter; older gloos know no bf16.
                bucket.mean.copy_(bucket.gradients)
            return self.collectives.launch_all_reduce(bucket.mean, self.number_of(bucket))
        buffers = bucket.gradients, bucket.received, bucket.mean
        return self.collectives.launch_reduce_scatter(*buffers, self.number_of(bucket))

    @override
    def expect_gather(self, bucket: Bucket) -> None:
        if not bucket.is_all_reduced:
            self.collectives.expect_all_gather(self._gathered(bucket), self.number_of(bucket))

    @override
    def prepare_gather(self, bucket: Bucket) -> Callable[[], Work]:
        if not self._is_of_gradients:
            bucket.publish()
        return partial(self._gather, bucket)

    def _gather(self, bucket: Bucket) -> Work:
        if bucket.is_all_reduced:
            return Work.done()
        number = self.number_of(bucket)
        work = self.collectives.launch_all_gather(self._gathered(bucket), number)
        is_staged = bucket.is_staged and not self._is_of_gradients
        return Work(work.wait, bucket.land) if is_staged else work

    def _gathered(self, bucket: Bucket) -> Tensor:
        """What every rank's part is written into, in place."""
        # Gradients that are reduced already, but for this rank's part, are of no use any more.
        return bucket.gradients if self._is_of_gradients else bucket.landing

    @override
    def launch_gather_gradients(self, bucket: Bucket) -> Work:
        if bucket.is_all_reduced:
            return Work.done()
        number = self.number_of(bucket) + GRADIENT_NUMBERS
        return self.collectives.launch_all_gather(bucket.gradients, number)


def new_exchange(
    options: ExchangeOptions,
    codecs: Sequence[Codec | None],
    uncompressed: Collection[int],
    collectives: Collectives,
    first_number: int,
    flat: FlatBuffers,
    loss_scale: LossScale,
) -> Exchange:
    """Returns the exchange that `options` ask for, of the buckets in `flat`.

    `codecs`: what the tensors of each bucket are configured to be encoded by, row by row;
    `uncompressed`: numbers of buckets that travel as they are all the same; `first_number`: see
    `Exchange`; `loss_scale`: see `LossScale`.
    """
    dense = DenseExchange(collectives, first_number, is_of_gradients=options.is_of_gradients)
    codec = options.codec
    if codec is None:
        return dense
    traffic = Traffic(dense, flat, uncompressed, loss_scale)
    if isinstance(codec, Codec):
        return CodedExchange(traffic, options, codecs)
    if isinstance(codec, SparseAllReduce):
        whole = TreeExchange if codec.is_tree else WholeSparseExchange
        kind = whole if codec.all_reduces else SparseExchange
        return kind(traffic, codec)
    assert isinstance(codec, PowerSGD)
    return LowRankExchange(traffic, codec)


__all__ = ["NO_SEED", "CompressedBucket", "Exchange", "LossScale", "new_exchange"]
