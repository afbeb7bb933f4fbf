"""Ok-Topk in messages that are always as long: no count travels, and no host waits for one.

Each rank's k largest numbers go to the regions' owners, and owners send the k / P largest of their
sums to all, as many as there is room for: one all-to-all and one all-gather. What has no room stays
in the residuals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import SELECTION_NUMBERS, Work, as_metadata
from lightning_dear.exchange.owned_bucket import OwnedBucket
from lightning_dear.exchange.sparse import SparseExchange
from lightning_dear.exchange.static_bucket import StaticBucket
from lightning_dear.telemetry.device_work import device_work


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
    def _launch_messages(self, one: OwnedBucket, messages: Mapping[int, Tensor] | Tensor) -> Work:
        assert isinstance(messages, Tensor)
        number = self._first_number + one.number
        return self._collectives.launch_all_to_all(messages, one.incoming, number)

    @override
    def _spread(self, one: OwnedBucket, message: Tensor, gathered: Tensor, number: int) -> Work:
        gathered[self._collectives.rank].copy_(message)
        return self._collectives.launch_all_gather(gathered.view(-1), number)

    @override
    def _choose(self, sparse: Sequence[OwnedBucket]) -> None:
        static = [one for one in sparse if isinstance(one, StaticBucket)]
        with device_work():
            for one in static:
                one.keep_largest()
        with as_metadata(self._collectives):
            self._add_up_summaries([one for one in static if one.are_regions_due])

    def _add_up_summaries(self, due: Sequence[StaticBucket]) -> None:
        """Tells buckets of which new regions are due what all ranks have selected. All call."""
        if not due:
            return
        summaries = [one.summary for one in due]
        total = torch.cat(summaries).to(torch.int32)
        self._collectives.launch_all_reduce(total, SELECTION_NUMBERS + self._first_number).wait()
        parts = torch.split(total, [len(one) for one in summaries])
        for one, part in zip(due, parts, strict=True):
            one.note_total(part.long())
