"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from collections.abc import Sequence

from lightning_dear.compression import Codec, PowerSGD, SparseAllReduce
from lightning_dear.exchange.base import Exchange, LossScale, Traffic
from lightning_dear.exchange.coded import CodedExchange
from lightning_dear.exchange.compressed_bucket import NO_SEED, CompressedBucket
from lightning_dear.exchange.low_rank import LowRankExchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse import exchange as sparse


def new_exchange(
    options: ExchangeOptions, codecs: Sequence[Codec | None], traffic: Traffic
) -> Exchange:
    """Returns the exchange for `options`. Local.

    Args:
        options: Says what each half carries, and how it is compressed.
        codecs: For each bucket, in the order of bucket numbers, the codec of its tensors. None
            means the codec of `options`. Read only if `options.compressor` is a codec.
        traffic: The buckets, and the collectives that move them.
    """
    compressor = options.compressor
    if compressor is None:
        return Exchange(traffic)
    if isinstance(compressor, Codec):
        return CodedExchange(traffic, options, codecs)
    if isinstance(compressor, SparseAllReduce):
        whole = sparse.TreeExchange if compressor.is_tree else sparse.WholeSparseExchange
        kind = whole if compressor.all_reduces else sparse.SparseExchange
        return kind(traffic, compressor)
    assert isinstance(compressor, PowerSGD)
    return LowRankExchange(traffic, compressor)


__all__ = ["NO_SEED", "CompressedBucket", "Exchange", "LossScale", "Traffic", "new_exchange"]
