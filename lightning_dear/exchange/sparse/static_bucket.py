"""A bucket in regions, in messages that are always as long: nobody looks up what travels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import SELECTION_NUMBERS, Collectives, Work, as_metadata
from lightning_dear.exchange.sparse.bucket import Launch, SparseBucket
from lightning_dear.exchange.sparse.entries import Entries
from lightning_dear.exchange.sparse.regions import equal_regions, regions_of, summary_of
from lightning_dear.exchange.sparse.sent import Sent, is_selected


class StaticBucket(SparseBucket):
    """For NCCL: the host waits for no number, and what does not fit stays in the residual.

    A message has room for as many numbers as it may bring, first all places and then all numbers.
    Where less is to be sent, places are those behind the bucket's end in what owners send to all,
    whose numbers may be 0 because a hook has made them so; a 0 sent to an owner is no number.

    Attributes:
        edges: [world_size + 1] int64, on the device: where each region begins, and the end.
        has_regions: Whether regions follow anybody's selections.
        chosen: [n] int64: what this rank's region keeps.
    """

    _tells_length = False

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self._summary: Tensor | None = None
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
        """The k largest of `waiting`, these first; zeros are not."""
        self._count_step()
        places = waiting.abs().topk(self.selection.k).indices
        selected = Entries(places, waiting[places])
        num_selected = (selected.numbers != 0).sum()
        self._start_tally(num_selected, num_selected)
        return selected

    @override
    def expect(self, lane: str, number: int) -> None:
        if lane == "reduce_scatter":
            self._collectives.expect_all_to_all(self.incoming, number)
        else:
            self._collectives.expect_all_gather(self.gathered.view(-1), number)

    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> Launch:
        """Cuts `selected` into each owner's, and clears in `waiting` what there is room for."""
        room, places, numbers = self.selection.most_sent, selected.places, selected.numbers
        self._note_selected(places, numbers)
        region = torch.bucketize(places, self.edges[1:-1], right=True)
        order = _order_within(region, self._world_size)
        is_sent = (order < room) & (numbers != 0)
        waiting.index_copy_(0, places, numbers.masked_fill(is_sent, 0.0))
        # Others go behind the end.
        slots = torch.where(is_sent, region * room + order, self._world_size * room)
        sent = Entries(*(self._in_slots(each, slots) for each in (places, numbers)))
        self._sent.cleared.append(sent)
        self.tally.num_sent = is_sent.sum()
        self._count_words(2 * room)
        shape = self._world_size, room
        scaled = sent.times(scale).numbers.view(torch.int32).view(shape)
        rows = torch.cat([sent.places.int().view(shape), scaled], dim=1)
        return partial(self._collectives.launch_all_to_all, rows, self.incoming)

    def _in_slots(self, each: Tensor, slots: Tensor) -> Tensor:
        num_slots = self._world_size * self.selection.most_sent
        return each.new_zeros(num_slots + 1).index_copy_(0, slots, each)[:-1]

    def _note_selected(self, places: Tensor, numbers: Tensor) -> None:
        self._summary = summary_of(places, self.spec.padded_numel, (numbers != 0).long())

    def _count_words(self, one_way: int) -> None:
        words = one_way * (self._world_size - 1)
        self.tally.words_sent += words
        self.tally.words_received += words

    @override
    def sum_up(self) -> None:
        mean = self.bucket.mean.zero_()
        # Rank by rank: but for zeros no place comes twice from one rank, so that a device, too,
        # adds up in the order of the ranks.
        for part in _parts(self.incoming):
            mean.index_add_(0, part.places, part.numbers.to(mean.dtype))

    def clear_others(self) -> None:
        """Makes the mean 0 outside this rank's shard, where it has all of it."""
        # Sparse sums are only in owners' regions.
        if not self.is_sparse:
            self.bucket.mean[: self.own_shard.start].zero_()
            self.bucket.mean[self.own_shard.stop :].zero_()

    # --- what is kept of the sums -----------------------------------------------------------------

    def keep_largest(self) -> None:
        """Leaves as many as there is room for in the mean; the rest may be asked for once more."""
        mean = self.bucket.mean
        self.chosen = mean.abs().topk(self.selection.most_owned).indices
        kept = mean[self.chosen]
        self._is_empty = kept == 0
        self._left_out.append((slice(None), mean.index_fill(0, self.chosen, 0.0)))
        mean.zero_().index_copy_(0, self.chosen, kept)

    def take_back(self) -> Tensor:
        """Leaves of the mean what was chosen; a bool: whether there was more than was shown."""
        mean, end = self.bucket.mean, self.spec.padded_numel
        kept = mean[self.chosen]
        was_shown = torch.zeros(end + 1, dtype=torch.bool, device=mean.device)
        was_shown.index_fill_(0, self._shown, True)
        is_denser = mean.masked_fill_(was_shown[:end], 0.0).any()
        mean.zero_().index_copy_(0, self.chosen, kept.masked_fill(self._is_empty, 0.0))
        return is_denser

    @property
    def are_regions_due(self) -> bool:
        """Whether those of the next step follow the selections of this one."""
        return self.sparse.are_regions_due(self._step) or not self.has_regions

    @property
    def summary(self) -> Tensor:
        """Of this rank's selection, to be added up for the next step's regions."""
        assert self._summary is not None
        return self._summary

    def note_total(self, total: Tensor) -> None:
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

    def settle(self, sent: Sent, selected: Tensor) -> None:
        """Notes what of `sent` is among [n] int64 `selected`, which all ranks have got."""
        end = self.spec.padded_numel
        sent.settle(self.worker, lambda one: is_selected(one, selected, end))

    def note_gathered(self, gathered: Tensor) -> None:
        """Counts what owners have sent in the tally."""
        end = self.spec.padded_numel
        counts = torch.stack([(part.places < end).sum() for part in _parts(gathered)])
        self.tally.num_kept, self.tally.most_kept = counts.sum(), counts.max()
        self._count_words(gathered.shape[1])

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
) -> None:
    """Tells buckets of which new regions are due what all ranks have selected. All ranks call."""
    due = [one for one in buckets if one.are_regions_due]
    if not due:
        return
    summaries = [one.summary for one in due]
    total = torch.cat(summaries).to(torch.int32)
    with as_metadata(collectives):
        collectives.launch_all_reduce(total, SELECTION_NUMBERS + first_number).wait()
    parts = torch.split(total, [len(one) for one in summaries])
    for one, part in zip(due, parts, strict=True):
        one.note_total(part.long())


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
