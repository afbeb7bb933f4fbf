"""Buckets that are cut into regions, each of which has an owner: Ok-Topk's and TopkDSA's.

`RegionBucket` sends messages as long as their entries. `StaticBucket` sends messages of fixed
length, so that the host need not read how many entries there are.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import Work
from lightning_dear.compression.selectors import all_reaching
from lightning_dear.exchange.sparse import regions as layout
from lightning_dear.exchange.sparse.bucket import LaunchWithTag, Selection, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries, joined, unpacked
from lightning_dear.torch_modes import plain_mode

LOOKED_AT_FIRST = 0.95
"""An owner first looks for its sums among those of at least this share of the last threshold, where
most owners find enough."""


class RegionBucket(SparseBucket):
    """A sparse bucket for gloo, whose messages are as long as their entries (Ok-Topk, TopkDSA).

    With Ok-Topk, notes in this step's messages tell all ranks what they need for the next step. In
    backward each rank cuts the summary of its selection into slices, one for each owner, and each
    owner adds up its slices of all ranks. In the gather half owners send these totals, in steps in
    which new regions are due, and their reports. With TopkDSA there are no notes.

    Attributes:
        regions: Begins of all ranks' regions in the next step, and the bucket's end.
        has_regions: Whether regions follow selections. If not, they are equal.
        shares: Threshold and quotas by which owners choose sums in the next step.
        chosen: [n] int64: places of the sums that this rank, as an owner, has kept.
    """

    # Set when the selection of a step begins, and valid until its gather half has arrived, even if
    # a checkpoint is loaded meanwhile: the sizes, whether owners agree on the sums that they keep,
    # and the number of words of notes to all ranks.
    _settled: Selection
    _is_exact: bool
    _num_told: int

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def _make_room(self) -> None:
        # Only with regions that follow selections do owners send reports and totals.
        self._most_notes = layout.words_of_slice(self._world_size) if self.sparse.is_regional else 0
        self._report_words = layout.REPORT_WORDS if self.sparse.is_regional else 0
        self._head_words = 1 + self._report_words + self._most_notes
        super()._make_room()
        # A threshold and quotas of another k do not fit. Without them the next step is exact.
        self.shares = layout.Shares.unknown(self._world_size)
        # False until the next selection. Messages of the old k may arrive before this call on one
        # rank and after it on another. If they changed shares, ranks would differ.
        self._follows_shares = False

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.shares = layout.Shares.unknown(self._world_size)
        self.regions = layout.equal_regions(self.spec.padded_numel, self._world_size)
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
        # In mode "static" the second element is no threshold.
        super().steer(steering[:2] if is_alike or not own else steering.new_tensor([count, 0.0]))
        # Another compressor has saved other fields, or needs equal regions.
        is_alike = is_alike and self.sparse.is_regional
        if not is_alike or own[-1] != self.spec.padded_numel:
            return
        size, (everywhere, *quotas) = own[:2], own[2 : 3 + self._world_size]
        has_regions, *regions = own[3 + self._world_size :]
        if size == self._size:
            self.shares = layout.Shares(everywhere, tuple(int(quota) for quota in quotas))
        self.has_regions, self.regions = bool(has_regions), [int(place) for place in regions]

    @property
    def _size(self) -> list[float]:
        """Sizes that shares depend on: k and the owner's cap, both 0 if there are no shares."""
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
        """Cuts `selected` into a message for each owner, and returns what launches them.

        Sets the places of entries that are sent to 0 in `waiting`. Entries beyond the size of a
        message stay there.
        """
        parts = [part.largest(self.selection.most_sent) for part in selected.cut(self.regions)]
        self.tally.num_sent = num_sent = sum(len(part.places) for part in parts)
        # If no message was too short, all selected entries are sent.
        sent = selected if num_sent == len(selected.places) else joined(parts)
        waiting.index_fill_(0, sent.places, 0.0)
        self._sent.append(sent)
        notes = torch.empty((self._world_size, 0), dtype=torch.int32)
        if self._num_notes:
            notes = layout.sliced(
                layout.summary_of(selected.places, len(waiting)), self._world_size
            )
        messages = {rank: part.times(scale).packed(notes[rank]) for rank, part in enumerate(parts)}
        return partial(self.launch, "reduce_scatter", messages, self.incoming, self._num_notes)

    # --- choosing among the sums ------------------------------------------------------------------

    def choose(self, scale: float) -> Entries | None:
        """Chooses which sums of its region this rank keeps.

        Args:
            scale: Loss scale, by which sums are multiplied.

        Returns:
            None means that the largest sums have been kept, as many as this owner's quota. In an
            exact step, or if owners keep all sums, nothing is kept yet: the candidates are
            returned, ranks must agree on a choice, and the caller then calls `keep`.
        """
        if self._is_exact:
            return self._sums().largest(self.selection.most_owned)
        quota, threshold = self.shares.quotas[self._rank], self.shares.threshold * scale
        found = self._sums(LOOKED_AT_FIRST * threshold)
        # Rare: too few sums are left, because sums have become smaller since the last step.
        if len(found.places) < quota:
            found = self._sums()
        num_reached = int((found.numbers.abs() >= threshold).count_nonzero())
        self.keep(found.largest(quota), scale, num_reached)
        return None

    def _sums(self, floor: float = 0.0) -> Entries:
        """Returns the sums in this rank's region that are not 0 and have magnitude >= `floor`."""
        own = self.bucket.mean[self.region]
        places = all_reaching(own, floor)
        return Entries(places + self.region.start, own.index_select(0, places).float())

    def keep(self, chosen: Entries, scale: float, num_reached: int | None = None) -> None:
        """Sets the sums of the region to 0, except `chosen`. `restore` may add the others again.

        Args:
            chosen: Some of the region's sums.
            scale: Loss scale, by which sums are multiplied.
            num_reached: Number of the region's sums that reached the threshold, for the report.
                None means as many as are chosen.
        """
        self._leave(chosen.places, chosen.numbers)
        self.chosen, count = chosen.places, len(chosen.places)
        smallest = float(chosen.numbers.abs().min()) / scale if count else 0.0
        reached = count if num_reached is None else num_reached
        self._report = layout.OwnerReport(count, reached, smallest)

    def take_back(self) -> Tensor:
        """Takes the mean back after hooks: sets this rank's region to 0 outside `chosen`.

        Returns whether an element was not 0 there, as a bool tensor: then a hook has changed it.
        """
        own, places = self.bucket.mean[self.region], self.chosen - self.region.start
        kept = own[places]
        is_denser = own.index_fill_(0, places, 0.0).any()
        own.zero_().index_copy_(0, places, kept)
        return is_denser

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """Returns the message with this rank's kept sums for all ranks, [n] int32."""
        entries = Entries(self.chosen, self.bucket.mean.index_select(0, self.chosen).float())
        if not self._num_told:
            return entries.packed()
        reached = torch.tensor([self._report.num_reached], dtype=torch.int32)
        # The message is one int32 tensor, so that a float travels as its bits.
        smallest = torch.tensor([self._report.smallest], dtype=torch.float32).view(torch.int32)
        # This owner's slice of the summaries of all ranks, added up.
        slices = self.incoming[:, 1 : 1 + self._num_notes]
        return entries.packed(reached, smallest, slices.sum(0, dtype=torch.int32))

    def spread(self, message: Tensor, gathered: Tensor, tag: int) -> Work:
        """Launches `message` to all ranks; row r of `gathered` receives that of owner r."""
        messages = dict.fromkeys(range(self._world_size), message)
        return self.launch("all_gather", messages, gathered, self._num_told, tag)

    def write(self, gathered: Tensor) -> Tensor:
        """Writes the sums in the messages `gathered` into the bucket's gradients.

        The gradients are the same memory as the mean, which must be 0 except for this rank's sums.

        Returns:
            [n] int64: places of the sums.
        """
        whole = joined([unpacked(row, self._num_told) for row in gathered])
        gradients, places = self.bucket.gradients, whole.places.long()
        numbers = whole.numbers.to(gradients.dtype)
        gradients.index_copy_(0, places, numbers)
        self._has_zeros = bool((numbers == 0).any())
        return places

    def arrive(self, gathered: Tensor, sent: list[Entries], is_nan: Tensor | None) -> None:
        """Writes the gathered sums, adds what has not arrived to the residual, reads the notes.

        Args:
            gathered: [world_size, n] int32: the owners' messages.
            sent: Entries that this rank sent in that step. Those whose place is not among the
                gathered sums are added back to the residual. Emptied.
            is_nan: Bool tensor: whether all gradients are made nan. None means that they are not.
        """
        # The thread that waits may be inside a context of the user's, such as autocast.
        with plain_mode(self.bucket.parameters.device.type):
            selected, gradients = self.write(gathered), self.bucket.gradients
            for own in sent:
                # Elements without a gathered sum are 0, and most often only those.
                has_arrived = (gradients.index_select(0, own.places) != 0) & (own.numbers != 0)
                if self._has_zeros:
                    has_arrived = own.are_among(selected, self.spec.padded_numel)
                self.worker.settle(own, has_arrived)
            sent.clear()
            heads = gathered[:, : 1 + self._num_told]
            counts = self.note_received(heads)
            self.tally.num_kept, self.tally.most_kept = sum(counts), max(counts)
            if self._num_told:
                self._hear(counts, heads[:, 1:])
            if is_nan is not None:
                gradients.masked_fill_(is_nan, math.nan)

    def _hear(self, counts: Sequence[int], notes: Tensor) -> None:
        """Reads the owners' notes, which say how the next step selects sums and cuts regions.

        Args:
            counts: Number of sums that each owner has sent.
            notes: [world_size, words] int32: the notes of all owners.
        """
        smallest = notes[:, 1].contiguous().view(torch.float32).tolist()
        told = zip(counts, notes[:, 0].tolist(), smallest, strict=True)
        reports = [layout.OwnerReport(*report) for report in told]
        if self._follows_shares:
            k, cap = self._settled.k, self._settled.most_owned
            self.shares = self.shares.after(reports, k, cap, is_exact=self._is_exact)
        if self._num_notes:
            summaries = notes[:, layout.REPORT_WORDS :]
            where = self.spec.padded_numel, self._world_size
            regions = layout.regions_of(summaries, *where).tolist()
            self.has_regions |= regions != self.regions
            self.regions = regions


