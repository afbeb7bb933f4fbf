"""A bucket of which about k numbers travel: how many, what this rank selects, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, shard_slice
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Compressor, Fp32, SparseAllReduce
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.compression.selectors import LocalThreshold
from lightning_dear.exchange.base import Traffic
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.exchange.sparse.entries import Entries, Unsent, new_unsent, unpacked
from lightning_dear.exchange.sparse.figures import Tally

LaunchWithTag = Callable[[int], Work]
"""Starts sending a message: the bucket's number among all that travel at once -> the work."""


@dataclass(frozen=True)
class Selection:
    """What follows from a codec and the size of a bucket, settled when the codec begins.

    Attributes:
        is_sparse: Whether a few numbers travel, rather than all; other counts are those there would
            be.
        k: How many numbers are wanted.
        most_selected: Most numbers that a rank selects.
        most_sent: Most numbers in one message.
        most_owned: Most numbers that one owner keeps; 0 where nobody owns a part.
    """

    is_sparse: bool = False
    k: int = 0
    most_selected: int = 0
    most_sent: int = 0
    most_owned: int = 0


def selection_of(
    compressor: Compressor, numel: int, padded_numel: int, world_size: int
) -> Selection:
    """Settles what `codec` sends of a bucket.

    Args:
        compressor: One that selects, or another one, with which all numbers travel.
        numel: Elements of parameters in the bucket.
        padded_numel: All of its elements.
        world_size: Number of ranks.
    """
    if not isinstance(compressor, SparseAllReduce):
        return Selection()
    # Also of what travels as it is: checkpoints say which k shares are of.
    is_sparse, k = compressor.saves(numel, world_size), compressor.entries(numel)
    most_selected, most_sent, most_owned = compressor.caps(k, world_size)
    if most_owned is None:
        # All of a region, of which there are as many as ranks.
        most_owned = padded_numel // world_size if compressor.is_scattered else 0
    return Selection(is_sparse, k, most_selected, most_sent, most_owned)


