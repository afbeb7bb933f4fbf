"""A bucket of which about k numbers travel: what this rank selects, and what it keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, shard_slice
from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.compression import Compressor, Fp32, SparseAllReduce
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.compression.thresholds import LocalThreshold
from lightning_dear.compression.unsent import Unsent, new_unsent
from lightning_dear.exchange.base import CompressedBucket
from lightning_dear.exchange.sparse.entries import Entries, unpacked
from lightning_dear.exchange.sparse.figures import Tally
from lightning_dear.exchange.sparse.selection import selection_of
from lightning_dear.exchange.sparse.sent import Sent

Launch = Callable[[int], Work]
"""Starts sending a message: the bucket's number among all that travel at once -> the work."""


class SparseBucket(CompressedBucket):
    """What a rank sends of one bucket, and what it leaves.

    Where ranks own regions of it, its mean is 0 but for what is in this rank's own, until gradients
    are shown or have arrived.

    Args:
        bucket: Its gradients and its mean, which is as long, are read and written.
        configured: What makes it sparse.
        collectives: What moves it.
        is_encoded: Whether it is sparse at all, if that saves anything.

    Attributes:
        selection: How many numbers travel, under the present codec.
        incoming: [world_size, n] int32, what each rank sends here.
        gathered: [world_size, n] int32, what each owner sends to all.
        received: Scratch to sum it as it is.
        threshold: Of this rank's selection.
        tally: Of the last sparse step, or the one under way.
        is_filled: Whether sums are so many that all of them travel, without places.
    """

    worker: Unsent
    tally: Tally
    codec: Compressor
    configured: SparseAllReduce
    _tells_length: ClassVar[bool] = True
    """Whether a message begins with how many numbers are in it."""

    def __init__(
        self,
        bucket: Bucket,
        configured: SparseAllReduce,
        collectives: Collectives,
        *,
        is_encoded: bool,
    ) -> None:
        device, numel = bucket.mean.device, bucket.gradients.numel()
        codec = configured if is_encoded else Fp32()
        worker, owner = new_unsent(configured, numel, device), Memory(0, device)
        super().__init__(bucket, codec, worker, owner, collectives.world_size)
        self.sparse = configured
        self._collectives = collectives
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self.numel = sum(piece.numel for piece in self.spec.slices)
        self.tally = Tally()
        self.is_filled = False
        self._sent = Sent()
        # Added back if another round of the step comes: sums of parameters that no rank had a
        # gradient for, and sums that this owner has not chosen.
        self._left_out: list[tuple[slice, Tensor]] = []
        self.start_anew(None)
        self._make_room()

    @override
    def _make_room(self) -> None:
        # Once for each codec, not for each step: nothing else changes what follows from it.
        padded_numel = self.spec.padded_numel
        self.selection = selection_of(self.codec, self.numel, padded_numel, self._world_size)
        if isinstance(self.codec, SparseAllReduce):
            self.sparse = self.codec
        scratch = 0 if self.is_sparse else self._collectives.scratch_numel(padded_numel)
        self.received = self.bucket.gradients.new_empty(scratch)
        self.incoming = self._rows(self.selection.most_sent)
        self.gathered = self._rows(self.selection.most_owned)

    @property
    def _most_notes(self) -> int:
        """Most words of notes in a message."""
        return 0

    def _rows(self, most: int) -> Tensor:
        """Room for a message of at most so many numbers, and notes, from each rank."""
        most = most if self.is_sparse else 0
        shape = self._world_size, self._tells_length + self._most_notes + 2 * most
        return self.bucket.gradients.new_empty(shape, dtype=torch.int32)

    def notes_in(self, lane: str) -> int:
        """Words of notes in each message of the last step, between its length and places."""
        return 0

    @property
    def is_sparse(self) -> bool:
        """Whether it travels sparsely at present."""
        return self.selection.is_sparse

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

    # --- the reduce half: sparse -----------------------------------------------------------------

    @property
    def _step(self) -> int:
        """The number, from 0, of the sparse step under way."""
        return self.counts["reduce"] - 1

    def accumulated(self, scale: Tensor | None) -> Tensor:
        """This rank's gradients with what it has not sent of earlier ones, without the scale."""
        self._sent.clear(self.worker)
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.worker.accumulate(gradients.float(), scale)

    def select(self, waiting: Tensor) -> Entries:
        """What of `waiting` is large."""
        self._count_step()
        found = Entries(*self.sparse.find(waiting, self.selection.k, self.threshold, self._step))
        selected = found.largest(self.selection.most_selected)
        self._start_tally(len(found.places), len(selected.places))
        return selected

    def _count_step(self) -> None:
        # Gradients may come in several rounds of one step.
        self.counts["reduce"] += not self._is_counted
        self._is_counted = True

    def _start_tally(self, num_selected: int | Tensor, num_sent: int | Tensor) -> None:
        self.tally = Tally(
            self.selection.k, num_selected, num_sent, most_words=self.selection.most_words
        )

    def expect(self, lane: str, number: int) -> None:
        """Lets others' messages arrive from now on."""
        room = self.incoming if lane == "reduce_scatter" else self.gathered
        self._collectives.expect_messages(lane, room, number)

    def launch(self, lane: str, messages: Mapping[int, Tensor], room: Tensor, number: int) -> Work:
        """Starts sending messages, by rank, and receiving everybody's into `room`."""
        own, num_notes = messages[self._rank], self.notes_in(lane)
        room[self._rank, : len(own)] = own
        num_words = sum(len(one) for one in messages.values()) - len(own)
        self.tally.words_sent += num_words - (len(messages) - 1) * (1 + num_notes)
        place = range(self._world_size), room, number
        return self._collectives.launch_messages(lane, messages, *place, 1 + num_notes)

    def note_received(self, heads: Tensor) -> list[int]:
        """Counts in the tally what has come: [world_size, 1 or more] int32, messages' beginnings.

        Returns:
            How many numbers are in each message, this rank's own among them.
        """
        counts: list[int] = heads[:, 0].tolist()
        self.tally.words_received += 2 * (sum(counts) - counts[self._rank])
        return counts

    def sum_up(self) -> None:
        """Makes the mean of `incoming`, in the order of the ranks."""
        mean, num_notes = self.bucket.mean.zero_(), self.notes_in("reduce_scatter")
        self.note_received(self.incoming)
        for row in self.incoming:
            part = unpacked(row, num_notes)
            # Of one rank no place comes twice.
            mean.scatter_add_(0, part.places.long(), part.numbers.to(mean.dtype))

    # --- the reduce half: as it is ----------------------------------------------------------------

    def flushed(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, mutated: with all that was not sent of earlier ones."""
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        self.worker.flush(gradients, scale)
        return gradients

    @property
    def own_shard(self) -> slice:
        """Where this rank's part of what travels as it is lies."""
        return shard_slice(self.spec.padded_numel, self._rank, self._world_size)

    def restore(self) -> None:
        """Adds to the mean what an earlier selection of the same step has left out.

        Or what nobody used then; perhaps somebody has meanwhile.
        """
        for part, numbers in self._left_out:
            self.bucket.mean[part].add_(numbers)
        self._left_out = []

    # --- what has arrived -------------------------------------------------------------------------

    def take_sent(self) -> Sent:
        """What this rank has sent for the step under way, but 0 for parameters nobody has used."""
        taken, self._sent = self._sent, Sent()
        taken.leave_out(self._unused)
        return taken

    # --- around a step ----------------------------------------------------------------------------

    @override
    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """See `CompressedBucket`; but what owners have of them stays with who has sent it."""
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
        super().commit()
        self.threshold.commit()
        self._is_counted = False
        self._left_out = []

    @override
    def discard(self) -> None:
        super().discard()
        self.threshold.discard()
        # What was due in that step is due in the next one.
        self.counts["reduce"] -= self._is_counted
        self._is_counted = False
        self._sent, self._left_out = Sent(), []

    @override
    def detach(self) -> None:
        super().detach()
        del self.incoming, self.gathered, self.received


def compression_ratio(buckets: Sequence[SparseBucket], world_size: int) -> float:
    """Words of dense all-reduces over those that usually travel."""
    dense = sum(2 * one.numel * (world_size - 1) / world_size for one in buckets)
    sent = sum(one.selection.usual_words for one in buckets)
    return dense / sent if world_size > 1 else 1.0


def not_empty(entries: Entries) -> Tensor:
    """Its numbers, or a zero."""
    return entries.numbers if len(entries.numbers) else entries.numbers.new_zeros(1)
