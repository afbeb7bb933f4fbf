"""The low-rank exchange: two all-reduces of thin factors make the mean gradient (PowerSGD).

    gradients + residual M -> P = M Q -> all-reduce                                     (backward)
    mean P -> orthonormal P -> Q = M^T P -> all-reduce                            (after backward)
    mean = P Q^T, on every rank; residual = M - P Q^T of this rank's own Q

A bucket's P is sent when the bucket is full. After backward the Qs follow, each made while those
before travel. All ranks keep one order: every P in reduce order, then every Q in it.

Nothing in backward may wait for another rank, not even for a P. Backward can have collectives of
its own (SyncBatchNorm's). A rank that waits in one fills no more buckets until all ranks are there;
if another rank waits for the P of such a bucket, nobody moves again. Nor can a Q go out in backward
without a wait, whenever its P turns out to be there: that is between other Ps on each rank, and
all-reduces are matched by their order. A process group of their own would give the Qs an order on
gloo, for as many connections again; NCCL wants one order over all groups, and its host runs too far
ahead of the device to find a P there. So backward hides the way of the Ps, not that of the Qs.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, storage_shape
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Fp32, PowerSGD
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.compression.low_rank import orthonormal, starting_factor
from lightning_dear.exchange.base import CompressedExchange, Sending, Traffic
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.torch_modes import exact_products


@dataclass(frozen=True)
class Matrix:
    """A tensor [n, m] that travels as P [n, r] and Q [m, r].

    Attributes:
        where: Its elements in the bucket.
        left: P; a view of the first message.
        right: Q; a view of the second.
    """

    where: slice
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Messages:
    """What one bucket sends.

    Attributes:
        first: Flat fp32: every P, and what travels as it is.
        second: Flat fp32: every Q; empty if nothing is factored.
        matrices: Tensor number -> what is factored.
        dense: (elements in the bucket, view of the first message) of what travels as it is.
    """

    first: Tensor
    second: Tensor
    matrices: Mapping[int, Matrix]
    dense: Sequence[tuple[slice, Tensor]]


class LowRankBucket(CompressedBucket):
    """What one bucket sends in two messages, and what it leaves.

    Args:
        bucket: All-reduced, or of a single rank; its mean is read and written.
        compressor: Says which tensors are matrices, and of which rank.
        traffic: Of all tensors, and whether nothing is factored here all the same.

    Attributes:
        messages: Of the next reduction.
        largest: Of larger numbers, the sums of squares of all ranks might overflow.
    """

    messages: Messages

    def __init__(self, bucket: Bucket, compressor: PowerSGD, traffic: Traffic) -> None:
        device, self._world_size = bucket.mean.device, traffic.collectives.world.size
        used = Fp32() if bucket.number in traffic.uncompressed else compressor
        worker = compressor.worker_memory(bucket.mean.numel(), device)
        # Every rank has the whole mean: no owner encodes it, or has anything to keep of that.
        super().__init__(bucket, used, worker, Memory(0, device), self._world_size)
        # Apart until the step is made: one that a loss scale leaves out must not change factors.
        self._pending: dict[int, Tensor] = {}
        self._flat = bucket.mean
        for piece in self.spec.slices:
            shape = storage_shape(traffic.flat.placements[piece.tensor].parameter)
            num_rows = shape[0] if len(shape) > 1 else 1
            num_columns = piece.numel // num_rows
            if rank := compressor.rank_of(num_rows, num_columns):
                factor = torch.empty(num_columns, rank, dtype=torch.float32, device=device)
                self.factors[piece.tensor] = factor
        self.start_anew(None)
        self._make_room()

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        for number, factor in self.factors.items():
            own = self._seed_of(f"{PowerSGD.name} {number}")
            factor.copy_(starting_factor(factor.shape, own))

    @override
    def _make_room(self) -> None:
        pieces = self.spec.slices
        own = [
            None if self.compressor.is_identity else self.factors.get(one.tensor) for one in pieces
        ]
        firsts = [
            piece.numel if factor is None else piece.numel // len(factor) * factor.shape[1]
            for piece, factor in zip(pieces, own, strict=True)
        ]
        seconds = [0 if factor is None else factor.numel() for factor in own]
        new = partial(self.bucket.mean.new_empty, dtype=torch.float32)
        first, second = new(sum(firsts)), new(sum(seconds))
        matrices, dense = dict[int, Matrix](), list[tuple[slice, Tensor]]()
        parts = torch.split(first, firsts), torch.split(second, seconds)
        for piece, factor, left, right in zip(pieces, own, *parts, strict=True):
            where = slice(piece.offset, piece.offset + piece.numel)
            if factor is None:
                dense.append((where, left))
            else:
                left = left.view(-1, factor.shape[1])
                matrices[piece.tensor] = Matrix(where, left, right.view_as(factor))
        self.messages = Messages(first, second, matrices, dense)
        most = torch.finfo(torch.float32).max / (2 * self._world_size)
        self.largest = most / math.sqrt(self.spec.padded_numel) if matrices else math.inf

    # --- one reduction --------------------------------------------------------------------------

    def compensated(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, flat, with what was not sent of earlier ones; kept for later."""
        # Of 16-bit weights the mean is fp32 already. Of fp64 this copies: `decode` writes it back.
        self._flat = self.bucket.mean.float()
        self.worker.compensate(self._flat, scale)
        return self._flat.index_fill_(0, self._padding, 0.0)

    @exact_products()
    def encode_first(self) -> Messages:
        """Writes the first message, P = M Q; returns both, for what is to come."""
        messages = self.messages
        self.counts["reduce"] += 1
        for number, matrix in messages.matrices.items():
            # A later round of the same step goes on from the factor of the round before.
            factor = self._pending.get(number, self.factors[number])
            torch.mm(self._own(matrix), factor, out=matrix.left)
        for where, place in messages.dense:
            place.copy_(self._flat[where])
        return messages

    @exact_products()
    def encode_second(self, messages: Messages, scale: Tensor | None) -> None:
        """Writes the second message, Q = M^T P of the mean's orthonormal P."""
        for matrix in messages.matrices.values():
            own, left, right = self._own(matrix), matrix.left, matrix.right
            left.copy_(orthonormal(left))
            torch.mm(own.t(), left, out=right)
            # What this rank's own factors do not bring; less the mean's it would grow without end.
            own.addmm_(left, right.t(), alpha=-1)
        for where, _ in messages.dense:
            self._flat[where].zero_()
        self.worker.note_lost(self._flat, scale)

    @exact_products()
    def decode(self, messages: Messages) -> None:
        """Makes the bucket's mean of both messages, P Q^T."""
        for number, matrix in messages.matrices.items():
            torch.mm(matrix.left, matrix.right.t(), out=self._own(matrix))
            # Only what its columns span counts, and no loss scale can make that overflow.
            self._pending[number] = orthonormal(matrix.right)
        for where, place in messages.dense:
            self._flat[where] = place
        if self._flat.data_ptr() != self.bucket.mean.data_ptr():
            self.bucket.mean.copy_(self._flat)
            self._flat = self.bucket.mean

    def _own(self, matrix: Matrix) -> Tensor:
        return self._flat[matrix.where].view(len(matrix.left), -1)

    # --- around a step --------------------------------------------------------------------------

    @override
    def commit(self) -> None:
        super().commit()
        self.factors.update(self._pending)
        self._pending.clear()

    @override
    def discard(self) -> None:
        super().discard()
        self._pending.clear()

    @override
    def detach(self) -> None:
        super().detach()
        del self.messages, self._flat


