"""Tensors in the order of their gradients, small neighbours joined: what planners group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_dear.planning.mgwfbp import backward_order
from lightning_dear.planning.plan import TensorSpec, aligned
from lightning_dear.planning.times import ModelTimes


@dataclass(frozen=True)
class Piece:
    """Tensors that stay together, at one place in the order of gradients.

    Attributes:
        indices: Of the tensors.
        nbytes: Size of all.
        aligned_bytes: The same as they lie in a bucket, each rounded up to whole `ALIGNMENT`s.
        ready_s: When the last gradient is there.
        first_use_s: When forward first reads one of them.
    """

    indices: tuple[int, ...]
    nbytes: int
    aligned_bytes: int
    ready_s: float
    first_use_s: float

    def joined(self, other: Piece) -> Piece:
        """Both as one."""
        return Piece(
            self.indices + other.indices,
            self.nbytes + other.nbytes,
            self.aligned_bytes + other.aligned_bytes,
            max(self.ready_s, other.ready_s),
            min(self.first_use_s, other.first_use_s),
        )


def pre_merged(pieces: Sequence[Piece], max_pieces: int) -> list[Piece]:
    """At most `max_pieces`: neighbours are joined while they are smaller than a size.

    The size is 1 KiB, doubled until few enough are left; so the pieces joined are the smallest.
    """
    joined, size = list(pieces), 1 << 10
    while len(joined) > max_pieces:
        joined = [pieces[0]]
        for piece in pieces[1:]:
            if min(joined[-1].nbytes, piece.nbytes) < size:
                joined[-1] = joined[-1].joined(piece)
            else:
                joined.append(piece)
        size *= 2
    return joined


def families_of_pieces(
    tensors: Sequence[TensorSpec], times: ModelTimes, max_pieces: int
) -> list[tuple[int, list[Piece]]]:
    """Bytes an element, and pieces in the order of their gradients, of each family."""
    return [
        (family[0].itemsize, pre_merged([_piece_of(one, times) for one in family], max_pieces))
        for family in backward_order(tensors, times)
    ]


def _piece_of(tensor: TensorSpec, times: ModelTimes) -> Piece:
    return Piece(
        (tensor.index,),
        tensor.numel * tensor.itemsize,
        aligned(tensor.numel) * tensor.itemsize,
        times.ready_s.get(tensor.index, times.backward_s),
        times.first_use_s.get(tensor.index, times.forward_s),
    )


def indices_of(pieces: Iterable[Piece]) -> list[int]:
    """Of all their tensors."""
    return [index for piece in pieces for index in piece.indices]
