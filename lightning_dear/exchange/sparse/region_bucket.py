"""A bucket that is cut into regions, in messages that are as long as what is in them.

Ok-Topk's, and TopkDSA's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.compression import Compressor, SparseAllReduce
from lightning_dear.compression.selectors import all_reaching
from lightning_dear.exchange.sparse.bucket import Launch, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries, joined, unpacked
from lightning_dear.exchange.sparse.regions import (
    Report,
    Shares,
    added_up,
    equal_regions,
    put_together,
    regions_of,
    sliced,
    summary_of,
    words_of_slice,
)
from lightning_dear.exchange.sparse.selection import Selection
from lightning_dear.exchange.sparse.sent import Sent, is_selected

LOOKED_AT_FIRST = 0.95
"""Of the last threshold: most owners find their share among the sums of at least so much."""

NUM_REPORTED = 2
"""Words of notes in which an owner reports, besides how many numbers it sends."""


class _Step(NamedTuple):
    """What is settled when a step's selection begins, and holds until all of it has arrived.

    Attributes:
        selection: Another one may be in use when the last messages arrive.
        regions: Where each rank's region begins, and the end.
        is_exact: Whether owners find the k largest of all sums.
        num_summed: Words of a slice of the summaries that are added up; 0: none.
    """

    selection: Selection
    regions: Sequence[int]
    is_exact: bool
    num_summed: int


class RegionBucket(SparseBucket):
    """For gloo: how many numbers travel is looked up, and said.

    What all ranks have to know for the next step travels as notes in the messages of this one: in
    backward each rank's summary of its selection, cut into a slice for each owner, who adds them
    up; afterwards the totals, and what owners report.

    Attributes:
        regions: Where each rank's region begins in the next step, and the end.
        has_regions: Whether regions follow anybody's selections.
        shares: How many numbers each owner keeps in it.
        chosen: [n] int64: what this rank's region keeps.
    """

    def __init__(
        self,
        bucket: Bucket,
        configured: SparseAllReduce,
        collectives: Collectives,
        *,
        is_encoded: bool,
    ) -> None:
        # Of what is under way, whatever is loaded meanwhile; none of equal regions.
        self._under_way: _Step | None = None
        self.chosen = torch.empty(0, dtype=torch.int64, device=bucket.mean.device)
        # False from a change of codec to the next selection: on one rank messages of the old k
        # arrive before the change and on another one after it, so they must change no shares.
        self._follows_shares = True
        self._total_slice = torch.empty(0, dtype=torch.int32)
        self._report = Report(0, 0, 0.0)
        super().__init__(bucket, configured, collectives, is_encoded=is_encoded)

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.shares = Shares.unknown(self._world_size)
        self.regions, self.has_regions = self._shards, False

    @property
    @override
    def steering(self) -> Tensor:
        own = [*self._size, self.shares.threshold, *self.shares.quotas]
        own += [self.has_regions, *self.regions]
        return torch.cat([super().steering, torch.tensor(own, dtype=torch.float64)])

    @override
    def steer(self, steering: Tensor) -> None:
        count, _, *own = steering.tolist()
        is_alike = len(steering) == len(self.steering)
        # Of mode "static" the second number is no threshold.
        super().steer(steering[:2] if is_alike or not own else steering.new_tensor([count, 0.0]))
        # Another compressor has saved something else, and others need equal regions.
        is_alike = is_alike and self.configured.is_regional
        if not is_alike or own[-1] != self.spec.padded_numel:
            return
        num_owners = self._world_size
        size, (everywhere, *quotas) = own[:2], own[2 : 3 + num_owners]
        has_regions, *regions = own[3 + num_owners :]
        if size == self._size:
            self.shares = Shares(everywhere, tuple(int(quota) for quota in quotas))
        self.has_regions, self.regions = bool(has_regions), [int(place) for place in regions]

    @property
    def _size(self) -> list[float]:
        """What shares are of."""
        regional = self.selection.is_regional
        return [self.selection.k, self.selection.most_owned] if regional else [0, 0]

    # --- how many --------------------------------------------------------------------------------

    @property
    @override
    def _most_notes(self) -> int:
        if not self.selection.is_regional:
            return 0
        return NUM_REPORTED + words_of_slice(self._world_size)

    @override
    def notes_in(self, lane: str) -> int:
        if self._under_way is None:
            return 0
        return self._under_way.num_summed + (NUM_REPORTED if lane == "all_gather" else 0)

    @property
    def region(self) -> slice:
        """Where this rank's region lies in the bucket."""
        step = self._under_way if self.is_sparse else None
        regions = self._shards if step is None else step.regions
        return slice(regions[self._rank], regions[self._rank + 1])

    @property
    def _shards(self) -> list[int]:
        return equal_regions(self.spec.padded_numel, self._world_size)

    @override
    def use(self, codec: Compressor) -> None:
        if codec != self.codec:
            # Shares are of another k. Until the next exact step nothing is known of the new one.
            self.shares = Shares.unknown(self._world_size)
            self._follows_shares = False
        super().use(codec)

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def select(self, waiting: Tensor) -> Entries:
        selected = super().select(waiting)
        self._follows_shares = True
        self._under_way = None
        if self.selection.is_regional:
            is_exact = self.shares.threshold <= 0 or self.sparse.is_exact(self._step)
            is_due = self.sparse.are_regions_due(self._step) or not self.has_regions
            num_summed = words_of_slice(self._world_size) if is_due else 0
            self._under_way = _Step(self.selection, self.regions, is_exact, num_summed)
        return selected

    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> Launch:
        """Cuts `selected`, which is of `waiting`, into each owner's, and notes what is sent."""
        sent = [part.largest(self.selection.most_sent) for part in selected.cut(self.regions)]
        num_sent = sum(len(part.places) for part in sent)
        # Where no cap binds, all of it is sent.
        is_all = num_sent == len(selected.places)
        self._sent.standing.append(selected if is_all else joined(sent))
        notes = self._notes_to_owners(selected.places, len(waiting))
        messages = {rank: part.times(scale).packed(notes[rank]) for rank, part in enumerate(sent)}
        self.tally.num_sent = num_sent
        return partial(self.launch, "reduce_scatter", messages, self.incoming)

    def _notes_to_owners(self, places: Tensor, numel: int) -> Tensor:
        """[world_size, words] int32: a slice of the summary for each, where regions are due."""
        if not self.notes_in("reduce_scatter"):
            return torch.empty((self._world_size, 0), dtype=torch.int32)
        return sliced(summary_of(places, numel), self._world_size)

    @override
    def sum_up(self) -> None:
        super().sum_up()
        if num_notes := self.notes_in("reduce_scatter"):
            slices = self.incoming[:, 1 : 1 + num_notes]
            self._total_slice = added_up(slices)

    def clear_others(self) -> None:
        """Makes the mean 0 outside this rank's region."""
        self.bucket.mean[: self.region.start].zero_()
        self.bucket.mean[self.region.stop :].zero_()

    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more in this region."""
        own = self._selected_from
        kept = own[self.chosen - self.region.start]
        own[self.chosen - self.region.start] = 0.0
        is_denser = own.any()
        own.zero_()
        own[self.chosen - self.region.start] = kept
        return is_denser

    # --- what is kept of the sums -----------------------------------------------------------------

    def sums(self, floor: float = 0.0) -> Entries:
        """What of the region's sums is not 0 and at least `floor`."""
        own = self._selected_from
        places = all_reaching(own, floor)
        return Entries(places + self.region.start, own.index_select(0, places).float())

    def choose(self, scale: float) -> Entries | None:
        """Keeps this owner's share of k, the largest of its sums; or all, if nothing is selected.

        Args:
            scale: What sums are multiplied by.

        Returns:
            Those of which all ranks have to agree what is kept, in `keep`; None: it is kept.
        """
        if self._under_way is not None and not self._under_way.is_exact:
            self._keep_share(scale)
            return None
        return self.sums().largest(self.selection.most_owned)

    def _keep_share(self, scale: float) -> None:
        quota = min(self.shares.quotas[self._rank], self.selection.most_owned)
        threshold = self.shares.threshold * scale
        found = self.sums(LOOKED_AT_FIRST * threshold)
        # Rarely: the sums have become smaller since the threshold was found.
        if len(found.places) < quota:
            found = self.sums()
        num_reached = int((found.numbers.abs() >= threshold).count_nonzero())
        self.keep(found.largest(quota), scale, num_reached)

    def keep(self, chosen: Entries, scale: float, num_reached: int | None = None) -> None:
        """Leaves nothing but `chosen` in the region; the rest may be asked for once more.

        Args:
            chosen: Of the region's sums.
            scale: What sums are multiplied by.
            num_reached: How many sums have reached the threshold; None: those that are chosen.
        """
        own, places = self._selected_from, chosen.places - self.region.start
        self._left_out.append((self.region, own.index_fill(0, places, 0.0)))
        own.zero_().index_copy_(0, places, chosen.numbers.to(own.dtype))
        self.chosen, count = chosen.places, len(places)
        smallest = float(chosen.numbers.abs().min()) / scale if count else 0.0
        self._report = Report(count, count if num_reached is None else num_reached, smallest)

    @property
    def _selected_from(self) -> Tensor:
        """A view of the mean: where this rank selects."""
        return self.bucket.mean[self.region]

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """[n] int32: what all ranks are to get of this rank's region; see `gathered`."""
        entries = Entries(self.chosen, self.bucket.mean.index_select(0, self.chosen).float())
        if self._under_way is None:
            return entries.packed()
        reached = torch.tensor([self._report.num_reached], dtype=torch.int32)
        # A message is one tensor of int32, so that a float travels as its bits.
        smallest = torch.tensor([self._report.smallest], dtype=torch.float32).view(torch.int32)
        return entries.packed(reached, smallest, self._total_slice[: self._under_way.num_summed])

    def spread(self, message: Tensor, gathered: Tensor, number: int) -> Work:
        """Starts sending `message` to all ranks, and everybody's into `gathered`."""
        messages = dict.fromkeys(range(self._world_size), message)
        return self.launch("all_gather", messages, gathered, number)

    def write(self, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients.

        Returns:
            [n] int64: its places.
        """
        num_notes = self.notes_in("all_gather")
        whole = joined([unpacked(row, num_notes) for row in gathered])
        # Also the mean: 0 everywhere but where this rank's own part is written once more.
        gradients, places = self.bucket.gradients, whole.places.long()
        numbers = whole.numbers.to(gradients.dtype)
        gradients.index_copy_(0, places, numbers)
        self._has_zeros = bool((numbers == 0).any())
        return places

    def settle(self, sent: Sent, selected: Tensor) -> None:
        """Notes what of `sent` has arrived, once `write` has written it and told its places."""

        def has_arrived(one: Entries) -> Tensor:
            if self._has_zeros:
                return is_selected(one, selected, self.spec.padded_numel)
            # Nothing else is in the bucket's gradients now.
            is_written = self.bucket.gradients.index_select(0, one.places) != 0
            return is_written & (one.numbers != 0) if self._unused else is_written

        sent.settle(self.worker, has_arrived)

    def settle_all(self, sent: Sent) -> None:
        """The same where all sums travel, without places, so that all that was sent arrives."""
        sent.settle_all(self.worker)
        others = self.spec.padded_numel // self._world_size * (self._world_size - 1)
        self.tally.words_sent += others
        self.tally.words_received += others

    def note_gathered(self, gathered: Tensor) -> None:
        """Counts what owners have sent in the tally, and hears what they report."""
        heads = gathered[:, : 1 + self.notes_in("all_gather")]
        counts = self.note_received(heads)
        self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
        if self._under_way is not None:
            self._hear(self._under_way, counts, heads[:, 1:])

    def _hear(self, step: _Step, counts: Sequence[int], notes: Tensor) -> None:
        """What owners have told all ranks says how the next step is made.

        Args:
            step: The one that has been made.
            counts: How many numbers each has sent.
            notes: [world_size, words] int32.
        """
        smallest = notes[:, 1].contiguous().view(torch.float32).tolist()
        told = zip(counts, notes[:, 0].tolist(), smallest, strict=True)
        reports = [Report(*one) for one in told]
        if self._follows_shares:
            k, cap = step.selection.k, step.selection.most_owned
            self.shares = self.shares.after(reports, k, cap, is_exact=step.is_exact)
        if not step.is_exact:
            self.tally.num_reached = sum(one.num_reached for one in reports)
            beyond = [one.num_reached - one.num_kept for one in reports]
            self.tally.num_held_back = sum(max(0, count) for count in beyond)
        if step.num_summed:
            total = put_together(notes[:, NUM_REPORTED:])
            numel, num_regions = self.spec.padded_numel, self._world_size
            regions = regions_of(total, numel, num_regions).tolist()
            self.has_regions |= regions != self.regions
            self.regions = regions