class SparseBucket(CompressedBucket):
    """What a rank sends of one bucket, and what it leaves.

    Where ranks own regions of it, its mean is 0 but for what is in this rank's own, until gradients
    are shown or have arrived.

    Args:
        bucket: Its gradients and its mean, which is as long, are read and written.
        compressor: What makes it sparse.
        traffic: What moves it, and whether it travels as it is all the same.

    Attributes:
        sparse: The last codec that made it sparse.
        selection: How many numbers travel, under the present codec.
        is_sparse: Whether it travels sparsely at present.
        is_filled: Whether sums are so many that all of them travel, without places.
        region: Where in the mean this rank's sums lie.
        incoming: [world_size, n] int32, what each rank sends here.
        gathered: [world_size, n] int32, what each owner sends to all.
        received: Scratch to sum it as it is.
        threshold: Of this rank's selection.
        tally: Of the last sparse step, or the one under way.
    """

    worker: Unsent
    tally: Tally
    configured: SparseAllReduce

    _head_words = 1
    """Most words in front of the places in a message."""

    _num_notes = 0
    """Words between count and places in the messages to owners in the step under way."""

    def __init__(self, bucket: Bucket, compressor: SparseAllReduce, traffic: Traffic) -> None:
        device, numel = bucket.mean.device, bucket.gradients.numel()
        collectives = traffic.collectives
        used = Fp32() if bucket.number in traffic.uncompressed else compressor
        worker, owner = new_unsent(compressor, numel, device), Memory(0, device)
        super().__init__(bucket, used, worker, owner, collectives.world.size)
        self.sparse = compressor
        self._collectives = collectives
        self._rank, self._world_size = collectives.world.rank, collectives.world.size
        self.numel = self.spec.numel
        self.tally, self.is_filled = Tally(), False
        # Of what is under way, until it is known what of it has arrived.
        self._sent: list[Entries] = []
        # Added back if another round of the step comes: sums of parameters that no rank had a
        # gradient for, and sums that this owner has not chosen.
        self._left_out: list[tuple[slice, Tensor]] = []
        self.start_anew(None)
        self._make_room()

    @override
    def _make_room(self) -> None:
        # Once for each codec, not for each step: nothing else changes what follows from it.
        padded_numel = self.spec.padded_numel
        if isinstance(self.compressor, SparseAllReduce):
            self.sparse = self.compressor
        self.selection = selection_of(self.compressor, self.numel, padded_numel, self._world_size)
        self.is_sparse = self.selection.is_sparse
        scratch = 0 if self.is_sparse else self._collectives.scratch_numel(padded_numel)
        self.received = self.bucket.gradients.new_empty(scratch)
        self.incoming = self._rows(self.selection.most_sent)
        self.gathered = self._rows(self.selection.most_owned)

    def _rows(self, most: int) -> Tensor:
        """Room for a message of at most so many numbers, and what is in front, from each rank."""
        num_words = self._head_words + 2 * most if self.is_sparse else 0
        return self.bucket.gradients.new_empty((self._world_size, num_words), dtype=torch.int32)

    # --- across plans and checkpoints -------------------------------------------------------------

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        self.threshold, self._is_counted = LocalThreshold(), False

    @property
    @override
    def steering(self) -> Tensor:
        return torch.tensor([self.counts["reduce"], self.threshold.value], dtype=torch.float64)

    @override
    def steer(self, steering: Tensor) -> None:
        count, threshold = steering[:2].tolist()
        self.counts["reduce"] = int(count)
        self.threshold = LocalThreshold(threshold)

    # --- the reduce half: sparse ------------------------------------------------------------------

    def accumulated(self, scale: Tensor | None) -> Tensor:
        """This rank's gradients with what it has not sent of earlier ones, without the scale."""
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.worker.accumulate(gradients.float(), scale)

    def select(self, waiting: Tensor) -> Entries:
        """What of `waiting` is large."""
        step = self._begin()
        found = Entries(*self.sparse.find(waiting, self.selection.k, self.threshold, step))
        selected = found.largest(self.selection.most_selected)
        self.tally.num_selected, self.tally.num_sent = len(found.places), len(selected.places)
        return selected

    def _begin(self) -> int:
        """The number, from 0, of the sparse step under way; in several rounds it is the same."""
        most_words = self.sparse.most_words(self.numel, self._world_size)
        self.tally = Tally(self.selection.k, most_words=most_words)
        self.counts["reduce"] += not self._is_counted
        self._is_counted = True
        return self.counts["reduce"] - 1

    def pack(self, waiting: Tensor, selected: Entries, scale: Tensor | None) -> LaunchWithTag:
        """Takes `selected` out of `waiting`, and makes a message of it to all ranks."""
        waiting.index_fill_(0, selected.places, 0.0)
        messages = dict.fromkeys(range(self._world_size), selected.times(scale).packed())
        return partial(self.launch, "reduce_scatter", messages, self.incoming, 0)

    def expect(self, lane: str, tag: int) -> None:
        """Lets others' messages arrive from now on."""
        room = self.incoming if lane == "reduce_scatter" else self.gathered
        self._collectives.expect_messages(lane, room, tag)

    def launch(
        self, lane: str, messages: Mapping[int, Tensor], room: Tensor, num_notes: int, tag: int
    ) -> Work:
        """Starts sending messages, by rank, and receiving everybody's into `room`.

        Each begins with how many numbers are in it, and `num_notes` words of notes.
        """
        own, head = messages[self._rank], 1 + num_notes
        room[self._rank, : len(own)] = own
        others = (one for rank, one in messages.items() if rank != self._rank)
        self.tally.words_sent += sum(len(one) - head for one in others)
        sources = range(self._world_size)
        return self._collectives.launch_messages(lane, messages, sources, room, tag, head)

    def note_received(self, heads: Tensor) -> list[int]:
        """Counts in the tally what has come: [world_size, 1 or more] int32, messages' beginnings.

        Returns:
            How many numbers are in each message, this rank's own among them.
        """
        counts: list[int] = heads[:, 0].tolist()
        self.tally.words_received += 2 * (sum(counts) - counts[self._rank])
        return counts

    def count_words(self, one_way: int) -> None:
        """Counts in the tally so many words to each other rank, and as many from it."""
        words = one_way * (self._world_size - 1)
        self.tally.words_sent += words
        self.tally.words_received += words

    def sum_up(self) -> None:
        """Makes the mean of `incoming`, in the order of the ranks."""
        mean = self.bucket.mean.zero_()
        self.note_received(self.incoming)
        for row in self.incoming:
            part = unpacked(row, self._num_notes)
            # Of one rank no place comes twice.
            mean.scatter_add_(0, part.places.long(), part.numbers.to(mean.dtype))

    # --- the reduce half: as it is ----------------------------------------------------------------

    def flushed(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, mutated: with all that was not sent of earlier ones."""
        self.region = shard_slice(self.spec.padded_numel, self._rank, self._world_size)
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        self.worker.flush(gradients, scale)
        return gradients

    def launch_all(self, tag: int) -> Work:
        """Starts summing the gradients; of the mean this rank gets its shard, and 0 elsewhere."""
        place = self.received, self.bucket.mean[self.region], tag
        work = self._collectives.launch_reduce_scatter(self.bucket.gradients, *place)
        return work.then(self.clear_others)

    # --- what is kept of the sums -----------------------------------------------------------------

    def clear_others(self) -> None:
        """Makes the mean 0 outside this rank's region."""
        self.bucket.mean[: self.region.start].zero_()
        self.bucket.mean[self.region.stop :].zero_()

    def _leave(self, places: Tensor, numbers: Tensor) -> None:
        """Leaves nothing but `numbers` in this rank's region, at [n] int64 places of the bucket."""
        own, places = self.bucket.mean[self.region], places - self.region.start
        self._left_out.append((self.region, own.index_fill(0, places, 0.0)))
        own.zero_().index_copy_(0, places, numbers.to(own.dtype))

    def restore(self) -> None:
        """Adds to the mean what an earlier selection of the same step has left out.

        Or what nobody used then; perhaps somebody has meanwhile.
        """
        for part, numbers in self._left_out:
            self.bucket.mean[part].add_(numbers)
        self._left_out = []

    # --- around a step ----------------------------------------------------------------------------

    def take_sent(self) -> list[Entries]:
        """What this rank has sent for the step under way, but 0 for parameters nobody has used.

        To be emptied by whoever settles it. `discard` empties it too: of a step that was broken off
        and dropped nothing is put back.
        """
        for one in self._sent:
            for part in self._unused:
                is_unused = (one.places >= part.start) & (one.places < part.stop)
                one.numbers.masked_fill_(is_unused, 0.0)
        return self._sent

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See `CompressedBucket`; but what owners have of them stays with who has sent it."""
        if all(used):
            self._unused = ()
            return
        sets_aside = self.is_sparse and self.configured.is_scattered
        super().note_used(used, scale, keeps=keeps and not sets_aside)
        if keeps and sets_aside:
            for part in self._unused:
                own = self.bucket.mean[part]
                self._left_out.append((part, own.clone()))
                own.zero_()

    @override
    def commit(self) -> None:
        if self.configured.is_scattered:
            # As if nothing had been sent of them, and no momentum had gone on.
            self.worker.keep(self._unused)
        self.worker.commit()
        self.threshold.commit()
        self._is_counted = False
        # A gather under way keeps its own.
        self._sent, self._left_out = [], []

    @override
    def discard(self) -> None:
        self.worker.discard()
        self.threshold.discard()
        # What was due in that step is due in the next one.
        self.counts["reduce"] -= self._is_counted
        self._is_counted = False
        self._sent.clear()
        self._left_out = []

    @override
    def detach(self) -> None:
        super().detach()
        del self.incoming, self.gathered, self.received
