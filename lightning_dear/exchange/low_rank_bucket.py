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
from lightning_dear.exchange.encoded_bucket import EncodedBucket
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


class LowRankBucket(EncodedBucket):
    """What one bucket sends in two messages, and what it leaves.

    The first message holds every matrix's P and, as they are, all tensors that are not worth two
    factors; the second one every Q.

    Args:
        bucket: All-reduced, or of a single rank; its mean is read and written.
        codec: Says which tensors are matrices, and of which rank.
        shapes: Of all tensors, by number.
        world_size: Number of ranks.

    Attributes:
        first: Flat fp32, the first message.
        second: Flat fp32, the second message; empty if nothing is factored.
    """

    def __init__(
        self, bucket: Bucket, codec: PowerSGD, shapes: Sequence[torch.Size], world_size: int
    ) -> None:
        device = bucket.mean.device
        worker = owner_memory(codec, bucket.mean.numel(), device)
        super().__init__(bucket, worker, Memory(0, device), world_size)
        self._shapes = shapes
        self._factors: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}
        self._flat = bucket.mean
        for piece in self.spec.slices:
            rank = codec.rank_of(*self._matrix_shape(piece))
            if rank:
                num_columns = self._matrix_shape(piece)[1]
                factor = starting_factor(num_columns, rank, f"{codec.name} {piece.tensor}")
                self._factors[piece.tensor] = factor.to(device)
        self.use(codec)

    def _matrix_shape(self, piece: Slice) -> tuple[int, int]:
        shape = self._shapes[piece.tensor]
        num_rows = shape[0] if len(shape) > 1 else 1
        return num_rows, piece.numel // num_rows

    def use(self, codec: Compressor) -> None:
        """Lays out the messages: with `PowerSGD` matrices are factored, with another nothing is."""
        self._matrices: dict[int, Matrix] = {}
        self._dense: list[tuple[slice, slice]] = []
        num_first = num_second = 0
        for piece in self.spec.slices:
            where = slice(piece.offset, piece.offset + piece.numel)
            if piece.tensor in self._factors and isinstance(codec, PowerSGD):
                shape, rank = self._matrix_shape(piece), self._factors[piece.tensor].shape[1]
                left = slice(num_first, num_first + shape[0] * rank)
                right = slice(num_second, num_second + shape[1] * rank)
                self._matrices[piece.tensor] = Matrix(where, shape, left, right)
                num_first, num_second = left.stop, right.stop
            else:
                self._dense.append((where, slice(num_first, num_first + piece.numel)))
                num_first += piece.numel
        device = self.bucket.mean.device
        self.first = torch.empty(num_first, device=device)
        self.second = torch.empty(num_second, device=device)

    @property
    @override
    def factors(self) -> Mapping[int, Tensor]:
        return self._factors

    # --- one reduction --------------------------------------------------------------------------

    def compensated(self, scale: Tensor | None) -> Tensor:
        """The bucket's gradients, flat, with what was not sent of earlier ones; kept for later."""
        self._flat = self.bucket.mean.float()
        self.worker.compensate(self._flat, scale)
        return self._flat

    def encode_first(self) -> Tensor:
        """Writes the first message, P = M Q, and returns it."""
        self.counts["reduce"] += 1
        for number, matrix in self._matrices.items():
            factor = self._pending.get(number, self._factors[number])
            torch.mm(self._own(matrix), factor, out=self._left(matrix))
        for where, place in self._dense:
            self.first[place] = self._flat[where]
        return self.first

    def encode_second(self, scale: Tensor | None) -> Tensor:
        """Writes the second message, Q = M^T P of the mean's orthonormal P, and returns it."""
        for matrix in self._matrices.values():
            own, left, right = self._own(matrix), self._left(matrix), self._right(matrix)
            left.copy_(orthonormal(left))
            torch.mm(own.t(), left, out=right)
            # What this rank's own factors do not bring; less the mean's it would grow without end.
            own.addmm_(left, right.t(), alpha=-1)
        for where, _ in self._dense:
            self._flat[where].zero_()
        self.worker.note_lost(self._flat, scale)
        return self.second

    def decode(self) -> None:
        """Makes the bucket's mean of both messages, P Q^T."""
        for number, matrix in self._matrices.items():
            right = self._right(matrix)
            torch.mm(self._left(matrix), right.t(), out=self._own(matrix))
            # Only what its columns span counts, and no loss scale can make that overflow.
            self._pending[number] = orthonormal(right)
        for where, place in self._dense:
            self._flat[where] = self.first[place]
        if self._flat.data_ptr() != self.bucket.mean.data_ptr():
            self.bucket.mean.copy_(self._flat)

    def _own(self, matrix: Matrix) -> Tensor:
        return self._flat[matrix.where].view(matrix.shape)

    def _left(self, matrix: Matrix) -> Tensor:
        return self.first[matrix.left].view(matrix.shape[0], -1)

    def _right(self, matrix: Matrix) -> Tensor:
        return self.second[matrix.right].view(matrix.shape[1], -1)

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
        del self.first, self.second, self._flat
