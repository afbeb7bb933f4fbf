"""What a plan is: which elements of which tensor lie where in which bucket, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Tensors start, and shards are cut, at multiples of this many elements: torch's fused CPU kernels
give other bits for an element that moves from the vectorised part of a tensor to its tail."""


def aligned(numel: int, multiple: int = ALIGNMENT) -> int:
    """`numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """One parameter as the planner sees it.

    Attributes:
        index: Its number in the engine's list of parameters.
        name: Its qualified name in the module.
        numel: Elements.
        itemsize: Bytes an element.
        family: Tensors of different families (dtype, device, optimizer) never share a bucket.
        first_use: Position among the first reads of the recorded forward; None if never read.
        ready: Position among the gradients of the recorded backward; None if it got none.
    """

    index: int
    name: str
    numel: int
    itemsize: int
    family: str
    first_use: int | None = None
    ready: int | None = None

    @property
    def is_used(self) -> bool:
        """Whether the recorded step produced a gradient for it."""
        return self.ready is not None


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of tensor `tensor`, in storage order, at `offset` in the bucket."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketSpec:
    """One bucket: slices in first-use order, padded so that every rank's shard is equal.

    Attributes:
        family: That of all its tensors.
        slices: What lies in it.
        padded_numel: Elements including padding; a multiple of ALIGNMENT x world_size.
    """

    family: str
    slices: tuple[Slice, ...]
    padded_numel: int

    @property
    def numel(self) -> int:
        """Elements that belong to tensors."""
        return sum(piece.numel for piece in self.slices)


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in first-use order (the order of stepping and gathering) and their reduce order.

    Within a family, buckets follow each other in one flat buffer, so that a tensor split between
    two buckets stays contiguous.

    Attributes:
        name: For people: which planner, with which options.
        world_size: Ranks it was made for.
        buckets: In the order in which the next forward first reads them.
        reduce_order: Bucket numbers in the order in which backward completes them.
        early: Numbers of the buckets that may be stepped and gathered while backward still runs, in
            the order in which they are to be gathered.
    """

    name: str
    world_size: int
    buckets: tuple[BucketSpec, ...]
    reduce_order: tuple[int, ...]
    early: tuple[int, ...] = ()

    @property
    def padded_numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def fill(self) -> float:
        """Share of the buckets that is not padding, 0..1."""
        return sum(bucket.numel for bucket in self.buckets) / max(self.padded_numel, 1)


def reduce_order(buckets: Sequence[BucketSpec], tensors: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Bucket numbers by the time their last gradient came; those that got none go last."""
    ready = {tensor.index: tensor.ready for tensor in tensors}

    def last_gradient(number: int) -> tuple[float, int]:
        times = [ready[piece.tensor] for piece in buckets[number].slices]
        return max(float("inf") if time is None else time for time in times), -number

    return tuple(sorted(range(len(buckets)), key=last_gradient))
