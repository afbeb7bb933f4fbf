"""A sparse bucket that is cut into regions, of which each has an owner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.compression import OkTopk, SparseAllReduce
from lightning_dear.compression.selectors import all_above, just_below
from lightning_dear.exchange.entries import Entries, is_among, joined, unpacked
from lightning_dear.exchange.regions import equal_regions, regions_of, summary_of
from lightning_dear.exchange.sparse_bucket import SparseBucket
from lightning_dear.work import Collectives

NUM_FIRST_STEPS = 64
"""Steps at the beginning in each of which regions are made anew: residuals still grow."""


class RegionBucket(SparseBucket):
    """What one bucket sends in both halves, and what it leaves.

    Its mean is 0 but for what is in this rank's region.

    Args:
        bucket: See `SparseBucket`.
        configured: See `SparseBucket`.
        collectives: See `SparseBucket`.
        is_encoded: See `SparseBucket`.

    Attributes:
        gathered: [world_size, n] int32, what each owner sends to all.
        is_filled: Whether sums are so many that all of them travel, without places.
        regions: Where each rank's region begins, and the end.
        has_regions: Whether they follow anybody's selections.
        global_threshold: Of the owners' selections; 0: not known.
        chosen: [n] int64, ascending: what this rank's region keeps.
    """

    def __init__(
        self,
        bucket: Bucket,
        configured: SparseAllReduce,
        collectives: Collectives,
        *,
        is_encoded: bool,
    ) -> None:
        self._summary: Tensor | None = None
        self._sent: list[Entries] = []
        self.is_filled = False
        self.chosen = torch.empty(0, dtype=torch.int64)
        self._rejected: Entries | None = None
        self._set_aside: list[Entries] = []
        super().__init__(bucket, configured, collectives, is_encoded=is_encoded)

    @override
    def _make_room(self) -> None:
        super()._make_room()
        self.gathered = self._rows(self.most_owned if self.is_sparse else 0)

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
        regions = torch.tensor(self.regions, dtype=torch.float64)
        thresholds = super().steering, regions.new_tensor([self.global_threshold])
        return torch.cat([*thresholds, regions])

    @override
    def steer(self, steering: Tensor) -> None:
        super().steer(steering)
        # Another compressor has saved something else, and others need equal regions.
        if len(steering) != 2 + len(self.regions) or not isinstance(self.configured, OkTopk):
            return
        _, everywhere, *regions = steering.tolist()
        if regions[-1] == self.spec.padded_numel:
            self.has_regions = True
            self.global_threshold = self._next_global = everywhere
            self.regions = self._next_regions = [int(place) for place in regions]

    # --- how many --------------------------------------------------------------------------------

    @property
    def ok(self) -> OkTopk:
        """The codec, where it selects once more."""
        assert isinstance(self.codec, OkTopk)
        return self.codec

    @property
    @override
    def most_sent(self) -> int:
        """Most numbers of one rank in one region."""
        cap = self.codec.message_cap if isinstance(self.codec, OkTopk) else math.inf
        return super().most_sent if cap == math.inf else int(cap * self.k / self._world_size)

    @property
    def most_owned(self) -> int:
        """Most numbers that one owner keeps."""
        cap = self.codec.owner_cap if isinstance(self.codec, OkTopk) else math.inf
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

    def messages(
        self, waiting: Tensor, selected: Entries, scale: Tensor | None
    ) -> dict[int, Tensor]:
        """Cuts `selected` into each owner's, and takes what is sent out of `waiting`."""
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

    def clear_others(self) -> None:
        """Makes the mean 0 outside this rank's region."""
        self.bucket.mean[: self.region.start].zero_()
        self.bucket.mean[self.region.stop :].zero_()

    def take_back(self) -> bool:
        """Leaves of the mean what was chosen; whether there was more in this rank's region."""
        own = self.bucket.mean[self.region]
        kept = own[self.chosen - self.region.start]
        own[self.chosen - self.region.start] = 0.0
        is_denser = bool(own.any())
        own.zero_()
        own[self.chosen - self.region.start] = kept
        return is_denser

    # --- what is kept of the sums -----------------------------------------------------------------

    def candidates(self, floor: float) -> tuple[Entries, int]:
        """What of the region's sums is not 0 and at least `floor`, capped; and how many before."""
        own = self.bucket.mean[self.region]
        if floor > 0:
            places = all_above(own[None], just_below(own.new_full((1, 1), floor)))
        else:
            places = own.nonzero().view(-1)
        found = Entries(places + self.region.start, own[places].float())
        return found.largest(self.most_owned), len(places)

    def keep(self, chosen: Entries) -> None:
        """Leaves nothing but `chosen` in the region; the rest may be asked for once more."""
        own = self.bucket.mean[self.region]
        own[chosen.places - self.region.start] = 0.0
        places = own.nonzero().view(-1)
        self._rejected = Entries(places + self.region.start, own[places])
        self.bucket.mean[self.region].zero_()
        self.bucket.mean[chosen.places] = chosen.numbers.to(own.dtype)
        self.chosen = chosen.places

    def restore_rejected(self) -> None:
        """Adds to the mean what an earlier selection of the same step has left out.

        Or what nobody used then; perhaps somebody has meanwhile.
        """
        rejected = [] if self._rejected is None else [self._rejected]
        for one in (*rejected, *self._set_aside):
            self.bucket.mean.index_add_(0, one.places, one.numbers)
        self._rejected, self._set_aside = None, []

    @property
    def summary(self) -> Tensor:
        """Of this rank's selection, to be added up for the next step's regions."""
        assert self._summary is not None
        return self._summary

    def note_total(self, total: list[int]) -> None:
        """Told all ranks' summaries, added up; the regions change once the step is made."""
        shape = self.spec.padded_numel, self._world_size
        self._next_regions = regions_of(self.ok.boundaries, total, *shape)

    def note_threshold(self, value: float) -> None:
        """Told the next step's global threshold; it counts once this step is made."""
        self._next_global = value

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """What all ranks are to get of this rank's region; see `gathered`."""
        return Entries(self.chosen, self.bucket.mean[self.chosen].float()).packed()

    def write(self, own: Tensor, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients; returns its places, ascending."""
        rows = [own if source == self._rank else row for source, row in enumerate(gathered)]
        parts = [unpacked(row) for row in rows]
        # Also the mean: 0 everywhere but where this rank's own part is written once more.
        gradients = self.bucket.gradients
        for part in parts:
            gradients[part.places.long()] = part.numbers.to(gradients.dtype)
        return torch.cat([part.places for part in parts]).long()

    def note_gathered(self, own: Tensor, gathered: Tensor) -> None:
        """Counts what owners have sent in the tally."""
        others = self._others(gathered)
        counts = [int(row[0]) for row in (own, *others)]
        self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
        self.note_messages([own] * len(others), others)

    def note_all(self) -> None:
        """Counts all sums, without places, in the tally."""
        others = self.spec.padded_numel // self._world_size * (self._world_size - 1)
        self.tally.words_sent += others
        self.tally.words_received += others

    def take_sent(self) -> list[Entries]:
        """What this rank has sent for the step under way."""
        taken, self._sent = self._sent, []
        return taken

    def put_back(self, sent: list[Entries], selected: Tensor) -> None:
        """What was sent and not selected is to be sent still.

        Args:
            sent: By this rank.
            selected: [n] int64, ascending: places of what all ranks have got.
        """
        for one in sent:
            is_lost = ~is_among(one.places, selected)
            self.worker.put_back(one.places[is_lost], one.numbers[is_lost])
            self.worker.note_arrived(one.places[~is_lost])

    # --- around a step ----------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See `CompressedBucket`; what was sent in vain goes back to who has sent it."""
        super().note_used(used, scale, keeps=keeps and not self.is_sparse)
        if keeps and self.is_sparse:
            for part in self._unused:
                own = self.bucket.mean[part]
                places = own.nonzero().view(-1)
                self._set_aside.append(Entries(places + part.start, own[places]))
                own.zero_()

    @override
    def commit(self) -> None:
        super().commit()
        self.has_regions |= self.regions != self._next_regions
        self.regions, self.global_threshold = self._next_regions, self._next_global
        self._rejected, self._set_aside = None, []

    @override
    def discard(self) -> None:
        super().discard()
        self._next_regions, self._next_global = self.regions, self.global_threshold
        self._sent, self._rejected, self._set_aside = [], None, []

    @override
    def detach(self) -> None:
        super().detach()
        del self.gathered
