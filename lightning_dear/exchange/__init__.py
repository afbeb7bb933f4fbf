"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_dear.bucket import FlatBuffers
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec, PowerSGD, SparseAllReduce
from lightning_dear.exchange.base import NO_SEED, CompressedBucket, Exchange, LossScale
from lightning_dear.exchange.coded import CodedExchange
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.low_rank import LowRankExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.exchange import (
    SparseExchange,
    TreeExchange,
    WholeSparseExchange,
)


def new_exchange(
    options: ExchangeOptions,
    codecs: Sequence[Codec | None],
    uncompressed: Collection[int],
    collectives: Collectives,
    first_number: int,
    flat: FlatBuffers,
    loss_scale: LossScale,
) -> Exchange:
    """The exchange that `options` ask for, of the buckets in `flat`.

    `codecs`: what the tensors of each bucket are configured to be encoded by, row by row;
    `uncompressed`: numbers of buckets that travel as they are all the same; `first_number`: see
    `Exchange`; `loss_scale`: `LossScale`.
    """
    dense = DenseExchange(collectives, first_number, is_of_gradients=options.is_of_gradients)
    codec = options.codec
    if codec is None:
        return dense
    if isinstance(codec, Codec):
        return CodedExchange(dense, options, codecs, uncompressed, flat.buckets, loss_scale)
    if isinstance(codec, SparseAllReduce):
        whole = TreeExchange if codec.is_tree else WholeSparseExchange
        kind = whole if codec.all_reduces else SparseExchange
        return kind(dense, codec, uncompressed, flat.buckets, loss_scale)
    assert isinstance(codec, PowerSGD)
    return LowRankExchange(dense, codec, uncompressed, flat, loss_scale)


__all__ = ["NO_SEED", "CompressedBucket", "Exchange", "LossScale", "new_exchange"]
