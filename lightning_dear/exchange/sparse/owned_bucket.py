"""A bucket that is cut into regions: Ok-Topk's, and TopkDSA's.

In messages that are as long as what is in them, or always as long: then nobody looks up what
travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import SELECTION_TAGS, Collectives, Work, as_metadata
from lightning_dear.compression.selectors import all_reaching
from lightning_dear.exchange.sparse.bucket import LaunchWithTag, Selection, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries, joined, unpacked
from lightning_dear.exchange.sparse.regions import (
    REPORT_WORDS,
    OwnerReport,
    Shares,
    equal_regions,
    regions_of,
    sliced,
    summary_of,
    words_of_slice,
)
from lightning_dear.torch_modes import plain_mode

LOOKED_AT_FIRST = 0.95
"""Of the last threshold: most owners find their share among the sums of at least so much."""


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

    # Settled when a step's selection begins, until all of it has arrived, whatever is loaded
    # meanwhile: how many numbers travel, whether owners find the k largest of all sums, and words
    # of notes to all.
    _settled: Selection
    _is_exact: bool
    _num_told: int

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def _make_room(self) -> None:
        # Owners report to all, and hear of regions, where these follow selections.
        self._most_notes = words_of_slice(self._world_size) if self.sparse.is_regional else 0
        self._report_words = REPORT_WORDS if self.sparse.is_regional else 0
        self._head_words = 1 + self._report_words + self._most_notes
        super()._make_room()
        # Shares are of another k. Until the next exact step nothing is known of the new one.
        self.shares = Shares.unknown(self._world_size)
        # Until the next selection: on one rank messages of the old k arrive before the change and
        # on another one after it, so they must change no shares.
        self._follows_shares = False

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.shares = Shares.unknown(self._world_size)
        self.regions = equal_regions(self.spec.padded_numel, self._world_size)
        self.has_regions = False

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
        is_alike = is_alike and self.sparse.is_regional
        if not is_alike or own[-1] != self.spec.padded_numel:
            return
        size, (everywhere, *quotas) = own[:2], own[2 : 3 + self._world_size]
        has_regions, *regions = own[3 + self._world_size :]
        if size == self._size:
            self.shares = Shares(everywhere, tuple(int(quota) for quota in quotas))
        self.has_regions, self.regions = bool(has_regions), [int(place) for place in regions]

    @property
    def _size(self) -> list[float]:
        """What shares are of."""
        selection = self.selection
        return [selection.k, selection.most_owned] if self.sparse.is_regional else [0, 0]

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def select(self, waiting: Tensor) -> Entries:
        selected = super().select(waiting)
        step, self._settled = self.counts["reduce"] - 1, self.selection
        self.region = slice(self.regions[self._rank], self.regions[self._rank + 1])
        self._is_exact = self.shares.threshold <= 0 or self.sparse.is_exact(step)
        is_due = self.sparse.are_regions_due(step) or not self.has_regions
        self._num_notes = self._most_notes if is_due else 0
        self._num_told = self._report_words + self._num_notes
        self._follows_shares = True
        return selected

    @override
    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> LaunchWithTag:
        """Cuts `selected`, which is of `waiting`, into each owner's; what is sent is taken out."""
        parts = [part.largest(self.selection.most_sent) for part in selected.cut(self.regions)]
        self.tally.num_sent = num_sent = sum(len(part.places) for part in parts)
        # Where no cap binds, all of it is sent.
        sent = selected if num_sent == len(selected.places) else joined(parts)
        waiting.index_fill_(0, sent.places, 0.0)
        self._sent.append(sent)
        notes = torch.empty((self._world_size, 0), dtype=torch.int32)
        if self._num_notes:
            notes = sliced(summary_of(selected.places, len(waiting)), self._world_size)
        messages = {rank: one.times(scale).packed(notes[rank]) for rank, one in enumerate(parts)}
        return partial(self.launch, "reduce_scatter", messages, self.incoming, self._num_notes)

    # --- what is kept of the sums -----------------------------------------------------------------

    def choose(self, scale: float) -> Entries | None:
        """Keeps this owner's share of k, the largest of its sums; or all, if nothing is selected.

        Args:
            scale: What sums are multiplied by.

        Returns:
            Those of which all ranks have to agree what is kept, in `keep`; None: it is kept.
        """
        if self._is_exact:
            return self._sums().largest(self.selection.most_owned)
        quota, threshold = self.shares.quotas[self._rank], self.shares.threshold * scale
        found = self._sums(LOOKED_AT_FIRST * threshold)
        # Rarely: the sums have become smaller since the threshold was found.
        if len(found.places) < quota:
            found = self._sums()
        num_reached = int((found.numbers.abs() >= threshold).count_nonzero())
        self.keep(found.largest(quota), scale, num_reached)
        return None

    def _sums(self, floor: float = 0.0) -> Entries:
        """What of the region's sums is not 0 and at least `floor`."""
        own = self.bucket.mean[self.region]
        places = all_reaching(own, floor)
        return Entries(places + self.region.start, own.index_select(0, places).float())

    def keep(self, chosen: Entries, scale: float, num_reached: int | None = None) -> None:
        """Leaves nothing but `chosen` in the region; the rest may be asked for once more.

        Args:
            chosen: Of the region's sums.
            scale: What sums are multiplied by.
            num_reached: How many sums have reached the threshold; None: those that are chosen.
        """
        self._leave(chosen.places, chosen.numbers)
        self.chosen, count = chosen.places, len(chosen.places)
        smallest = float(chosen.numbers.abs().min()) / scale if count else 0.0
        self._report = OwnerReport(count, count if num_reached is None else num_reached, smallest)

    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more in this region."""
        own, places = self.bucket.mean[self.region], self.chosen - self.region.start
        kept = own[places]
        is_denser = own.index_fill_(0, places, 0.0).any()
        own.zero_().index_copy_(0, places, kept)
        return is_denser

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """[n] int32: what all ranks are to get of this rank's region; see `gathered`."""
        entries = Entries(self.chosen, self.bucket.mean.index_select(0, self.chosen).float())
        if not self._num_told:
            return entries.packed()
        reached = torch.tensor([self._report.num_reached], dtype=torch.int32)
        # A message is one tensor of int32, so that a float travels as its bits.
        smallest = torch.tensor([self._report.smallest], dtype=torch.float32).view(torch.int32)
        # Of all ranks' summaries this owner's slice, added up.
        slices = self.incoming[:, 1 : 1 + self._num_notes]
        return entries.packed(reached, smallest, slices.sum(0, dtype=torch.int32))

    def spread(self, message: Tensor, gathered: Tensor, tag: int) -> Work:
        """Starts sending `message` to all ranks, and everybody's into `gathered`."""
        messages = dict.fromkeys(range(self._world_size), message)
        return self.launch("all_gather", messages, gathered, self._num_told, tag)

    def write(self, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients.

        Returns:
            [n] int64: its places.
        """
        whole = joined([unpacked(row, self._num_told) for row in gathered])
        # Also the mean: 0 everywhere but where this rank's own part is written once more.
        gradients, places = self.bucket.gradients, whole.places.long()
        numbers = whole.numbers.to(gradients.dtype)
        gradients.index_copy_(0, places, numbers)
        self._has_zeros = bool((numbers == 0).any())
        return places

    def arrive(self, gathered: Tensor, sent: list[Entries], is_nan: Tensor | None) -> None:
        """What owners have sent has come: writes it, and hears what they report.

        Args:
            gathered: See above.
            sent: By this rank in that step; what of it is not among it is to be sent once more.
                Emptied.
            is_nan: Whether all of it is to be nan; None: it is not.
        """
        # In whatever context somebody reads a parameter.
        with plain_mode(self.bucket.parameters.device.type):
            selected, gradients = self.write(gathered), self.bucket.gradients
            for one in sent:
                # Nothing else is in the bucket's gradients now.
                has_arrived = (gradients.index_select(0, one.places) != 0) & (one.numbers != 0)
                if self._has_zeros:
                    has_arrived = one.are_among(selected, self.spec.padded_numel)
                self.worker.settle(one, has_arrived)
            sent.clear()
            heads = gathered[:, : 1 + self._num_told]
            counts = self.note_received(heads)
            self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
            if self._num_told:
                self._hear(counts, heads[:, 1:])
            if is_nan is not None:
                gradients.masked_fill_(is_nan, math.nan)

    def _hear(self, counts: Sequence[int], notes: Tensor) -> None:
        """What owners have told all ranks says how the next step is made.

        Args:
            counts: How many numbers each has sent.
            notes: [world_size, words] int32.
        """
        smallest = notes[:, 1].contiguous().view(torch.float32).tolist()
        told = zip(counts, notes[:, 0].tolist(), smallest, strict=True)
        reports = [OwnerReport(*one) for one in told]
        if self._follows_shares:
            k, cap = self._settled.k, self._settled.most_owned
            self.shares = self.shares.after(reports, k, cap, is_exact=self._is_exact)
        if self._num_notes:
            summaries = notes[:, REPORT_WORDS:]
            regions = regions_of(summaries, self.spec.padded_numel, self._world_size).tolist()
            self.has_regions |= regions != self.regions
            self.regions = regions


class StaticBucket(SparseBucket):
    """For NCCL: the host waits for no number, and what does not fit stays in the residual.

    A message has room for as many numbers as it may bring, first all places and then all numbers.
    Where less is to be sent, places are those behind the bucket's end in what owners send to all,
    whose numbers may be 0 because a hook has made them so; a 0 sent to an owner is no number.

    Attributes:
        edges: [world_size + 1] int64, on the device: where each region begins, and the end.
        has_regions: Whether regions follow anybody's selections.
        summary: Of this rank's selection, to be added up for the next step's regions.
        chosen: [n] int64: what this rank's region keeps.
    """

    summary: Tensor
    _head_words = 0

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        regions = equal_regions(self.spec.padded_numel, self._world_size)
        self.edges = torch.tensor(regions, device=self.bucket.mean.device)
        self._next_edges, self.has_regions = self.edges, False

    @property
    @override
    def steering(self) -> Tensor:
        own = self.edges.new_tensor([self.counts["reduce"], self.has_regions])
        return torch.cat([own, self.edges]).double()

    @override
    def steer(self, steering: Tensor) -> None:
        self.counts["reduce"] = int(steering[0])
        # Another mode or compressor has saved something else.
        if len(steering) == 2 + len(self.edges) and steering[-1] == self.spec.padded_numel:
            self.edges = self._next_edges = steering[2:].to(self.edges)
            self.has_regions = bool(steering[1])

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def select(self, waiting: Tensor) -> Entries:
        """The k largest of `waiting`, by falling size; fewer where others are zero."""
        step = self._begin()
        self.are_regions_due = self.sparse.are_regions_due(step) or not self.has_regions
        # Its owner does not know where its region is, and has nothing of others'.
        self.region = slice(0, self.spec.padded_numel)
        places = waiting.abs().topk(self.selection.k).indices
        selected = Entries(places, waiting[places])
        self.tally.num_selected = (selected.numbers != 0).sum()
        return selected

    @override
    def expect(self, lane: str, tag: int) -> None:
        if lane == "reduce_scatter":
            self._collectives.expect_messages(lane, self.incoming, tag)
        else:
            self._collectives.expect_all_gather(self.gathered.view(-1), tag)

    @override
    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> LaunchWithTag:
        """Cuts `selected` into each owner's, and clears in `waiting` what there is room for."""
        room, places, numbers = self.selection.most_sent, selected.places, selected.numbers
        is_number = (numbers != 0).long()
        self.summary = summary_of(places, self.spec.padded_numel, is_number)
        region = torch.bucketize(places, self.edges[1:-1], right=True)
        order = _order_within(region, self._world_size)
        is_sent = (order < room) & (numbers != 0)
        waiting.index_copy_(0, places, numbers.masked_fill(is_sent, 0.0))
        shape, num_slots = (self._world_size, room), self._world_size * room
        # Others go behind the end.
        slots = torch.where(is_sent, region * room + order, num_slots)
        ends = (each.new_zeros(num_slots + 1) for each in (places, numbers))
        both = zip(ends, (places, numbers), strict=True)
        sent = Entries(*(end.index_copy_(0, slots, each)[:-1] for end, each in both))
        self._sent.append(sent)
        self.tally.num_sent = is_sent.sum()
        self.count_words(2 * room)
        scaled = sent.times(scale).numbers.view(torch.int32).view(shape)
        rows = torch.cat([sent.places.int().view(shape), scaled], dim=1)
        return partial(self._collectives.launch_all_to_all, rows, self.incoming)

    @override
    def sum_up(self) -> None:
        mean = self.bucket.mean.zero_()
        # Rank by rank: but for zeros no place comes twice from one rank, so that a device, too,
        # adds up in the order of the ranks.
        for part in _parts(self.incoming):
            mean.index_add_(0, part.places, part.numbers.to(mean.dtype))

    # --- what is kept of the sums -----------------------------------------------------------------

    def keep_largest(self) -> None:
        """Leaves as many as there is room for in the mean; the rest may be asked for once more."""
        mean = self.bucket.mean
        self.chosen = mean.abs().topk(self.selection.most_owned).indices
        kept = mean[self.chosen]
        self._is_empty = kept == 0
        self._leave(self.chosen, kept)

    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more than was shown."""
        mean, end = self.bucket.mean, self.spec.padded_numel
        kept = mean[self.chosen]
        was_shown = torch.zeros(end + 1, dtype=torch.bool, device=mean.device)
        was_shown.index_fill_(0, self._shown, True)
        is_denser = mean.masked_fill_(was_shown[:end], 0.0).any()
        mean.zero_().index_copy_(0, self.chosen, kept.masked_fill(self._is_empty, 0.0))
        return is_denser

    def follow(self, total: Tensor) -> None:
        """Told all ranks' summaries, added up; the regions change once the step is made."""
        self._next_edges = regions_of(total, self.spec.padded_numel, self._world_size)

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """[2 n] int32: what all ranks are to get of this rank's region; see `gathered`."""
        numbers = self.bucket.mean[self.chosen].float().masked_fill(self._is_empty, 0.0)
        places = self.chosen.masked_fill(self._is_empty, self.spec.padded_numel)
        return torch.cat([places.int(), numbers.view(torch.int32)])

    def spread(self, message: Tensor, gathered: Tensor, tag: int) -> Work:
        """Starts sending `message` to all ranks, and everybody's into `gathered`."""
        gathered[self._rank].copy_(message)
        return self._collectives.launch_all_gather(gathered.view(-1), tag)

    def write(self, gathered: Tensor) -> Tensor:
        """Makes what owners have sent the bucket's gradients.

        Returns:
            [n] int64: its places, and perhaps the bucket's end.
        """
        gradients, last = self.bucket.gradients.zero_(), self.spec.padded_numel - 1
        parts = _parts(gathered)
        for part in parts:
            # What stands behind the end is 0.
            places = part.places.clamp(max=last)
            gradients.index_add_(0, places, part.numbers.to(gradients.dtype))
        self._shown = torch.cat([part.places for part in parts]).long().sort().values
        return self._shown

    def arrive(self, gathered: Tensor, sent: list[Entries], is_nan: Tensor | None) -> None:
        """What owners have sent has come: see `RegionBucket`."""
        end = self.spec.padded_numel
        # In whatever context somebody reads a parameter.
        with plain_mode(self.bucket.parameters.device.type):
            selected = self.write(gathered)
            for one in sent:
                self.worker.settle(one, one.are_among(selected, end))
            sent.clear()
            counts = torch.stack([(part.places < end).sum() for part in _parts(gathered)])
            self.tally.num_kept, self.tally.most_kept = counts.sum(), counts.max()
            self.count_words(gathered.shape[1])
            if is_nan is not None:
                self.bucket.gradients.masked_fill_(is_nan, math.nan)

    # --- around a step ----------------------------------------------------------------------------

    @override
    def commit(self) -> None:
        super().commit()
        self.has_regions |= self.edges is not self._next_edges
        self.edges = self._next_edges

    @override
    def discard(self) -> None:
        super().discard()
        self._next_edges = self.edges


OwnedBucket = RegionBucket | StaticBucket
"""A bucket of which each rank owns a region; the latter works with every backend."""


def add_up_summaries(
    buckets: Sequence[StaticBucket], collectives: Collectives, first_tag: int
) -> Work:
    """Tells buckets of which new regions are due what all ranks have selected. All call; blocks."""
    due = [one for one in buckets if one.are_regions_due]
    if not due:
        return Work.done()
    total = torch.stack([one.summary for one in due]).to(torch.int32)
    with as_metadata(collectives):
        collectives.launch_all_reduce(total.view(-1), SELECTION_TAGS + first_tag).wait()
    for one, part in zip(due, total, strict=True):
        one.follow(part)
    return Work.done()


def _order_within(groups: Tensor, num_groups: int) -> Tensor:
    """[n] int64, how many of the same group, in [0, num_groups), come before each."""
    order = groups.argsort(stable=True)
    sizes = torch.zeros(num_groups, dtype=torch.int64, device=groups.device)
    sizes.index_add_(0, groups, torch.ones_like(groups))
    starts = sizes.cumsum(0) - sizes
    ranks = torch.empty_like(groups)
    ranks[order] = torch.arange(len(groups), device=groups.device)
    return ranks - starts[groups]


def _parts(rows: Tensor) -> list[Entries]:
    """What stands in messages of all ranks, in rank order."""
    room = rows.shape[1] // 2
    return [Entries(row[:room], row[room:].view(torch.float32)) for row in rows]
