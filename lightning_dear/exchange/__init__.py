"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_dear.bucket import FlatBuffers
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec, PowerSGD, SparseAllReduce
from lightning_dear.exchange.coded import CodedExchange
from lightning_dear.exchange.compressed import LossScale
from lightning_dear.exchange.compressed_bucket import NO_SEED, CompressedBucket
from lightning_dear.exchange.dense import DenseExchange, GradientExchange
from lightning_dear.exchange.low_rank import LowRankExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse import SparseExchange, StaticSparseExchange
from lightning_dear.exchange.sparse_whole import WholeSparseExchange


def new_exchange(
    options: ExchangeOptions,
    codecs: Sequence[Codec | None],
    uncompressed: Collection[int],
    collectives: Collectives,
    first_number: int,
    flat: FlatBuffers,
    loss_scale: LossScale,
) -> DenseExchange:
    """The exchange that `options` ask for, of the buckets in `flat`.

    `codecs`: what the tensors of each bucket are configured to be encoded by, row by row;
    `uncompressed`: numbers of buckets that travel as they are all the same; see `LowRankExchange`
    for the rest.
    """
    kind = GradientExchange if options.is_of_gradients else DenseExchange
    dense = kind(collectives, first_number)
    if options.codec is None:
        return dense
    place = collectives, first_number
    if isinstance(options.codec, PowerSGD):
        low_rank = options.codec, uncompressed
        return LowRankExchange(dense, *low_rank, *place, flat, loss_scale)
    if isinstance(options.codec, SparseAllReduce):
        sparse = options.codec, uncompressed, *place, flat.buckets, loss_scale
        if options.codec.all_reduces:
            return WholeSparseExchange(dense, *sparse)
        return StaticSparseExchange(*sparse) if options.is_static else SparseExchange(*sparse)
    coding = options, codecs, uncompressed
    return CodedExchange(dense, *coding, *place, flat.buckets, loss_scale)


__all__ = [
    "CodedExchange",
    "DenseExchange",
    "CompressedBucket",
    "GradientExchange",
    "LossScale",
    "NO_SEED",
    "new_exchange",
]
