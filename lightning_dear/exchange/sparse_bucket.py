"""A bucket of which about k numbers travel: what this rank sends, sums and keeps of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, shard_slice
from lightning_dear.compression import Fp32, OkTopk
from lightning_dear.compression.memory import Memory
from lightning_dear.compression.selectors import all_above, just_below
from lightning_dear.compression.thresholds import MOST, LocalThreshold
from lightning_dear.compression.unsent import Forgotten, Unsent
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.exchange.entries import Entries, is_among, joined, unpacked
from lightning_dear.exchange.regions import equal_regions, regions_of, summary_of
from lightning_dear.work import Collectives

NUM_FIRST_STEPS = 64
"""Steps at the beginning in each of which regions are made anew: residuals still grow."""


class SparseBucket(CompressedBucket):
    """What one bucket sends in both halves, and what it leaves.

    Its mean is as long as the bucket: 0 but for what is in this rank's region.

    Args:
        bucket: Its gradients and its mean are read and written.
        configured: What makes it sparse.
        collectives: What moves it.
        is_encoded: Whether it is sparse at all, if that saves anything.

    Attributes:
        incoming: [world_size, n] int32, what each rank sends here to be summed.
        gathered: [world_size, n] int32, what each owner sends to all.
        received: Scratch to sum it as it is.
        regions: Where each rank's region begins, and the end.
        threshold: Of this rank's selection.
        global_threshold: Of the owners' selections; the smallest of the last exact one, or 0.
        chosen: [n] int64, ascending: what this rank's region keeps.
    """

    worker: Unsent
    codec: OkTopk | Fp32

    def __init__(
        self, bucket: Bucket, configured: OkTopk, collectives: Collectives, *, is_encoded: bool
    ) -> None:
        device, numel = bucket.mean.device, bucket.gradients.numel()
        kind = Unsent if configured.has_feedback else Forgotten
        codec = configured if is_encoded else Fp32()
        worker, owner = kind(numel, device), Memory(0, device)
        super().__init__(bucket, codec, worker, owner, collectives.world_size)
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._scratch_numel = collectives.scratch_numel(numel)
        self.numel = sum(piece.numel for piece in self.spec.slices)
        self.start_anew(None)
        self._summary: Tensor | None = None
        self._sent: list[Entries] = []
        self.chosen = torch.empty(0, dtype=torch.int64)
        self._rejected: Entries | None = None
        self._make_room()

    @override
    def _make_room(self) -> None:
        like, world_size = self.bucket.gradients, self._world_size
        self.received = like.new_empty(0 if self.is_sparse else self._scratch_numel)
        widths = (1 + 2 * self.most_sent, 1 + 2 * self.most_owned) if self.is_sparse else (0, 0)
        self.incoming, self.gathered = (
            like.new_empty((world_size, width), dtype=torch.int32) for width in widths
        )

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.threshold, self.global_threshold, self._next_global = LocalThreshold(), 0.0, 0.0
        self.regions = self._next_regions = self._shards

    @property
    @override
    def steering(self) -> Tensor:
        thresholds = self.threshold.value, self.global_threshold
        return torch.tensor([*thresholds, *self.regions], dtype=torch.float64)

    @override
    def steer(self, steering: Tensor) -> None:
        local, everywhere, *regions = steering.tolist()
        if len(regions) == len(self.regions) and regions[-1] == self.spec.padded_numel:
            self.threshold = LocalThreshold(local)
            self.global_threshold = self._next_global = everywhere
            self.regions = self._next_regions = [int(place) for place in regions]

    # --- how many --------------------------------------------------------------------------------

    @property
    def is_sparse(self) -> bool:
        """Whether it travels sparsely at present."""
        return isinstance(self.codec, OkTopk) and self.codec.saves(self.numel, self._world_size)

    @property
    def sparse(self) -> OkTopk:
        """The codec, where it is sparse."""
        assert isinstance(self.codec, OkTopk)
        return self.codec

    @property
    def k(self) -> int:
        """How many numbers are wanted."""
        return self.sparse.entries(self.numel)

    def _most(self, cap: float, without: int) -> int:
        return without if cap == math.inf else int(cap * self.k / self._world_size)

    @property
    def most_sent(self) -> int:
        """Most numbers of one rank in one region."""
        return self._most(self.sparse.message_cap, int(MOST * self.k))

    @property
    def most_owned(self) -> int:
        """Most numbers that one owner keeps."""
        return self._most(self.sparse.owner_cap, self.numel)

    def is_due(self, period: int) -> bool:
        """Whether something that is done every `period` sparse steps is to be done in this one."""
        return (self.counts["reduce"] - 1) % period == 0

    @property
    def region(self) -> slice:
        """Where this rank's region lies in the bucket."""
        regions = self.regions if self.is_sparse else self._shards
        return slice(regions[self._rank], regions[self._rank + 1])

    @property
    def _shards(self) -> list[int]:
        return equal_regions(self.spec.padded_numel, self._world_size)

    # --- the reduce half: sparse -----------------------------------------------------------------

    def accumulated(self, scale: Tensor | None) -> Tensor:
        """This rank's gradients with what it has not sent of earlier ones, without the scale."""
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.worker.accumulate(gradients.float(), scale)

    def select(self, waiting: Tensor) -> Entries:
        """What of `waiting` is large."""
        self.counts["reduce"] += 1
        is_exact = self.is_due(self.sparse.tau_prime)
        places = self.threshold.find(waiting, self.k, is_exact=is_exact)
        return Entries(places, waiting[places])

    def messages(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> list[Tensor]:
        """Cuts `selected` at the regions, and takes what is sent out of `waiting`."""
        shape = len(waiting), self._world_size
        self._summary = summary_of(self.sparse.boundaries, selected.places, *shape)
        sent = [part.largest(self.most_sent) for part in selected.cut(self.regions)]
        whole = joined(sent)
        waiting.index_fill_(0, whole.places, 0.0)
        self._sent.append(whole)
        return [part.times(scale).packed() for part in sent]

    def sum_up(self, own: Tensor) -> None:
        """Makes the mean of this rank's region, from `incoming` and its own message to itself."""
        mean = self.bucket.mean.zero_()
        for source, row in enumerate(self.incoming):
            part = unpacked(own if source == self._rank else row)
            mean.index_add_(0, part.places, part.numbers.to(mean.dtype))

    # --- the reduce half: as it is ----------------------------------------------------------------

    def flushed(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, mutated: with all that was not sent of earlier ones."""
        waiting = self.accumulated(scale)
        gradients = self.bucket.gradients
        gradients.copy_(waiting if scale is None else waiting * scale)
        waiting.zero_()
        return gradients

    @property
    def own_shard(self) -> slice:
        """Where this rank's part of what travels as it is lies."""
        return shard_slice(self.spec.padded_numel, self._rank, self._world_size)

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
        """Adds to the mean what an earlier selection of the same step has left out."""
        if self._rejected is not None:
            self.bucket.mean.index_add_(0, self._rejected.places, self._rejected.numbers)
            self._rejected = None

    @property
    def summary(self) -> Tensor:
        """Of this rank's selection, to be added up for the next step's regions."""
        assert self._summary is not None
        return self._summary

    def note_total(self, total: list[int]) -> None:
        """Told all ranks' summaries, added up; the regions change once the step is made."""
        shape = self.spec.padded_numel, self._world_size
        self._next_regions = regions_of(self.sparse.boundaries, total, *shape)

    def note_threshold(self, value: float) -> None:
        """Told the next step's global threshold; it counts once this step is made."""
        self._next_global = value

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """What all ranks are to get of this rank's region; see `gathered`."""
        return Entries(self.chosen, self.bucket.mean[self.chosen].float()).packed()

    def take_sent(self) -> list[Entries]:
        """What this rank has sent for the step under way."""
        taken, self._sent = self._sent, []
        return taken

    def write(self, own: Tensor, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients; returns its places, ascending."""
        rows = [own if source == self._rank else row for source, row in enumerate(gathered)]
        parts = [unpacked(row) for row in rows]
        gradients = self.bucket.gradients.zero_()
        for part in parts:
            gradients[part.places.long()] = part.numbers.to(gradients.dtype)
        return torch.cat([part.places for part in parts]).long()

    def put_back(self, sent: list[Entries], selected: Tensor) -> None:
        """What was sent and not selected is to be sent still.

        Args:
            sent: By this rank.
            selected: [n] int64, ascending: places of what all ranks have got.
        """
        for one in sent:
            is_lost = ~is_among(one.places, selected)
            self.worker.put_back(one.places[is_lost], one.numbers[is_lost])

    # --- around a step ----------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See `CompressedBucket`; what was sent in vain goes back to who has sent it."""
        super().note_used(used, scale, keeps=keeps and not self.is_sparse)
        if keeps and self.is_sparse:
            for part in self._unused:
                self.bucket.mean[part].zero_()

    @override
    def commit(self) -> None:
        super().commit()
        self.threshold.commit()
        self.regions, self.global_threshold = self._next_regions, self._next_global
        self._rejected = None

    @override
    def discard(self) -> None:
        super().discard()
        self._next_regions, self._next_global = self.regions, self.global_threshold
        self._sent, self._rejected = [], None

    @override
    def detach(self) -> None:
        super().detach()
        del self.incoming, self.gathered, self.received
