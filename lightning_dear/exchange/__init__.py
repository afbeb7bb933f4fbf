"""Exchanges move buckets: what is sent in each half, and what is done with it on arrival."""

from lightning_dear.exchange.dense import DenseExchange
from lightning_dear.exchange.gradients import GradientExchange
from lightning_dear.exchange.limited import LimitedGathers
from lightning_dear.gathering import Gathering
from lightning_dear.work import Collectives


def new_exchange(
    gathering: Gathering, collectives: Collectives, first_number: int
) -> DenseExchange:
    """The exchange that `gathering` asks for; see `DenseExchange` for the rest."""
    kind = GradientExchange if gathering.is_of_gradients else DenseExchange
    return kind(collectives, first_number)


__all__ = [
    "DenseExchange",
    "GradientExchange",
    "LimitedGathers",
    "new_exchange",
]
