"""A bucket in regions, in messages that are always as long: nobody looks up what travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import SELECTION_NUMBERS, Collectives, Work, as_metadata
from lightning_dear.exchange.sparse.bucket import Launch, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries
from lightning_dear.exchange.sparse.regions import equal_regions, regions_of, summary_of
from lightning_dear.torch_modes import plain_mode


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
    def expect(self, lane: str, number: int) -> None:
        if lane == "reduce_scatter":
            self._collectives.expect_messages(lane, self.incoming, number)
        else:
            self._collectives.expect_all_gather(self.gathered.view(-1), number)

    @override
    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> Launch:
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

    def spread(self, message: Tensor, gathered: Tensor, number: int) -> Work:
        """Starts sending `message` to all ranks, and everybody's into `gathered`."""
        gathered[self._rank].copy_(message)
        return self._collectives.launch_all_gather(gathered.view(-1), number)

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


def add_up_summaries(
    buckets: Sequence[StaticBucket], collectives: Collectives, first_number: int
) -> Work:
    """Tells buckets of which new regions are due what all ranks have selected. All call; blocks."""
    due = [one for one in buckets if one.are_regions_due]
    if not due:
        return Work.done()
    total = torch.stack([one.summary for one in due]).to(torch.int32)
    with as_metadata(collectives):
        collectives.launch_all_reduce(total.view(-1), SELECTION_NUMBERS + first_number).wait()
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
