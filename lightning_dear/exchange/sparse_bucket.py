"""A bucket of which about k numbers travel: what this rank selects, and what it keeps of it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, shard_slice
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Compressor, Fp32, SparseAllReduce
from lightning_dear.compression.memory import Memory
from lightning_dear.compression.sparse_all_reduce import FEWEST_PER_RANK
from lightning_dear.compression.thresholds import LocalThreshold
from lightning_dear.compression.unsent import Unsent, new_unsent
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.exchange.entries import Entries, unpacked
from lightning_dear.exchange.tally import Tally


class SparseBucket(CompressedBucket):
    """What a rank sends of one bucket, and what it leaves.

    Args:
        bucket: Its gradients and its mean, which is as long, are read and written.
        configured: What makes it sparse.
        collectives: What moves it.
        is_encoded: Whether it is sparse at all, if that saves anything.

    Attributes:
        incoming: [world_size, n] int32, what each rank sends here.
        received: Scratch to sum it as it is.
        threshold: Of this rank's selection.
        tally: Of the last sparse step, or the one under way.
    """

    worker: Unsent
    tally: Tally
    codec: Compressor
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
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._scratch_numel = collectives.scratch_numel(numel)
        self.numel = sum(piece.numel for piece in self.spec.slices)
        self.tally = Tally()
        self.start_anew(None)
        self._make_room()

    @override
    def _make_room(self) -> None:
        like = self.bucket.gradients
        self.received = like.new_empty(0 if self.is_sparse else self._scratch_numel)
        self.incoming = self._rows(self.most_sent if self.is_sparse else 0, self._most_notes)

    @property
    def _most_notes(self) -> int:
        """Most words of notes in a message."""
        return 0

    def _rows(self, most: int, num_notes: int = 0) -> Tensor:
        """Room for a message of at most so many numbers, and notes, from each rank."""
        shape = self._world_size, self._tells_length + num_notes + 2 * most
        return self.bucket.gradients.new_empty(shape, dtype=torch.int32)

    def notes_in(self, lane: str) -> int:
        """Words of notes in each message of the last step, between its length and places."""
        return 0

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

    # --- how many --------------------------------------------------------------------------------

    @property
    def is_sparse(self) -> bool:
        """Whether it travels sparsely at present."""
        codec = self.codec
        return isinstance(codec, SparseAllReduce) and codec.saves(self.numel, self._world_size)

    @property
    def sparse(self) -> SparseAllReduce:
        """The codec, where it is sparse."""
        assert isinstance(self.codec, SparseAllReduce)
        return self.codec

    @property
    def k(self) -> int:
        """How many numbers are wanted."""
        return self.sparse.entries(self.numel)

    @property
    def most_sent(self) -> int:
        """Most numbers in one message."""
        return self.sparse.most_selected(self.k)

    def is_due(self, period: int) -> bool:
        """Whether something that is done every `period` sparse steps is to be done in this one."""
        return (self.counts["reduce"] - 1) % period == 0

    # --- the reduce half: sparse -----------------------------------------------------------------

    def accumulated(self, scale: Tensor | None) -> Tensor:
        """This rank's gradients with what it has not sent of earlier ones, without the scale."""
        gradients = self.bucket.gradients.index_fill_(0, self._padding, 0.0)
        return self.worker.accumulate(gradients.float(), scale)

    def select(self, waiting: Tensor) -> Entries:
        """What of `waiting` is large."""
        self._count_step()
        step, k = self.counts["reduce"] - 1, self.k
        found = Entries(*self.sparse.find(waiting, k, self.threshold, step))
        selected = found.largest(self.sparse.most_selected(k))
        self._start_tally(len(found.places), len(selected.places))
        return selected

    def _count_step(self) -> None:
        if not self._is_counted:
            # Gradients may come in several rounds of one step.
            self.counts["reduce"] += 1
            self._is_counted = True

    def _start_tally(self, num_selected: int | Tensor, num_sent: int | Tensor) -> None:
        most_words = self.sparse.most_words(self.numel, self._world_size)
        measured = self.tally.off_squared, self.tally.gradient_squared
        self.tally = Tally(self.k, num_selected, num_sent, 0, 0, 0, 0, most_words, *measured)

    def note_sent(self, messages: Mapping[int, Tensor], lane: str, room: Tensor) -> None:
        """Counts in the tally what leaves this rank, and puts its own message into its `room`."""
        own = messages[self._rank]
        room[self._rank, : len(own)] = own
        num_words = sum(len(one) for one in messages.values()) - len(own)
        others = len(messages) - 1
        self.tally.words_sent += num_words - others * (1 + self.notes_in(lane))

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

    # --- around a step ----------------------------------------------------------------------------

    @override
    def commit(self) -> None:
        super().commit()
        self.threshold.commit()
        self._is_counted = False

    @override
    def discard(self) -> None:
        super().discard()
        self.threshold.discard()
        # What was due in that step is due in the next one.
        self.counts["reduce"] -= self._is_counted
        self._is_counted = False

    @override
    def detach(self) -> None:
        super().detach()
        del self.incoming, self.received


def check_buckets(
    codec: SparseAllReduce,
    uncompressed: Collection[int],
    collectives: Collectives,
    buckets: Sequence[Bucket],
) -> None:
    """Refuses buckets whose places do not fit, and warns (rank 0) if none is long enough.

    Raises:
        ValueError: If a bucket has more elements than places, of 32 bits, can number.
    """
    meant = [one for one in buckets if one.number not in uncompressed]
    longest = max((one.spec.padded_numel for one in meant), default=0)
    if longest > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"compressor={codec.name!r} numbers elements with 32 bits, and a bucket has"
            f" {longest:,}. Fuse less: fusion='threshold' with a smaller bucket_cap_mb."
        )
    num_ranks = collectives.world_size
    is_sparse = any(codec.saves(one.spec.numel, num_ranks) for one in meant)
    if meant and num_ranks > 1 and not is_sparse and collectives.rank == 0:
        warnings.warn(
            f"compressor={codec.name!r} compresses nothing: no bucket has {FEWEST_PER_RANK} numbers"
            f" to send for each of {num_ranks} ranks (density={codec.density:g} of at most"
            f" {longest:,}). Raise density or bucket_cap_mb, or leave it out.",
            stacklevel=2,
        )
