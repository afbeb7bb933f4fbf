"""An owned bucket whose messages are always as long: nobody looks up how many numbers travel."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.exchange.entries import Entries
from lightning_dear.exchange.owned_bucket import OwnedBucket
from lightning_dear.exchange.regions import equal_regions, regions_of, summary_of


class StaticBucket(OwnedBucket):
    """For NCCL: the host waits for no number, and what does not fit stays in the residual.

    A message has room for `OkTopk.capacities` numbers, first all places and then all numbers. Where
    less is to be sent, places are those behind the bucket's end in what owners send to all, whose
    numbers may be 0 because a hook has made them so; a 0 that is sent to an owner is no number.

    Attributes:
        edges: [world_size + 1] int64, on the device: where each region begins, and the end.
    """

    _tells_length = False

    @property
    @override
    def most_sent(self) -> int:
        return self.ok.capacities(self.numel, self._world_size)[0]

    @property
    @override
    def most_owned(self) -> int:
        return self.ok.capacities(self.numel, self._world_size)[1]

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
        places = waiting.abs().topk(self.k).indices
        selected = Entries(places, waiting[places])
        num_selected = (selected.numbers != 0).sum()
        self._start_tally(num_selected, num_selected)
        return selected

    @override
    def messages(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> Tensor:
        """[world_size, 2 n] int32; see `OwnedBucket`."""
        room, places, numbers = self.most_sent, selected.places, selected.numbers
        self._note_selected(places, numbers)
        region = torch.bucketize(places, self.edges[1:-1], right=True)
        order = _order_within(region, self._world_size)
        is_sent = (order < room) & (numbers != 0)
        waiting.index_copy_(0, places, numbers.masked_fill(is_sent, 0.0))
        # Others go behind the end.
        slots = torch.where(is_sent, region * room + order, self._world_size * room)
        sent = Entries(*(self._in_slots(each, slots) for each in (places, numbers)))
        self._cleared.append(sent)
        self.tally.num_sent = is_sent.sum()
        self._count_words(2 * room)
        shape = self._world_size, room
        scaled = sent.times(scale).numbers.view(torch.int32).view(shape)
        return torch.cat([sent.places.int().view(shape), scaled], dim=1)

    def _in_slots(self, each: Tensor, slots: Tensor) -> Tensor:
        num_slots = self._world_size * self.most_sent
        return each.new_zeros(num_slots + 1).index_copy_(0, slots, each)[:-1]

    def _note_selected(self, places: Tensor, numbers: Tensor) -> None:
        shape = self.spec.padded_numel, self._world_size
        self._summary = summary_of("histogram", places, *shape, (numbers != 0).long())

    def _count_words(self, one_way: int) -> None:
        words = one_way * (self._world_size - 1)
        self.tally.words_sent += words
        self.tally.words_received += words

    @override
    def sum_up(self) -> None:
        mean = self.bucket.mean.zero_()
        for part in _parts(self.incoming):
            mean.index_add_(0, part.places, part.numbers.to(mean.dtype))

    @override
    def clear_others(self) -> None:
        # Sparse sums are only in owners' regions.
        if not self.is_sparse:
            self.bucket.mean[: self.own_shard.start].zero_()
            self.bucket.mean[self.own_shard.stop :].zero_()

    # --- what is kept of the sums -----------------------------------------------------------------

    def keep_largest(self) -> None:
        """Leaves as many as there is room for in the mean; the rest may be asked for once more."""
        mean = self.bucket.mean
        self.chosen = mean.abs().topk(self.most_owned).indices
        kept = mean[self.chosen]
        self._is_empty = kept == 0
        self._rejected = mean.index_fill(0, self.chosen, 0.0)
        mean.zero_().index_copy_(0, self.chosen, kept)

    @property
    @override
    def _selected_from(self) -> Tensor:
        return self.bucket.mean

    @override
    def take_back(self) -> Tensor:
        mean, end = self.bucket.mean, self.spec.padded_numel
        kept = mean[self.chosen]
        was_shown = torch.zeros(end + 1, dtype=torch.bool, device=mean.device)
        was_shown.index_fill_(0, self._shown, True)
        is_denser = mean.masked_fill_(was_shown[:end], 0.0).any()
        mean.zero_().index_copy_(0, self.chosen, kept.masked_fill(self._is_empty, 0.0))
        return is_denser

    @property
    def summary(self) -> Tensor:
        """Of this rank's selection, to be added up for the next step's regions."""
        assert self._summary is not None
        return self._summary

    def note_total(self, total: Tensor) -> None:
        """Told all ranks' summaries, added up; the regions change once the step is made."""
        shape = self.spec.padded_numel, self._world_size
        self._next_edges = regions_of("histogram", total, *shape)

    # --- the gather half --------------------------------------------------------------------------

    @override
    def message(self) -> Tensor:
        """[2 n] int32; see `OwnedBucket`."""
        numbers = self.bucket.mean[self.chosen].float().masked_fill(self._is_empty, 0.0)
        places = self.chosen.masked_fill(self._is_empty, self.spec.padded_numel)
        return torch.cat([places.int(), numbers.view(torch.int32)])

    @override
    def write(self, gathered: Tensor) -> Tensor:
        gradients, last = self.bucket.gradients.zero_(), self.spec.padded_numel - 1
        parts = _parts(gathered)
        for part in parts:
            # What stands behind the end is 0.
            places = part.places.clamp(max=last)
            gradients.index_add_(0, places, part.numbers.to(gradients.dtype))
        self._shown = torch.cat([part.places for part in parts]).long().sort().values
        return self._shown

    @override
    def note_gathered(self, gathered: Tensor) -> None:
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
