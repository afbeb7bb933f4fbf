"""The low-rank exchange: two all-reduces of thin factors make the mean gradient (PowerSGD).

    gradients + residual M -> P = M Q -> all-reduce                                     (backward)
    mean P -> orthonormal P -> Q = M^T P -> all-reduce                            (after backward)
    mean gradient = P Q^T, on every rank; residual = M - P Q^T, with this rank's own Q

A bucket's P is sent when the bucket is full. The Qs follow after backward, when the first work is
waited for; each Q is computed while the Qs before it travel. All ranks launch in the same order:
every P in reduce order, then every Q in reduce order.

Nothing in backward may wait for another rank, not even for a P. Backward can have collectives of
its own, such as those of SyncBatchNorm. A rank that waits in one of them fills no more buckets
until all ranks are there. If another rank waits meanwhile for the P of such a bucket, both wait for
ever.

A Q cannot be launched in backward without a wait either, as soon as its P has arrived. Each rank
would launch it between other Ps, but all-reduces are matched by their order. A process group for
the Qs would give them an order of their own on gloo, at the price of as many connections again. It
would not help on NCCL, which needs one order over all groups, and whose host runs too far ahead of
the device to find that a P has arrived. So backward hides the communication of the Ps, and not that
of the Qs.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket, storage_shape
from lightning_dear.collectives.work import Work
from lightning_dear.compression import Fp32, PowerSGD, error_feedback, low_rank
from lightning_dear.exchange import base, compressed_bucket
from lightning_dear.torch_modes import exact_products


class Matrix(NamedTuple):
    """A tensor, seen as a matrix M [n, m], that travels as P [n, r] and Q [m, r].

    Attributes:
        where: Slice of the bucket that holds the tensor's elements.
        left: P, a view of the first message.
        right: Q, a view of the second message.
    """

    where: slice
    left: Tensor
    right: Tensor


class Messages(NamedTuple):
    """The two messages of one bucket, and the views of them.

    Attributes:
        first: Flat fp32: every P, and all tensors that are not factored.
        second: Flat fp32: every Q. Empty if no tensor is factored.
        matrices: Parameter index -> the matrix of a tensor that is factored.
        dense: For each tensor that is not factored, (slice of the bucket, view of `first`).
    """

    first: Tensor
    second: Tensor
    matrices: Mapping[int, Matrix]
    dense: Sequence[tuple[slice, Tensor]]


class LowRankBucket(compressed_bucket.CompressedBucket):
    """One bucket that travels as low-rank factors, with what it keeps between steps.

    Args:
        bucket: Bucket that is all-reduced, or of a single rank; its mean is read and mutated.
        compressor: Says which tensors are factored, and gives the matrix rank of their factors.
        traffic: All parameters, and whether the plan leaves this bucket uncompressed.

    Attributes:
        messages: Buffers of the next reduction.
        largest: Largest magnitude that may be sent. A larger one counts as inf, because sums of
            squares over all ranks might overflow. inf means no limit: nothing is factored.
    """

    messages: Messages

    def __init__(self, bucket: Bucket, compressor: PowerSGD, traffic: base.Traffic) -> None:
        device, self._world_size = bucket.mean.device, traffic.collectives.world.size
        used = Fp32() if bucket.number in traffic.uncompressed else compressor
        worker = compressor.worker_memory(bucket.mean.numel(), device)
        # Every rank has the whole mean, so that no owner encodes it and keeps a residual of it.
        super().__init__(bucket, used, worker, error_feedback.Memory(0, device), self._world_size)
        # New factors, kept apart until `commit`: a step that a loss scale skips must not change
        # `factors`.
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
            factor.copy_(low_rank.starting_factor(factor.shape, own))

    @override
    def _make_room(self) -> None:
        pieces = self.spec.slices
        factors = {} if self.compressor.is_identity else self.factors
        own = [factors.get(piece.tensor) for piece in pieces]
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
        """Returns the bucket's gradients plus residual, flat fp32, for the encoding that follows.

        The gradients are read from the bucket's mean, which is the same memory. A mean of fp32 is
        mutated, and is what is returned.
        """
        # `float` copies only a mean of fp64, into which `decode` writes the result back.
        self._flat = self.bucket.mean.float()
        self.worker.compensate(self._flat, scale)
        return self._flat.index_fill_(0, self._padding, 0.0)

    @exact_products()
    def encode_first(self) -> Messages:
        """Writes the first message, every P = M Q and all other tensors, from `compensated`.

        Returns:
            The buffers of both messages, to be given to `encode_second` and `decode`: `use` may
            replace `self.messages` meanwhile.
        """
        messages = self.messages
        self.counts["reduce"] += 1
        for number, matrix in messages.matrices.items():
            # A later round of one step continues from the factor of the round before.
            factor = self._pending.get(number, self.factors[number])
            torch.mm(self._own(matrix), factor, out=matrix.left)
        for where, place in messages.dense:
            place.copy_(self._flat[where])
        return messages

    @exact_products()
    def encode_second(self, messages: Messages, scale: Tensor | None) -> None:
        """Writes the second message, Q = M^T P, with P made orthonormal from the mean P.

        To be called when the first message has arrived. Makes the residual pending.
        """
        for matrix in messages.matrices.values():
            own, left, right = self._own(matrix), matrix.left, matrix.right
            left.copy_(low_rank.orthonormal(left))
            torch.mm(own.t(), left, out=right)
            # The residual is what this rank's own P Q^T leaves of M. Subtracting the mean's P Q^T
            # instead would make the residuals grow without bound.
            own.addmm_(left, right.t(), alpha=-1)
        for where, _ in messages.dense:
            self._flat[where].zero_()
        self.worker.note_lost(self._flat, scale)

    @exact_products()
    def decode(self, messages: Messages) -> None:
        """Writes the mean gradient into the bucket's mean: P Q^T, and the tensors sent whole.

        To be called when both messages have arrived. Keeps the new factors until `commit`.
        """
        for number, matrix in messages.matrices.items():
            torch.mm(matrix.left, matrix.right.t(), out=self._own(matrix))
            # The next step needs only the space that Q's columns span. Orthonormal columns keep
            # a loss scale from making the factor overflow.
            self._pending[number] = low_rank.orthonormal(matrix.right)
        for where, place in messages.dense:
            self._flat[where] = place
        if self._flat.data_ptr() != self.bucket.mean.data_ptr():
            self.bucket.mean.copy_(self._flat)
            self._flat = self.bucket.mean

    def _own(self, matrix: Matrix) -> Tensor:
        """Returns M, a view of the gradients plus residual, [n, m]."""
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


class LowRankExchange(base.CompressedExchange):
    """All-reduces two factors of each tensor that is factored, and all other tensors uncompressed.

    If no tensor of any bucket is factored, rank 0 warns.

    Args:
        traffic: The buckets, which are all-reduced, and their collectives.
        compressor: Says which tensors are factored.
    """

    def __init__(self, traffic: base.Traffic, compressor: PowerSGD) -> None:
        super().__init__(traffic, compressor)
        self.coded: Sequence[LowRankBucket] = [
            LowRankBucket(bucket, compressor, traffic) for bucket in traffic.flat.buckets
        ]
        if self.collectives.world.rank == 0 and not any(low.factors for low in self.coded):
            warnings.warn(
                "compressor='powersgd' compresses nothing. Choose a smaller rank, or leave it out."
                f" With rank={compressor.rank} the factors of each weight have more than 1/"
                f"{compressor.min_saving:g} of its elements (min_saving), so it is sent as it is.",
                stacklevel=2,
            )
        # For each bucket whose P is in flight, a function that waits for it and launches the Q.
        self._unsent: deque[Callable[[], None]] = deque()
        self._seconds: dict[int, Work] = {}

    @override
    def _encode(self, bucket: Bucket, scale: Tensor | None) -> base.Sending:
        """Encodes the bucket's first message.

        Must be called for all buckets of a round, in reduce order, before the work of any is waited
        for: the first wait launches the second messages of all buckets that were launched before.
        """
        low = self.coded[bucket.number]
        # Looks before encoding, since the factors of inf or nan may be finite.
        self._look_for_inf(low.compensated(scale), low.largest)
        messages = low.encode_first()
        launch = partial(self._launch_first, low, messages, scale)
        return base.Sending(launch, partial(low.decode, messages))

    def _launch_first(self, low: LowRankBucket, messages: Messages, scale: Tensor | None) -> Work:
        """Launches the bucket's P. Returns a work whose `wait` launches the Qs; see `_arrive`."""
        first = self._all_reduce(low.bucket, messages.first)
        # Called by the first wait, after backward, in which nothing may wait for another rank: see
        # the top of this file.
        self._unsent.append(partial(self._launch_second, first, low, messages, scale))
        return Work(partial(self._arrive, low))

    def _launch_second(
        self, first: Work, low: LowRankBucket, messages: Messages, scale: Tensor | None
    ) -> None:
        """Blocks until the bucket's P has arrived, then encodes and launches its Q."""
        first.wait()
        self._as_device_work("encode", low.bucket, low.encode_second, messages, scale)
        self._seconds[low.number] = self._all_reduce(low.bucket, messages.second)

    def _arrive(self, low: LowRankBucket) -> None:
        """Launches all Qs that are not launched yet, and blocks until this bucket's has arrived."""
        while self._unsent:
            self._unsent[0]()
            # Removed only after the call, so that a wait that has failed fails again.
            self._unsent.popleft()
        self._seconds[low.number].wait()
        del self._seconds[low.number]

    def _all_reduce(self, bucket: Bucket, message: Tensor) -> Work:
        if not message.numel():
            # Nothing in this bucket is factored, on any rank, so that no rank launches.
            return Work.done()
        return self.collectives.launch_all_reduce(message, self.tag_of(bucket))

    @property
    @override
    def compression_ratio(self) -> float:
        dense = sum(low.bucket.mean.nbytes for low in self.coded)
        messages = [low.messages for low in self.coded]
        return dense / sum(message.first.nbytes + message.second.nbytes for message in messages)
