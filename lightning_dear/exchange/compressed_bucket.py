"""What a rank keeps of a bucket between steps, whatever it is encoded to."""

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
"""In the place of a seed, which is never negative: where training began without one."""


class CompressedBucket(ABC):
    """What has to be kept, and given back, of one bucket, whatever it is encoded to.

    Args:
        bucket: Its mean is read and written.
        compressor: What encodes it.
        worker: What is kept of the gradients that this rank encodes.
        owner: What is kept of the mean, for this rank's shard.
        world_size: Number of ranks.
        encoded: Which parts of the bucket this rank encodes, in the order in which `worker` has
            them; None: all of it.

    Attributes:
        bucket: See above.
        number: The bucket's.
        spec: What lies where in it.
        own: Where this rank's shard lies in it.
        worker: See above.
        owner: See above.
        compressor: In use at present.
        configured: Of this bucket, unless a schedule says otherwise.
        counts: Half -> how often it has been encoded; equal on all ranks, not for all buckets.
        seed: Of all that is drawn at random, equal on all ranks; or `NO_SEED`.
        factors: Tensor number -> what all ranks alike keep of it besides; to be read or overwritten
            between steps.
        tally: Of the bucket's last sparse step; None where there are none.
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
        # Who owns what nobody uses gives it back to those that have sent it, each its share.
        self._num_owners = world_size if bucket.role.is_all_reduced else 1
        # By how much further on `worker` has what this rank owns.
        begins = accumulate((one.stop - one.start for one in self.encoded), initial=0)
        self._own_shift = next(
            begin - one.start
            for begin, one in zip(begins, self.encoded, strict=False)
            if one.start <= self.own.start < one.stop
        )
        self._unused: tuple[slice, ...] = ()
        self._own_unused: tuple[slice, ...] = ()
        self._padding, self._own_padding, self._worker_padding = self._find_padding()

    def _find_padding(self) -> tuple[Tensor, ...]:
        """Places of elements of no parameter: in the bucket, in this rank's shard, in `worker`.

        Decoding, and marking what is not finite, leave numbers there that nothing overwrites.
        """
        # On the CPU, since `nonzero` on a device makes the host wait.
        is_padding = torch.ones(self.spec.padded_numel, dtype=torch.bool)
        for part in self.spec.slices:
            is_padding[part.offset : part.offset + part.numel] = False
        device = self.bucket.mean.device
        parts = is_padding, is_padding[self.own], self.part_of(is_padding)
        return tuple(part.nonzero()[:, 0].to(device) for part in parts)

    def part_of(self, flat: Tensor) -> Tensor:
        """What `worker` has of the bucket's numbers; a copy, unless that is all of them."""
        return flat if len(self.encoded) == 1 else torch.cat([flat[one] for one in self.encoded])

    def whole_of(self, kept: Tensor) -> Tensor:
        """The inverse: flat, as the bucket is; 0 where `worker` has nothing."""
        if len(self.encoded) == 1:
            return kept
        flat = kept.new_zeros(self.spec.padded_numel)
        for part, piece in zip(self.encoded, kept.view(len(self.encoded), -1), strict=True):
            flat[part] = piece
        return flat

    def use(self, compressor: Compressor) -> None:
        """Encodes with `codec` from the next reduction on. What is on its way keeps its bytes."""
        if compressor != self.compressor:
            # New buffers: bytes on their way are still decoded from the old ones.
            self.compressor = compressor
            self._make_room()

    def start_anew(self, seed: int | None) -> None:
        """What is counted, and factors, as before the first step; memories stay as they are.

        Args:
            seed: Of what is drawn from now on; None: the one there is.
        """
        self.counts.update(dict.fromkeys(self.counts, 0))
        if seed is not None:
            self.seed = seed

    def _seed_of(self, key: str) -> int:
        """Of a generator: another one for every `key` and under every seed, equal on all ranks."""
        # Without a seed, as earlier versions had it.
        seeded = key if self.seed == NO_SEED else f"{self.seed} {key}"
        # Not `hash`, which Python salts anew in each process: ranks and resumed runs would differ.
        return int.from_bytes(hashlib.blake2b(seeded.encode(), digest_size=7).digest(), "big")

    @abstractmethod
    def _make_room(self) -> None:
        """Makes buffers for what `codec` sends, new ones."""

    @property
    def steering(self) -> Tensor | None:
        """[n] fp64: by what this rank selects numbers in this bucket; None where by nothing."""
        return None

    def steer(self, steering: Tensor) -> None:
        """Selects by that from now on, if it is of a bucket like this one. Between steps."""

    @property
    def rate(self) -> float:
        """Of both memories, where they keep anything: one codec says how."""
        return (self.worker if self.worker.names else self.owner).rate

    @property
    def residual_norms(self) -> list[Tensor]:
        """2-norms of what is still to be sent, of this rank's gradients and of its shard's mean.

        Of all of it, whatever the memories' rates: so codecs can be compared.
        """
        pairs = (self.worker, self._worker_padding), (self.owner, self._own_padding)
        return [
            torch.linalg.vector_norm(memory.kept["residual"].index_fill(0, padding, 0.0))
            / memory.rate
            for memory, padding in pairs
            if "residual" in memory.names
        ]

    def commit(self) -> None:
        """Keeps what encoding has left over: the step was made."""
        self.worker.commit()

    def discard(self) -> None:
        """Forgets it: the gradients are void."""
        self.worker.discard()

    def detach(self) -> None:
        """Lets go of the bucket's buffers; what is kept between steps stays."""
        # Who reads residuals after training holds this object, but is not to hold flat buffers.
        del self.bucket, self._padding, self._worker_padding

    def note_used(self, used: Sequence[bool], scale: Tensor | None, *, keeps: bool) -> None:
        """Parameters that no rank has used will not be stepped: no gradient of theirs is sent.

        Args:
            used: By tensor number.
            scale: What the mean is multiplied by.
            keeps: Whether residuals that have come from other ranks are kept, rather than lost.
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
                # Its residual gets it back, without the loss scale.
                mean = self.bucket.mean[own_unused[-1]]
                share = mean / self._num_owners
                place = slice(begin + self._own_shift, end + self._own_shift)
                self.worker.add(place, share if scale is None else share / scale)
                mean.zero_()
        self._own_unused = tuple(own_unused)