class StaticBucket(SparseBucket):
    """A sparse bucket of `OkTopk(mode="static")`, whose messages have a fixed length.

    So the host waits for no count, as NCCL requires. Entries that do not fit stay in the residual,
    and sums that an owner does not keep are dropped: senders add them back to their residuals. A
    message consists of all places, then all values.
    Unused entries differ in the two halves. In messages to owners their value is 0. In messages to
    all ranks their place is the bucket's length, because a real value there may be 0 after a hook.

    Attributes:
        edges: [world_size + 1] int64, on the device: begins of all ranks' regions, and the end.
        has_regions: Whether regions follow selections. If not, they are equal.
        summary: Histogram of this rank's selection. The sum over ranks decides on new regions.
        chosen: [n] int64: places of the sums that this rank, as an owner, has kept. If there are
            fewer than n, the other places have a mean of 0.
    """

    summary: Tensor
    _head_words = 0

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        regions = layout.equal_regions(self.spec.padded_numel, self._world_size)
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
        # Another mode or compressor has saved other fields.
        if len(steering) == 2 + len(self.edges) and steering[-1] == self.spec.padded_numel:
            self.edges = self._next_edges = steering[2:].to(self.edges)
            self.has_regions = bool(steering[1])

    # --- the reduce half --------------------------------------------------------------------------

    @override
    def select(self, waiting: Tensor) -> Entries:
        """Returns the k entries of largest magnitude, in descending order; some may be 0."""
        step = self._begin()
        self.are_regions_due = self.sparse.are_regions_due(step) or not self.has_regions
        # The host does not know the region's edges. The whole mean serves instead, because it is 0
        # outside the region.
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
        """Makes a message for each owner, and returns what launches them.

        Sets the places of entries that fit into the messages to 0 in `waiting`.
        """
        room, places, numbers = self.selection.most_sent, selected.places, selected.numbers
        self.summary = layout.summary_of(places, self.spec.padded_numel, (numbers != 0).long())
        region = torch.bucketize(places, self.edges[1:-1], right=True)
        order = _order_within(region, self._world_size)
        is_sent = (order < room) & (numbers != 0)
        waiting.index_copy_(0, places, numbers.masked_fill(is_sent, 0.0))
        shape, num_slots = (self._world_size, room), self._world_size * room
        # Entries that are not sent get the slot behind the last one, which is cut off.
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
        # Rank by rank: apart from zeros no place comes twice from one rank, so that a device, too,
        # adds up in rank order.
        for part in _parts(self.incoming):
            mean.index_add_(0, part.places, part.numbers.to(mean.dtype))

    # --- choosing among the sums ------------------------------------------------------------------

    def keep_largest(self) -> None:
        """Sets all sums to 0 but the largest, `most_owned`. `restore` may add the others again."""
        mean = self.bucket.mean
        self.chosen = mean.abs().topk(self.selection.most_owned).indices
        kept = mean[self.chosen]
        self._is_empty = kept == 0
        self._leave(self.chosen, kept)

    def take_back(self) -> Tensor:
        """Sets the mean to 0 outside `chosen`; tells whether it was not 0 where `write` wrote 0."""
        mean, end = self.bucket.mean, self.spec.padded_numel
        kept = mean[self.chosen]
        was_shown = torch.zeros(end + 1, dtype=torch.bool, device=mean.device)
        was_shown.index_fill_(0, self._shown, True)
        is_denser = mean.masked_fill_(was_shown[:end], 0.0).any()
        mean.zero_().index_copy_(0, self.chosen, kept.masked_fill(self._is_empty, 0.0))
        return is_denser

    def follow(self, total: Tensor) -> None:
        """Cuts new regions by `total`, the sum of ranks' summaries. `commit` puts them to use."""
        self._next_edges = layout.regions_of(total, self.spec.padded_numel, self._world_size)

    # --- the gather half --------------------------------------------------------------------------

    def message(self) -> Tensor:
        """Returns the message with this rank's kept sums for all ranks, [2 n] int32."""
        numbers = self.bucket.mean[self.chosen].float().masked_fill(self._is_empty, 0.0)
        places = self.chosen.masked_fill(self._is_empty, self.spec.padded_numel)
        return torch.cat([places.int(), numbers.view(torch.int32)])

    def spread(self, message: Tensor, gathered: Tensor, tag: int) -> Work:
        """Launches `message` to all ranks; row r of `gathered` receives that of owner r."""
        gathered[self._rank].copy_(message)
        return self._collectives.launch_all_gather(gathered.view(-1), tag)

    def write(self, gathered: Tensor) -> Tensor:
        """Overwrites the bucket's gradients with the sums in the messages `gathered`, 0 elsewhere.

        Returns:
            [n] int64: places of the sums, ascending. Unused entries have the bucket's length.
        """
        gradients, last = self.bucket.gradients.zero_(), self.spec.padded_numel - 1
        parts = _parts(gathered)
        for part in parts:
            # Places of unused entries are beyond the end; their values are 0.
            gradients.index_add_(0, part.places.clamp(max=last), part.numbers.to(gradients.dtype))
        self._shown = torch.cat([part.places for part in parts]).long().sort().values
        return self._shown

    def arrive(self, gathered: Tensor, sent: list[Entries], is_nan: Tensor | None) -> None:
        """Writes the gathered sums, and adds what has not arrived back to the residual.

        Same arguments as `RegionBucket.arrive`.
        """
        end = self.spec.padded_numel
        # The thread that waits may be inside a context of the user's, such as autocast.
        with plain_mode(self.bucket.parameters.device.type):
            selected = self.write(gathered)
            for own in sent:
                self.worker.settle(own, own.are_among(selected, end))
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
"""A bucket in which each rank owns a region. `StaticBucket` works with every backend."""


def _order_within(groups: Tensor, num_groups: int) -> Tensor:
    """Returns [n] int64: how many elements of the same group, in [0, num_groups), come before."""
    order = groups.argsort(stable=True)
    sizes = torch.zeros(num_groups, dtype=torch.int64, device=groups.device)
    sizes.index_add_(0, groups, torch.ones_like(groups))
    starts = sizes.cumsum(0) - sizes
    ranks = torch.empty_like(groups)
    ranks[order] = torch.arange(len(groups), device=groups.device)
    return ranks - starts[groups]


def _parts(rows: Tensor) -> list[Entries]:
    """Returns the entries in the messages of all ranks, in rank order, as views."""
    room = rows.shape[1] // 2
    return [Entries(row[:room], row[room:].view(torch.float32)) for row in rows]
