"""Ok-Topk in messages that are always as long: no count travels, and no host waits for one.

Each rank's k largest numbers go to the regions' owners, and owners send the k / P largest of their
sums to all, as many as there is room for: one all-to-all and one all-gather. What has no room stays
in the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from lightning_dear.device_work import device_work
from lightning_dear.exchange.global_selection import add_up_summaries
from lightning_dear.exchange.owned_bucket import OwnedBucket
from lightning_dear.exchange.sparse import SparseExchange
from lightning_dear.exchange.static_bucket import StaticBucket
from lightning_dear.work import SELECTION_NUMBERS, Work, as_metadata


class StaticSparseExchange(SparseExchange):
    """See above and `SparseExchange`; works with every backend."""

    @property
    @override
    def _kind(self) -> type[OwnedBucket]:
        return StaticBucket

    @override
    def _expect_messages(self, lane: str, room: Tensor, number: int) -> None:
        if lane == "reduce_scatter":
            self._collectives.expect_all_to_all(room, number)
        else:
            self._collectives.expect_all_gather(room.view(-1), number)

    @override
    def _launch_messages(
        self, messages: Mapping[int, Tensor] | Tensor, incoming: Tensor, number: int
    ) -> Work:
        assert isinstance(messages, Tensor)
        return self._collectives.launch_all_to_all(messages, incoming, number)

    @override
    def _spread(self, message: Tensor, gathered: Tensor, number: int) -> Work:
        gathered[self._collectives.rank].copy_(message)
        return self._collectives.launch_all_gather(gathered.view(-1), number)

    @override
    def _choose(self, sparse: Sequence[OwnedBucket]) -> None:
        with device_work():
            for one in sparse:
                assert isinstance(one, StaticBucket)
                one.keep_largest()
        with as_metadata(self._collectives):
            number = SELECTION_NUMBERS + self._first_number
            add_up_summaries(sparse, self._collectives, number)
