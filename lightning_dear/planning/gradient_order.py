"""Tensors in the order of their gradients, small neighbours joined: what planners group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_dear.planning.measured import ModelTimes
from lightning_dear.planning.plan import TensorSpec, aligned


def backward_order(tensors: Sequence[TensorSpec], times: ModelTimes) -> list[list[TensorSpec]]:
    """The tensors that get gradients, in the order of those, family by family; largest first."""
    families: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if tensor.is_used:
            families.setdefault(tensor.family, []).append(tensor)
    for family in families.values():
        # Measured times may be equal; then the recorded order decides.
        family.sort(key=lambda t: (times.ready_s.get(t.index, times.backward_s), t.ready, -t.index))
    return sorted(families.values(), key=lambda family: -sum(t.nbytes for t in family))


@dataclass(frozen=True)
class Piece:
    """Tensors that stay together, neighbours in the order of gradients.

    Attributes:
        indices: The tensors' numbers.
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
        # Begun anew each time, so that the outcome depends on the last size alone.
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

    def piece_of(tensor: TensorSpec) -> Piece:
        return Piece(
            (tensor.index,),
            tensor.nbytes,
            aligned(tensor.numel) * tensor.itemsize,
            times.ready_s.get(tensor.index, times.backward_s),
            times.first_use_s.get(tensor.index, times.forward_s),
        )

    return [
        (family[0].itemsize, pre_merged([piece_of(tensor) for tensor in family], max_pieces))
        for family in backward_order(tensors, times)
    ]


def members_of(pieces: Sequence[Piece], cuts: Iterable[int]) -> list[list[int]]:
    """The tensors' numbers, group by group; `cuts` says after how many pieces each group ends."""
    groups, begin = [], 0
    for end in cuts:
        groups.append([index for piece in pieces[begin:end] for index in piece.indices])
        begin = end
    return groups
