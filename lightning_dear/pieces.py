"""What of each parameter lies in this rank's shards: the tensors that the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import Bucket, as_flat, shard_slice
from lightning_dear.planning.plan import Slice


@dataclass
class Piece:
    """The part of one parameter that lies in this rank's shard of one bucket.

    Attributes:
        tensor_index: The parameter's number in the engine's list.
        start: First element, in storage order.
        stop: One past the last element.
        bucket: The bucket's number.
        offset: Where the piece begins in the bucket.
        parameter: 1-D view of the elements in the bucket's `shard`, what the optimizer steps on.
        gradient: 1-D view of their mean gradient; None where autograd's own is read.
        has_master: See `Bucket.has_master`.
        is_plain: Whether it is a whole, contiguous parameter, whose gradient needs no rearranging.
        was_stepped: Whether a step has changed `parameter`.
        group: Number of the parameter's group in its optimizer.
        is_all_reduced: Whether every rank has this piece.
    """

    tensor_index: int
    start: int
    stop: int
    bucket: int
    offset: int
    parameter: Tensor
    gradient: Tensor | None
    has_master: bool = False
    is_plain: bool = False
    was_stepped: bool = False
    group: int = 0
    is_all_reduced: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def shard_pieces(bucket: Bucket, rank: int, world_size: int) -> list[Piece]:
    """The pieces of this rank's shard of `bucket`, in the order in which they lie in it."""
    own = shard_slice(bucket.spec.padded_numel, rank, world_size)
    if bucket.is_all_reduced:
        own = slice(0, bucket.spec.padded_numel)
    pieces = []
    for part in bucket.spec.slices:
        lower, upper = max(part.offset, own.start), min(part.offset + part.numel, own.stop)
        if lower < upper:
            pieces.append(_piece(bucket, part, lower, upper, own.start))
    return pieces


def _piece(bucket: Bucket, part: Slice, lower: int, upper: int, begin: int) -> Piece:
    start = part.start + lower - part.offset
    inside = slice(lower - begin, upper - begin)
    return Piece(
        tensor_index=part.tensor,
        start=start,
        stop=start + upper - lower,
        bucket=bucket.number,
        offset=lower,
        parameter=bucket.shard[inside],
        gradient=bucket.mean[inside] if bucket.mean.numel() else None,
        has_master=bucket.has_master,
        is_all_reduced=bucket.is_all_reduced,
    )


def cut_state(key: str, value: Any, parameter: Parameter, piece: Piece) -> Any:
    """A copy of what of an optimizer's state `value` for `parameter` belongs to `piece`."""
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.shape == parameter.shape:
        flat = as_flat(value, parameter.stride())
        # Beside fp32 masters state is fp32, also what DDP has kept in 16 bits.
        dtype = piece.parameter.dtype if piece.has_master and flat.is_floating_point() else None
        return flat[piece.start : piece.stop].to(parameter.device, dtype, copy=True)
    return value.clone()
