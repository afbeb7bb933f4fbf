"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dear.bucket import Bucket
from lightning_dear.exchange.coded import CodedExchange, LossScale
from lightning_dear.exchange.coded_bucket import CodedBucket
from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.gradients import GradientExchange
from lightning_dear.exchange.limited import LimitedGathers
from lightning_dear.exchange_options import ExchangeOptions
from lightning_dear.work import Collectives


def new_exchange(
    options: ExchangeOptions,
    collectives: Collectives,
    first_number: int,
    buckets: Iterable[Bucket],
    loss_scale: LossScale,
) -> DenseExchange:
    """The exchange that `options` ask for; see `CodedExchange` for the rest."""
    kind = GradientExchange if options.is_of_gradients else DenseExchange
    dense = kind(collectives, first_number)
    if options.codec is None:
        return dense
    return CodedExchange(dense, options, collectives, first_number, buckets, loss_scale)


__all__ = [
    "CodedBucket",
    "CodedExchange",
    "DenseExchange",
    "GradientExchange",
    "LimitedGathers",
    "LossScale",
    "new_exchange",
]
