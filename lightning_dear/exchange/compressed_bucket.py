"""What a rank keeps of a compressed bucket between steps, whatever the compressor is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket
from lightning_dear.compression import Compressor
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.exchange.sparse.figures import Tally

NO_SEED = -1
"""Stands for a missing seed: an earlier version, which had none, started the training. Real seeds
are never negative."""


class CompressedBucket(ABC):
    """One bucket that is compressed: its residuals, counts and seed, and the step's commit.

    Args:
        bucket: Bucket whose mean is read and mutated.
        compressor: Compressor of the bucket.
        worker: What this rank keeps of the gradients that it encodes.
        owner: What this rank keeps of the mean of its own shard.
        world_size: Number of ranks.
        encoded: Slices of the bucket that this rank encodes, in the order in which `worker` holds
            them. None means the whole bucket.

    Attributes:
        bucket: Same as the argument.
        number: Number of the bucket in the plan.
        spec: Layout of the bucket: which slice of which tensor lies where.
        own: Slice of the bucket that this rank steps: its shard, or the whole bucket.
        worker: Same as the argument.
        owner: Same as the argument.
        compressor: Compressor in use at present.
        configured: Compressor that the bucket was made with. A schedule may replace it for a time.
        encoded: Same as the argument, with a slice of the whole bucket instead of None.
        counts: "reduce" or "gather" -> how often that half was encoded. Equal on all ranks, but not
            in all buckets.
        seed: Seed of all random numbers of the bucket, equal on all ranks; or `NO_SEED`.
        factors: Parameter index -> low-rank factor, equal on all ranks. To be read or overwritten
            only between steps. Empty unless the compressor is `PowerSGD`.
        tally: Figures of the bucket's last sparse step. None means that there are no sparse steps.
    """

    tally: Tally | None = None

    def __init__(
        self,
        bucket: Bucket,
        compressor: Compressor,
        worker: Memory,
        owner: Memory,
        world_size: int,
        encoded: Sequence[slice] | None = None,
    ) -> None:
        self.bucket = bucket
        self.configured = self.compressor = compressor
        self.number, self.spec, self.own = bucket.number, bucket.spec, bucket.own
        self.worker, self.owner = worker, owner
        self.encoded = encoded or (slice(0, bucket.spec.padded_numel),)
        self.counts = {"reduce": 0, "gather": 0}
        self.seed = NO_SEED
        self.factors: dict[int, Tensor] = {}
        # The residuals of unused parameters go back to the senders. In a reduced bucket its owner
        # takes all of them. In an all-reduced bucket each rank takes 1/world_size.
        self._num_owners = world_size if bucket.role.is_all_reduced else 1
        # Offset from the bucket's index of this rank's shard to its index in `worker`.
        begins = accumulate((part.stop - part.start for part in self.encoded), initial=0)
        self._own_shift = next(
            begin - part.start
            for begin, part in zip(begins, self.encoded, strict=False)
            if part.start <= self.own.start < part.stop
        )
        self._unused: tuple[slice, ...] = ()
        self._own_unused: tuple[slice, ...] = ()
        self._padding, self._own_padding, self._worker_padding = self._find_padding()

    def _find_padding(self) -> tuple[Tensor, ...]:
        """Returns the indices of the padding: in the bucket, in this rank's shard, in `worker`.

        Padding belongs to no parameter. Decoding, or marking a mean as nan, leaves values there
        that nothing overwrites.
        """
        # Computed on the CPU, since `nonzero` on a device makes the host wait.
        is_padding = torch.ones(self.spec.padded_numel, dtype=torch.bool)
        for part in self.spec.slices:
            is_padding[part.offset : part.offset + part.numel] = False
        device = self.bucket.mean.device
        parts = is_padding, is_padding[self.own], self.part_of(is_padding)
        return tuple(part.nonzero()[:, 0].to(device) for part in parts)

    def part_of(self, flat: Tensor) -> Tensor:
        """Returns what `worker` holds of the flat bucket `flat`; a copy, unless that is all."""
        return flat if len(self.encoded) == 1 else torch.cat([flat[part] for part in self.encoded])

    def whole_of(self, kept: Tensor) -> Tensor:
        """Returns `kept`, laid out as `worker`, as a flat bucket, with 0 in all other places."""
        if len(self.encoded) == 1:
            return kept
        flat = kept.new_zeros(self.spec.padded_numel)
        for part, piece in zip(self.encoded, kept.view(len(self.encoded), -1), strict=True):
            flat[part] = piece
        return flat

    def use(self, compressor: Compressor) -> None:
        """Encodes with `compressor` from the next reduction on. Messages in flight are not changed.

        Between reductions only.
        """
        if compressor != self.compressor:
            # New buffers, because messages in flight are still decoded from the old ones.
            self.compressor = compressor
            self._make_room()

    def start_anew(self, seed: int | None) -> None:
        """Resets counts, factors and all that steers selection. Residuals stay as they are.

        Args:
            seed: Seed of random numbers from now on. None means that the seed stays as it is.
        """
        self.counts.update(dict.fromkeys(self.counts, 0))
        if seed is not None:
            self.seed = seed

    def _seed_of(self, key: str) -> int:
        """Returns the seed of a random generator; each `key` and `seed` give another one.

        Equal on all ranks.
        """
        # Without a seed the key alone, as in the versions that had no seed.
        seeded = key if self.seed == NO_SEED else f"{self.seed} {key}"
        # Not `hash`, which differs from process to process: ranks and resumed runs would differ.
        return int.from_bytes(hashlib.blake2b(seeded.encode(), digest_size=7).digest(), "big")

    @abstractmethod
    def _make_room(self) -> None:
        """Allocates new buffers for the messages of `compressor`."""

    @property
    def steering(self) -> Tensor | None:
        """[n] fp64 for checkpoints: what steers this rank's selection in sparse steps.

        None means that this bucket has no sparse steps.
        """
        return None

    def steer(self, steering: Tensor) -> None:
        """Selects by `steering` from now on, if it comes from a bucket like this one.

        Between steps only.
        """

    @property
    def rate(self) -> float:
        """Rate of both memories, which are of one codec; 1 if they keep nothing."""
        return (self.worker if self.worker.names else self.owner).rate

    @property
    def residual_norms(self) -> list[Tensor]:
        """2-norms of the residuals: of this rank's gradients, and of its shard's mean.

        The residuals are divided by the memories' rates, so that codecs can be compared. A memory
        without a residual has no entry.
        """
        pairs = (self.worker, self._worker_padding), (self.owner, self._own_padding)
        return [
            torch.linalg.vector_norm(memory.kept["residual"].index_fill(0, padding, 0.0))
            / memory.rate
            for memory, padding in pairs
            if "residual" in memory.names
        ]

    def commit(self) -> None:
        """Keeps what the last encodings have left out: the step was made."""
        self.worker.commit()

    def discard(self) -> None:
        """Forgets what the last encodings have left out: the gradients are not used for a step."""
        self.worker.discard()

    def detach(self) -> None:
        """Drops the flat buffers; what is kept between steps stays."""
        # A user who reads residuals after training holds this object, which must not keep the flat
        # buffers alive.
        del self.bucket, self._padding, self._worker_padding

    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """Takes note of parameters that no rank has used, so that no gradient is sent for them.

        The mean of such a parameter consists of residuals alone.

        Args:
            used: By parameter index, whether any rank had a gradient.
            scale: Loss scale, by which the mean is multiplied. None means 1.
            keeps: True adds the means of unused parameters back to `worker`'s residuals, and makes
                these means 0. False leaves them.
        """
        self._unused = tuple(
            slice(piece.offset, piece.offset + piece.numel)
            for piece in self.spec.slices
            if not used[piece.tensor]
        )
        own, own_unused = self.own, []
        for part in self._unused:
            begin, end = max(part.start, own.start), min(part.stop, own.stop)
            if begin >= end:
                continue
            own_unused.append(slice(begin - own.start, end - own.start))
            if keeps:
                # A residual has no loss scale.
                mean = self.bucket.mean[own_unused[-1]]
                share = mean / self._num_owners
                place = slice(begin + self._own_shift, end + self._own_shift)
                self.worker.add(place, share if scale is None else share / scale)
                mean.zero_()
        self._own_unused = tuple(own_unused)
