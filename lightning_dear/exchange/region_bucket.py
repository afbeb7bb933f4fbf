"""An owned bucket whose messages are as long as what is in them: Ok-Topk's, and TopkDSA's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression import OkTopk
from lightning_dear.compression.selectors import all_above, just_below
from lightning_dear.device_work import device_work
from lightning_dear.exchange.entries import Entries, joined, unpacked
from lightning_dear.exchange.owned_bucket import OwnedBucket
from lightning_dear.exchange.regions import equal_regions, regions_of, summary_of


class RegionBucket(OwnedBucket):
    """For gloo: how many numbers travel is looked up, and said.

    Attributes:
        regions: Where each rank's region begins, and the end.
        global_threshold: Of the owners' selections; 0: not known.
    """

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.global_threshold = self._next_global = 0.0
        self.regions = self._next_regions = self._shards
        self.has_regions = False

    @property
    @override
    def steering(self) -> Tensor:
        own = [self.global_threshold, self.has_regions, *self.regions]
        return torch.cat([super().steering, torch.tensor(own, dtype=torch.float64)])

    @override
    def steer(self, steering: Tensor) -> None:
        super().steer(steering)
        # Another compressor has saved something else, and others need equal regions.
        if len(steering) != 4 + len(self.regions) or not isinstance(self.configured, OkTopk):
            return
        _, _, everywhere, has_regions, *regions = steering.tolist()
        if regions[-1] == self.spec.padded_numel:
            self.has_regions = bool(has_regions)
            self.global_threshold = self._next_global = everywhere
            self.regions = self._next_regions = [int(place) for place in regions]

    # --- how many --------------------------------------------------------------------------------

    @property
    @override
    def most_sent(self) -> int:
        """Most numbers of one rank in one region."""
        cap = self.codec.message_cap if isinstance(self.codec, OkTopk) else math.inf
        return super().most_sent if cap == math.inf else int(cap * self.k / self._world_size)

    @property
    @override
    def most_owned(self) -> int:
        if not isinstance(self.codec, OkTopk):
            return self.spec.padded_numel // self._world_size
        cap = self.codec.owner_cap
        return self.numel if cap == math.inf else int(cap * self.k / self._world_size)

    @property
    def region(self) -> slice:
        """Where this rank's region lies in the bucket."""
        regions = self.regions if self.is_sparse else self._shards
        return slice(regions[self._rank], regions[self._rank + 1])

    @property
    def _shards(self) -> list[int]:
        return equal_regions(self.spec.padded_numel, self._world_size)

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def messages(
        self, waiting: Tensor, selected: Entries, scale: Tensor | None
    ) -> dict[int, Tensor]:
        if isinstance(self.codec, OkTopk):
            shape = len(waiting), self._world_size
            self._summary = summary_of(self.codec.boundaries, selected.places, *shape)
        sent = [part.largest(self.most_sent) for part in selected.cut(self.regions)]
        whole = joined(sent)
        waiting.index_fill_(0, whole.places, 0.0)
        self._sent.append(whole)
        messages = {rank: part.times(scale).packed() for rank, part in enumerate(sent)}
        self.tally.num_sent = len(whole.places)
        self.note_messages((own for rank, own in messages.items() if rank != self._rank), ())
        return messages

    @override
    def clear_others(self) -> None:
        self.bucket.mean[: self.region.start].zero_()
        self.bucket.mean[self.region.stop :].zero_()

    @override
    def take_back(self) -> Tensor:
        own = self._selected_from
        kept = own[self.chosen - self.region.start]
        own[self.chosen - self.region.start] = 0.0
        is_denser = own.any()
        own.zero_()
        own[self.chosen - self.region.start] = kept
        return is_denser

    # --- what is kept of the sums -----------------------------------------------------------------

    def candidates(self, floor: float) -> tuple[Entries, int]:
        """What of the region's sums is not 0 and at least `floor`, capped; and how many before."""
        own = self._selected_from
        if floor > 0:
            places = all_above(own[None], just_below(own.new_full((1, 1), floor)))
        else:
            places = own.nonzero().view(-1)
        found = Entries(places + self.region.start, own[places].float())
        return found.largest(self.most_owned), len(places)

    def keep(self, chosen: Entries) -> None:
        """Leaves nothing but `chosen` in the region; the rest may be asked for once more."""
        own, places = self._selected_from, chosen.places - self.region.start
        with device_work():
            own[places] = 0.0
            self._rejected = own.clone()
            own.zero_()
            own[places] = chosen.numbers.to(own.dtype)
        self.chosen = chosen.places

    @property
    @override
    def _selected_from(self) -> Tensor:
        return self.bucket.mean[self.region]

    @override
    def note_total(self, total: Tensor) -> None:
        shape = self.spec.padded_numel, self._world_size
        self._next_regions = regions_of(self.ok.boundaries, total, *shape).tolist()

    def note_threshold(self, value: float) -> None:
        """Told the next step's global threshold; it counts once this step is made."""
        self._next_global = value

    # --- the gather half --------------------------------------------------------------------------

    @override
    def message(self) -> Tensor:
        return Entries(self.chosen, self.bucket.mean[self.chosen].float()).packed()

    @override
    def write(self, own: Tensor, gathered: Tensor) -> Tensor:
        rows = [own if source == self._rank else row for source, row in enumerate(gathered)]
        parts = [unpacked(row) for row in rows]
        # Also the mean: 0 everywhere but where this rank's own part is written once more.
        gradients = self.bucket.gradients
        for part in parts:
            gradients[part.places.long()] = part.numbers.to(gradients.dtype)
        return torch.cat([part.places for part in parts]).long()

    @override
    def note_gathered(self, own: Tensor, gathered: Tensor) -> None:
        others = self._others(gathered)
        counts = [int(row[0]) for row in (own, *others)]
        self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
        self.note_messages([own] * len(others), others)

    # --- around a step ----------------------------------------------------------------------------

    @override
    def commit(self) -> None:
        super().commit()
        self.has_regions |= self.regions != self._next_regions
        self.regions, self.global_threshold = self._next_regions, self._next_global

    @override
    def discard(self) -> None:
        super().discard()
        self._next_regions, self._next_global = self.regions, self.global_threshold
