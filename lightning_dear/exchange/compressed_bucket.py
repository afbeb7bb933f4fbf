"""What a rank keeps of a compressed bucket between steps, whatever the compressor is."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dear.bucket import Bucket
from lightning_dear.compression import Compressor, error_feedback

NO_SEED = -1
"""Stands for a missing seed: an earlier version, which had none, started the training. Real seeds
are never negative."""


@dataclass
class Tally:
    """Counts of one bucket in one sparse step; of its last round, if the step has several.

    What is gathered is counted once it has arrived. A count may be a tensor on an accelerator,
    which `int` makes the host wait for.

    Attributes:
        num_wanted: Number of entries that the compressor asks for, k.
        num_selected: Number of entries that this rank's compressor has found, before caps.
        num_sent: Number of these that were sent. The others exceeded the size of a message.
        num_kept: Number of sums that all owners together have sent with their places. 0 if there
            are no owners, or if all elements were gathered.
        most_kept: Number of sums sent by the owner that sent most.
        words_sent: Number of 4-byte words (values and places) that this rank has sent.
        words_received: Number of 4-byte words that this rank has received.
        most_words: Upper bound of `words_sent`, and of `words_received`, if the step has one round.
    """

    num_wanted: int = 0
    num_selected: int | Tensor = 0
    num_sent: int | Tensor = 0
    num_kept: int | Tensor = 0
    most_kept: int | Tensor = 0
    words_sent: int = 0
    words_received: int = 0
    most_words: float = 0.0


def figures_of(tallies: Sequence[Tally], world_size: int) -> dict[str, float]:
    """Returns the figures of all buckets together, for logging. Local.

    Blocks until counts that are tensors on an accelerator are known.

    Args:
        tallies: Tallies of this rank's buckets that have had a sparse step.
        world_size: Number of ranks.

    Returns:
        Name -> figure. "num_wanted", "num_selected" and "num_kept" are the sums of these counts in
        `Tally`. "held_back" is the share of the entries found that exceeded messages and stayed in
        the residual. "imbalance" is the largest number of sums that one owner has kept, divided by
        the mean over owners, in the least balanced bucket. "share_of_bound" is the number of words
        sent or received, whichever is larger, divided by `SparseAllReduce.most_words`. "num_kept"
        and "imbalance" are left out if `Tally.num_kept` is 0 in all buckets.
    """
    selected = sum(int(tally.num_selected) for tally in tallies)
    sent = sum(int(tally.num_sent) for tally in tallies)
    # The bound holds for each direction, so that the busier one is compared with it.
    received = sum(tally.words_received for tally in tallies)
    words = max(sum(tally.words_sent for tally in tallies), received)
    counts = [(int(tally.most_kept), int(tally.num_kept)) for tally in tallies]
    # 0 with baselines that have no owners.
    kept = [(most, count) for most, count in counts if count]
    figures = {
        "num_wanted": float(sum(tally.num_wanted for tally in tallies)),
        "num_selected": float(selected),
        "held_back": 1 - sent / selected if selected else 0.0,
        "share_of_bound": words / (sum(tally.most_words for tally in tallies) or 1.0),
    }
    if kept:
        figures["num_kept"] = float(sum(count for _, count in kept))
        figures["imbalance"] = max(most * world_size / count for most, count in kept)
    return figures


class CompressedBucket(ABC):
    """One bucket of a compressed exchange: its residuals, counts and seed, and the step's commit.

    Every bucket of such an exchange has one, also a bucket that the plan leaves uncompressed.

    Args:
        bucket: Bucket whose mean is read and mutated.
        compressor: Compressor of the bucket; `Fp32` if the plan leaves it uncompressed.
        worker: Memory for what this rank encodes in the reduce half, such as the residual.
        owner: Memory for what this rank encodes in the gather half: the mean of its own shard.
        world_size: Number of ranks.
        encoded: Slices of the bucket that this rank encodes in the reduce half, in the order in
            which `worker` holds them. None means the whole bucket.

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
        counts: "reduce" or "gather" -> how often that half was encoded (with sparse all-reduces:
            number of sparse steps). Equal on all ranks, but not in all buckets.
        seed: Seed of all random numbers of the bucket, equal on all ranks; or `NO_SEED`.
        factors: Parameter index -> low-rank factor Q, equal on all ranks. To be read or overwritten
            only between steps. Empty unless the strategy's compressor is `PowerSGD`.
        tally: Figures of the bucket's last sparse step. None means that the bucket is of no sparse
            exchange.
    """

    tally: Tally | None = None

    def __init__(
        self,
        bucket: Bucket,
        compressor: Compressor,
        worker: error_feedback.Memory,
        owner: error_feedback.Memory,
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
        # Residuals that were sent for a parameter that no rank has used go back into residuals (see
        # `note_used`). In a reduced bucket the owner takes all of their mean. In an all-reduced
        # bucket, where every rank has that mean, each takes 1/world_size.
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
        """Returns the indices of the padding: in the bucket, in the slice `own`, in `worker`.

        Padding belongs to no parameter. It must be set to 0 before encoding, since decoding, or
        marking a mean as nan, leaves other values there.
        """
        # Computed on the CPU, since `nonzero` on a device makes the host wait.
        is_padding = torch.ones(self.spec.padded_numel, dtype=torch.bool)
        for part in self.spec.slices:
            is_padding[part.offset : part.offset + part.numel] = False
        device = self.bucket.mean.device
        parts = is_padding, is_padding[self.own], self.part_of(is_padding)
        return tuple(part.nonzero()[:, 0].to(device) for part in parts)

    def part_of(self, flat: Tensor) -> Tensor:
        """Returns the slices `encoded` of `flat`, joined. `flat` has the length of the bucket.

        The result is `flat` itself if `encoded` is a single slice, which is the whole bucket.
        """
        return flat if len(self.encoded) == 1 else torch.cat([flat[part] for part in self.encoded])

    def whole_of(self, kept: Tensor) -> Tensor:
        """Reverses `part_of`: returns a flat bucket, `kept` in the slices `encoded`, 0 elsewhere.

        Returns `kept` itself if `encoded` is a single slice, which is the whole bucket.
        """
        if len(self.encoded) == 1:
            return kept
        flat = kept.new_zeros(self.spec.padded_numel)
        for part, piece in zip(self.encoded, kept.view(len(self.encoded), -1), strict=True):
            flat[part] = piece
        return flat

    def use(self, compressor: Compressor) -> None:
        """Encodes with `compressor` from the next reduction on. Messages in flight are not changed.

        Must not be called between the launch and the `wait` of a reduction. Does nothing if
        `compressor` equals the present one.
        """
        if compressor != self.compressor:
            # New buffers, because messages in flight are still decoded from the old ones.
            self.compressor = compressor
            self._make_room()

    def start_anew(self, seed: int | None) -> None:
        """Resets counts, factors, thresholds and regions to those of a first step.

        Residuals and momentum stay as they are.

        Args:
            seed: Seed of random numbers from now on. None means that the seed stays as it is.
        """
        self.counts.update(dict.fromkeys(self.counts, 0))
        if seed is not None:
            self.seed = seed

    def _seed_of(self, key: str) -> int:
        """Returns a seed for a random generator, derived from `seed` and `key`.

        It is equal on all ranks that call with the same key.
        """
        # Without a seed the key alone, as in the versions that had no seed.
        seeded = key if self.seed == NO_SEED else f"{self.seed} {key}"
        # Not `hash`, which differs from process to process: ranks and resumed runs would differ.
        return int.from_bytes(hashlib.blake2b(seeded.encode(), digest_size=7).digest(), "big")

    @abstractmethod
    def _make_room(self) -> None:
        """Allocates new message buffers, whose sizes follow from the present `compressor`."""

    @property
    def steering(self) -> Tensor | None:
        """[n] fp64 for checkpoints: number of sparse steps, thresholds and regions of this rank.

        They decide which entries the next sparse step selects. None means that the bucket is of no
        sparse exchange.
        """
        return None

    def steer(self, steering: Tensor) -> None:
        """Restores what the property `steering` has returned, as far as it fits this bucket.

        Must be called between steps. Does nothing if the bucket is of no sparse exchange.
        """

    @property
    def rate(self) -> float:
        """`Memory.rate` of `worker` and `owner`, which are of one codec; 1 if both keep nothing."""
        return (self.worker if self.worker.names else self.owner).rate

    @property
    def residual_norms(self) -> list[Tensor]:
        """2-norms of the residuals of `worker` and `owner`, as scalar tensors, without the padding.

        They are divided by `Memory.rate`, so that codecs can be compared. A memory without a
        residual has no entry, so that there are 0 to 2 entries.
        """
        pairs = (self.worker, self._worker_padding), (self.owner, self._own_padding)
        return [
            torch.linalg.vector_norm(memory.kept["residual"].index_fill(0, padding, 0.0))
            / memory.rate
            for memory, padding in pairs
            if "residual" in memory.names
        ]

    def commit(self) -> None:
        """Keeps the new residuals of `worker`: the step was made.

        Those of `owner` are committed when the gather half is encoded.
        """
        self.worker.commit()

    def discard(self) -> None:
        """Drops the new residuals of `worker`: the gradients are not used for a step."""
        self.worker.discard()

    def detach(self) -> None:
        """Drops the flat buffers, after which nothing can be sent. Residuals stay readable."""
        # A user who reads residuals after training holds this object, which must not keep the flat
        # buffers alive.
        del self.bucket, self._padding, self._worker_padding

    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """Stores which slices belong to parameters that no rank has used. Local.

        An encoded gather half then sends 0 for them. Their means need not be 0: they consist of
        residuals that were sent, which `keeps` undoes.

        Args:
            used: By parameter index, whether any rank had a gradient.
            scale: Loss scale, by which the mean is multiplied. None means 1.
            keeps: True adds the means of unused parameters, in the range `own`, to the residuals of
                `worker`, and makes these means 0. False leaves both as they are.
        """
        unused = [piece for piece in self.spec.slices if not used[piece.tensor]]
        self._unused = tuple(slice(one.offset, one.offset + one.numel) for one in unused)
        own, own_unused = self.own, []
        for part in self._unused:
            begin, end = max(part.start, own.start), min(part.stop, own.stop)
            if begin >= end:
                continue
            own_unused.append(slice(begin - own.start, end - own.start))
            if keeps:
                # Means are multiplied by the loss scale, and residuals are not.
                mean = self.bucket.mean[own_unused[-1]]
                share = mean / self._num_owners
                place = slice(begin + self._own_shift, end + self._own_shift)
                self.worker.add(place, share if scale is None else share / scale)
                mean.zero_()
        self._own_unused = tuple(own_unused)