class LowRankExchange(CompressedExchange):
    """All-reduces the factors of every matrix, and what is no matrix as it is.

    Args:
        traffic: Of buckets that are all-reduced.
        compressor: Says what is factored.
    """

    def __init__(self, traffic: Traffic, compressor: PowerSGD) -> None:
        super().__init__(traffic, compressor)
        self.coded: Sequence[LowRankBucket] = [
            LowRankBucket(bucket, compressor, traffic) for bucket in traffic.flat.buckets
        ]
        if self.collectives.world.rank == 0 and not any(one.factors for one in self.coded):
            warnings.warn(
                "compressor='powersgd' compresses nothing: no weight is a matrix of which"
                f" rank={compressor.rank} leaves 1/{compressor.min_saving:g} or less (min_saving)."
                " Leave it out, or choose a smaller rank.",
                stacklevel=2,
            )
        # What is to be done for the second messages of buckets whose first are on their way.
        self._unsent: deque[Callable[[], None]] = deque()
        self._seconds: dict[int, Work] = {}

    @override
    def reduce_calls(self, bucket: Bucket) -> Sequence[str]:
        # Without a matrix there is no second message.
        return ["all_reduce"] * (1 + bool(self.coded[bucket.number].messages.second.numel()))

    @override
    def expect_reduce(self, bucket: Bucket) -> None:
        """An all-reduce has receives of its own."""

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> Sending:
        """Encodes the bucket's first message.

        To be called for all buckets, in reduce order, before the first of them is waited for: that
        wait sends the second messages of all.
        """
        low = self.coded[bucket.number]
        # Factors of what is not finite may look finite.
        self._look_for_inf(low.compensated(scale), low.largest)
        messages = low.encode_first()
        launch = partial(self._launch_first, low, messages, scale)
        return Sending(launch, partial(low.decode, messages))

    def _launch_first(self, low: LowRankBucket, messages: Messages, scale: Tensor | None) -> Work:
        first = self._all_reduce(low.bucket, messages.first)
        # Not in backward, where nothing may wait for another rank: see above.
        self._unsent.append(partial(self._launch_second, first, low, messages, scale))
        return Work(partial(self._arrive, low))

    def _launch_second(
        self, first: Work, low: LowRankBucket, messages: Messages, scale: Tensor | None
    ) -> None:
        first.wait()
        self._as_device_work("encode", low.bucket, low.encode_second, messages, scale)
        self._seconds[low.number] = self._all_reduce(low.bucket, messages.second)

    def _arrive(self, low: LowRankBucket) -> None:
        while self._unsent:
            self._unsent[0]()
            # Only now: a wait that has failed must fail again.
            self._unsent.popleft()
        self._seconds[low.number].wait()
        del self._seconds[low.number]

    def _all_reduce(self, bucket: Bucket, message: Tensor) -> Work:
        if not message.numel():
            # No matrix in this bucket, on any rank.
            return Work.done()
        return self.collectives.launch_all_reduce(message, self.tag_of(bucket))

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sum(low.bucket.mean.nbytes for low in self.coded)
        messages = [low.messages for low in self.coded]
        return dense / sum(one.first.nbytes + one.second.nbytes for one in messages)
