"""A bucket whose matrices travel as two thin factors each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.bucket import Bucket
from lightning_dear.compression import Compressor, PowerSGD
from lightning_dear.compression.low_rank import orthonormal, starting_factor
from lightning_dear.compression.memory import Memory, owner_memory
from lightning_dear.exchange.compressed_bucket import CompressedBucket
from lightning_dear.planning.plan import Slice


@dataclass(frozen=True)
class Matrix:
    """A tensor that travels as P [n, r] and Q [m, r].

    Attributes:
        where: Its elements in the bucket.
        shape: (n, m).
        left: Where P lies in the first message.
        right: Where Q lies in the second.
    """

    where: slice
    shape: tuple[int, int]
    left: slice
    right: slice


@dataclass(frozen=True)
class Messages:
    """What one bucket sends.

    Attributes:
        matrices: Tensor number -> what is factored.
        dense: (elements in the bucket, place in the first message) of what travels as it is.
        first: Flat fp32: every P, and what travels as it is.
        second: Flat fp32: every Q; empty if nothing is factored.
    """

    matrices: Mapping[int, Matrix]
    dense: Sequence[tuple[slice, slice]]
    first: Tensor
    second: Tensor

    def left(self, matrix: Matrix) -> Tensor:
        """P [n, r]; a view."""
        return self.first[matrix.left].view(matrix.shape[0], -1)

    def right(self, matrix: Matrix) -> Tensor:
        """Q [m, r]; a view."""
        return self.second[matrix.right].view(matrix.shape[1], -1)


class LowRankBucket(CompressedBucket):
    """What one bucket sends in two messages, and what it leaves.

    Args:
        bucket: All-reduced, or of a single rank; its mean is read and written.
        low_rank: Says which tensors are matrices, and of which rank.
        codec: `low_rank` itself, or another one, with which nothing is factored.
        shapes: Of all tensors, by number.
        world_size: Number of ranks.

    Attributes:
        messages: Of the next reduction.
    """

    messages: Messages

    def __init__(
        self,
        bucket: Bucket,
        low_rank: PowerSGD,
        codec: Compressor,
        shapes: Sequence[torch.Size],
        world_size: int,
    ) -> None:
        device = bucket.mean.device
        worker = owner_memory(low_rank, bucket.mean.numel(), device)
        # Every rank has the whole mean: no owner encodes it, or has anything to keep of that.
        super().__init__(bucket, codec, worker, Memory(0, device), world_size)
        self._shapes = shapes
        self._factors: dict[int, Tensor] = {}
        # Apart until the step is made: one that a loss scale leaves out must not change factors.
        self._pending: dict[int, Tensor] = {}
        self._flat = bucket.mean
        for piece in self.spec.slices:
            num_rows, num_columns = self._matrix_shape(piece)
            rank = low_rank.rank_of(num_rows, num_columns)
            if rank:
                shape = num_columns, rank
                factor = torch.empty(shape, dtype=torch.float32, device=device)
                self._factors[piece.tensor] = factor
        self._name = low_rank.name
        self.start_anew(None)
        self._make_room()

    @override
    def start_anew(self, seed: int | None) -> None:
        super().start_anew(seed)
        for number, factor in self._factors.items():
            num_columns, rank = factor.shape
            key = self._seeded(f"{self._name} {number}")
            factor.copy_(starting_factor(num_columns, rank, key))

    def _matrix_shape(self, piece: Slice) -> tuple[int, int]:
        shape = self._shapes[piece.tensor]
        num_rows = shape[0] if len(shape) > 1 else 1
        return num_rows, piece.numel // num_rows

    @override
    def _make_room(self) -> None:
        matrices: dict[int, Matrix] = {}
        dense: list[tuple[slice, slice]] = []
        num_first = num_second = 0
        for piece in self.spec.slices:
            where = slice(piece.offset, piece.offset + piece.numel)
            if piece.tensor in self._factors and not self.codec.is_identity:
                shape, rank = self._matrix_shape(piece), self._factors[piece.tensor].shape[1]
                left = slice(num_first, num_first + shape[0] * rank)
                right = slice(num_second, num_second + shape[1] * rank)
                matrices[piece.tensor] = Matrix(where, shape, left, right)
                num_first, num_second = left.stop, right.stop
            else:
                dense.append((where, slice(num_first, num_first + piece.numel)))
                num_first += piece.numel
        like = self.bucket.mean
        first, second = (
            like.new_empty(numel, dtype=torch.float32) for numel in (num_first, num_second)
        )
        self.messages = Messages(matrices, dense, first, second)

    @property
    @override
    def factors(self) -> Mapping[int, Tensor]:
        return self._factors

    # --- one reduction --------------------------------------------------------------------------

    def compensated(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, flat, with what was not sent of earlier ones; kept for later."""
        # Of 16-bit weights the mean is fp32 already. Of fp64 this copies: `decode` writes it back.
        self._flat = self.bucket.mean.float()
        self.worker.compensate(self._flat, scale)
        return self._flat.index_fill_(0, self._padding, 0.0)

    def encode_first(self) -> Messages:
        """Writes the first message, P = M Q; returns both, for what is to come."""
        messages = self.messages
        self.counts["reduce"] += 1
        for number, matrix in messages.matrices.items():
            # A later round of the same step goes on from the factor of the round before.
            factor = self._pending.get(number, self._factors[number])
            torch.mm(self._own(matrix), factor, out=messages.left(matrix))
        for where, place in messages.dense:
            messages.first[place] = self._flat[where]
        return messages

    def encode_second(self, messages: Messages, scale: Tensor | None) -> None:
        """Writes the second message, Q = M^T P of the mean's orthonormal P."""
        for matrix in messages.matrices.values():
            own, left, right = self._own(matrix), messages.left(matrix), messages.right(matrix)
            left.copy_(orthonormal(left))
            torch.mm(own.t(), left, out=right)
            # What this rank's own factors do not bring; less the mean's it would grow without end.
            own.addmm_(left, right.t(), alpha=-1)
        for where, _ in messages.dense:
            self._flat[where].zero_()
        self.worker.note_lost(self._flat, scale)

    def decode(self, messages: Messages) -> None:
        """Makes the bucket's mean of both messages, P Q^T."""
        for number, matrix in messages.matrices.items():
            right = messages.right(matrix)
            torch.mm(messages.left(matrix), right.t(), out=self._own(matrix))
            # Only what its columns span counts, and no loss scale can make that overflow.
            self._pending[number] = orthonormal(right)
        for where, place in messages.dense:
            self._flat[where] = messages.first[place]
        if self._flat.data_ptr() != self.bucket.mean.data_ptr():
            self.bucket.mean.copy_(self._flat)
            self._flat = self.bucket.mean

    def _own(self, matrix: Matrix) -> Tensor:
        return self._flat[matrix.where].view(matrix.shape)

    # --- around a step --------------------------------------------------------------------------

    @override
    def commit(self) -> None:
        super().commit()
        self._factors.update(self._pending)
        self._pending.clear()

    @override
    def discard(self) -> None:
        super().discard()
        self._pending.clear()

    @override
    def detach(self) -> None:
        super().detach()
        del self.messages, self._flat
