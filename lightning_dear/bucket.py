"""Flat buffers: parameters and gradients of a bucket lie side by side, ready to travel.

Every parameter becomes a view of one flat buffer per family (dtype, device, optimizer), so that an
all-gather lands in place; a bucket is a contiguous range of it, and a shard is this rank's
contiguous 1/world_size of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.planning.plan import BucketPlan, BucketSpec, Slice


@dataclass(frozen=True)
class Bucket:
    """One bucket's buffers.

    Attributes:
        number: Position in the plan, equal on all ranks.
        spec: What lies where in it.
        parameters: Flat, `spec.padded_numel` elements; the parameters are views of it.
        gradients: Flat, as `parameters`; empty at world size 1, where nothing has to travel.
        received: Scratch for what other ranks send of this rank's gradient shard.
    """

    number: int
    spec: BucketSpec
    parameters: Tensor
    gradients: Tensor
    received: Tensor


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies in the flat buffers, elements in the order of its storage.

    Attributes:
        parameter: The user's parameter; its `data` is a view of the flat buffer.
        view: The part of the flat parameter buffer that `parameter.data` is.
        gradient: View of the gradient buffer in the parameter's shape and strides; None at world
            size 1, where the optimizer reads `parameter.grad` where autograd left it.
        buckets: Numbers of the buckets that hold it.
        data_ptr: Address of `parameter.data`; another address means that somebody replaced it.
    """

    parameter: Parameter
    view: Tensor
    gradient: Tensor | None
    buckets: tuple[int, ...]
    data_ptr: int

    def was_replaced(self) -> bool:
        """Whether `parameter.data` no longer is the flat buffer's view."""
        return self.parameter.data_ptr() != self.data_ptr

    def adopt_replacement(self) -> None:
        """Copies data that was put in place of the view into the buffer, and points back to it."""
        self.view.copy_(self.parameter.data)
        self.parameter.data = self.view


@dataclass
class Piece:
    """The part of one parameter that lies in this rank's shard of one bucket.

    Attributes:
        tensor_index: The parameter's number in the engine's list.
        start: First element, in storage order.
        stop: One past the last element.
        bucket: The bucket's number.
        offset: Where the piece begins in the bucket.
        parameter: 1-D view of the elements, what the optimizer steps on.
        gradient: 1-D view of their mean gradient; None at world size 1.
        is_plain: Whether it is a whole, contiguous parameter, whose gradient needs no rearranging.
    """

    tensor_index: int
    start: int
    stop: int
    bucket: int
    offset: int
    parameter: Tensor
    gradient: Tensor | None
    is_plain: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


def storage_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides that keep the tensor's memory format (channels_last too) without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def as_flat(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`tensor` as 1-D in the order of `strides`; a view where its layout allows, else a copy."""
    if tensor.stride() != strides:
        tensor = torch.empty_strided(
            tensor.size(), strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class FlatBuffers:
    """All buckets of a plan and where each parameter lies in them."""

    buckets: list[Bucket]
    placements: list[Placement]


def allocate(
    plan: BucketPlan, parameters: Sequence[Parameter], scratch_numel: Callable[[int], int]
) -> FlatBuffers:
    """Makes the buffers of `plan` and moves the parameters into them.

    Mutates each parameter's `data`: values stay, storage changes.

    Args:
        plan: Over exactly these parameters, by their index.
        parameters: The engine's list.
        scratch_numel: Elements of a bucket -> elements of its scratch (see `Bucket.received`).
    """
    by_family: dict[str, list[int]] = {}
    homes: dict[int, list[int]] = {}
    for number, spec in enumerate(plan.buckets):
        by_family.setdefault(spec.family, []).append(number)
        for piece in spec.slices:
            homes.setdefault(piece.tensor, []).append(number)
    buckets: dict[int, Bucket] = {}
    placements: dict[int, Placement] = {}
    for numbers in by_family.values():
        like = parameters[plan.buckets[numbers[0]].slices[0].tensor]
        numel = sum(plan.buckets[number].padded_numel for number in numbers)
        flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        gradients = torch.zeros_like(flat) if plan.world_size > 1 else flat.new_empty(0)
        offset = 0
        for number in numbers:
            spec = plan.buckets[number]
            stop = offset + spec.padded_numel
            scratch = flat.new_empty(scratch_numel(spec.padded_numel))
            buckets[number] = Bucket(
                number, spec, flat[offset:stop], gradients[offset:stop], scratch
            )
            for piece in spec.slices:
                if piece.start == 0:
                    where = offset + piece.offset
                    placements[piece.tensor] = _place(
                        parameters[piece.tensor], flat, gradients, where, homes[piece.tensor]
                    )
            offset = stop
    return FlatBuffers(
        [buckets[number] for number in range(len(buckets))],
        [placements[index] for index in range(len(parameters))],
    )


def _place(
    parameter: Parameter, flat: Tensor, gradients: Tensor, offset: int, homes: list[int]
) -> Placement:
    strides = storage_strides(parameter)
    view = flat.as_strided(parameter.size(), strides, offset)
    view.copy_(parameter.data)
    gradient = None
    if gradients.numel():
        gradient = gradients.as_strided(parameter.size(), strides, offset)
    parameter.data = view
    return Placement(parameter, view, gradient, tuple(homes), view.data_ptr())


def shard_pieces(bucket: Bucket, rank: int, world_size: int) -> list[Piece]:
    """The pieces of this rank's shard of `bucket`, in the order in which they lie in it."""
    size = bucket.spec.padded_numel // world_size
    begin, end = rank * size, (rank + 1) * size
    pieces = []
    for part in bucket.spec.slices:
        lower, upper = max(part.offset, begin), min(part.offset + part.numel, end)
        if lower < upper:
            pieces.append(_piece(bucket, part, lower, upper))
    return pieces


def _piece(bucket: Bucket, part: Slice, lower: int, upper: int) -> Piece:
    start = part.start + lower - part.offset
    gradient = bucket.gradients[lower:upper] if bucket.gradients.numel() else None
    parameter = bucket.parameters[lower:upper]
    stop = start + upper - lower
    return Piece(part.tensor, start, stop, bucket.number, lower, parameter, gradient)
