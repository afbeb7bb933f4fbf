"""What a plan is: which elements of which tensor lie where in which bucket, and in which order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
"""What `BucketPlan.to_dict` writes and `from_dict` reads."""

_FIELDS = {"name", "world_size", "tensors", "buckets", "reduce_order", "early"}
_ORDERS = ("reduce_order", "early", "all_reduced", "uncompressed")

MAX_BUCKETS = 1 << 12
"""Most buckets of an optimizer; keeps the numbers of several optimizers' buckets apart."""

ALIGNMENT = 64
"""Tensors start, and shards are cut, at multiples of this many elements: torch's fused CPU kernels
give other bits for an element that moves from the vectorised part of a tensor to its tail."""


def aligned(numel: int, multiple: int = ALIGNMENT) -> int:
    """Returns `numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """Describes one parameter as the planner sees it.

    Attributes:
        index: Its number in the engine's list of parameters.
        name: Its qualified name in the module.
        numel: Elements.
        itemsize: Bytes an element.
        family: Tensors of different families (dtype, device) never share a bucket.
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
        """Tells whether the recorded step produced a gradient for it."""
        return self.ready is not None

    @property
    def nbytes(self) -> int:
        """Returns the size, bytes."""
        return self.numel * self.itemsize


Specs = Sequence[TensorSpec]


@dataclass(frozen=True)
class Slice:
    """Places elements [start, stop) of tensor `tensor`, in storage order, at `offset`."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketSpec:
    """Describes one bucket: slices in first-use order, padded so that all shards are equal.

    Attributes:
        family: That of all its tensors.
        slices: What lies in it.
        padded_numel: Elements including padding; a multiple of ALIGNMENT x world_size.
        itemsize: Bytes an element.
    """

    family: str
    slices: tuple[Slice, ...]
    padded_numel: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Returns the number of elements that belong to tensors."""
        return sum(piece.numel for piece in self.slices)

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes, padding included."""
        return self.padded_numel * self.itemsize

    @property
    def stepped_bytes(self) -> int:
        """Returns the size in bytes without the padding, which no optimizer steps.

        So shards take as long to step with every plan, and each tensor its share of that.
        """
        return self.numel * self.itemsize


Part = tuple[TensorSpec, int, int]
"""A tensor, and the elements [start, stop) of it that lie in a bucket."""


def bucket_of(parts: Sequence[Part], world_size: int) -> BucketSpec:
    """Returns a bucket that holds `parts`, one after the other, in this order.

    Raises:
        ValueError: If they are of several families.
    """
    families = {tensor.family for tensor, _, _ in parts}
    if len(families) != 1:
        names = ", ".join(tensor.name for tensor, _, _ in parts[:2])
        raise ValueError(
            f"The plan puts {names} in one bucket; here they differ in type or compressor."
        )
    slices, filled = [], 0
    for tensor, start, stop in parts:
        slices.append(Slice(tensor.index, start, stop, filled))
        filled += aligned(stop - start)
    # Every rank's shard begins at a multiple of ALIGNMENT, too.
    padded_numel = aligned(filled, ALIGNMENT * world_size)
    return BucketSpec(families.pop(), tuple(slices), padded_numel, parts[0][0].itemsize)


@dataclass(frozen=True)
class BucketPlan:
    """Holds buckets in first-use order (of stepping and gathering) and their reduce order.

    Within a family, buckets follow each other in one flat buffer, so that a tensor split between
    two buckets stays contiguous.

    Attributes:
        name: For people: which planner, with which options.
        world_size: Ranks it was made for.
        buckets: In the order in which the next forward first reads them.
        reduce_order: Bucket numbers in the order in which backward completes them.
        early: Numbers of the buckets that may be stepped and gathered while backward still runs, in
            the order in which they are to be gathered.
        all_reduced: Numbers of the buckets that are all-reduced during backward, stepped whole by
            every rank and never gathered; rising, none of them early. At one rank it means nothing.
        uncompressed: Numbers of the buckets that travel as they are although there is a compressor;
            rising.
    """

    name: str
    world_size: int
    buckets: tuple[BucketSpec, ...]
    reduce_order: tuple[int, ...]
    early: tuple[int, ...] = ()
    all_reduced: tuple[int, ...] = ()
    uncompressed: tuple[int, ...] = ()

    @cached_property
    def gather_order(self) -> tuple[int, ...]:
        """Returns numbers of the buckets that are gathered: early ones, then in first-use order."""
        others = frozenset((*self.early, *self.all_reduced))
        return *self.early, *(n for n in range(len(self.buckets)) if n not in others)

    @property
    def padded_numel(self) -> int:
        """Returns the elements of all buckets, padding included."""
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def fill(self) -> float:
        """Returns the share of the buckets that is not padding, 0..1."""
        return sum(bucket.numel for bucket in self.buckets) / max(self.padded_numel, 1)

    @property
    def all_reduced_share(self) -> float:
        """Returns the share of all elements that lie in all-reduced buckets, 0..1."""
        numel = sum(self.buckets[number].numel for number in self.all_reduced)
        return numel / max(sum(bucket.numel for bucket in self.buckets), 1)

    def has_buckets_of(self, other: BucketPlan) -> bool:
        """Tells whether both plans differ in their names alone."""
        return self == replace(other, name=self.name)

    def to_dict(self, tensors: Specs) -> dict[str, Any]:
        """Returns the plan as JSON can hold it, with the names and sizes of its `tensors`."""
        return {
            "version": FORMAT_VERSION,
            "name": self.name,
            "world_size": self.world_size,
            "tensors": [[t.index, t.name, t.numel, t.itemsize] for t in tensors],
            "buckets": [
                [[piece.tensor, piece.start, piece.stop] for piece in bucket.slices]
                for bucket in self.buckets
            ],
            **{order: list(getattr(self, order)) for order in _ORDERS},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan of `to_dict`, over `tensors`, which are found by name.

        Raises:
            ValueError: If it is no plan, or one for other tensors (the message names the first that
                differs) or for another number of ranks.
        """
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"This is no plan of format version {FORMAT_VERSION}; make it again.")
        if missing := _FIELDS - data.keys():
            raise ValueError(f"The plan lacks {', '.join(sorted(missing))}; make it again.")
        if data["world_size"] != world_size:
            raise ValueError(
                f"The plan was made for {data['world_size']} ranks, not for {world_size};"
                " make it again."
            )
        matched = _matched(data["tensors"], tensors)
        if unknown := {part[0] for parts in data["buckets"] for part in parts} - matched.keys():
            raise ValueError(f"The plan does not say which tensor number {min(unknown)} is.")
        # Numbers may have changed since the plan was made; names have not.
        buckets = tuple(
            bucket_of([(matched[index], *span) for index, *span in parts], world_size)
            for parts in data["buckets"]
        )
        # Plans of before there were all-reduced and uncompressed buckets have none.
        orders = (tuple(data.get(order, ())) for order in _ORDERS)
        plan = cls(data["name"], world_size, buckets, *orders)
        check_plan(plan, tensors)
        return plan


def check_plan(plan: BucketPlan, tensors: Specs) -> None:
    """Refuses a plan that does not hold every element of `tensors` exactly once, in order.

    A tensor that is cut must go on at the beginning of its family's next bucket.

    Raises:
        ValueError: Naming the tensor or the order that is wrong.
    """
    reached = {tensor.index: 0 for tensor in tensors}
    filled_by: dict[str, int | None] = {}
    families = {tensor.index: tensor.family for tensor in tensors}
    for bucket in plan.buckets:
        if {families[piece.tensor] for piece in bucket.slices} != {bucket.family}:
            raise ValueError("The plan puts tensors that differ in type or compressor together.")
        for number, piece in enumerate(bucket.slices):
            continues = number == 0 and filled_by.get(bucket.family) == piece.tensor
            is_next = piece.start == reached[piece.tensor] < piece.stop
            if not is_next or (piece.start > 0 and not continues):
                raise ValueError(
                    f"The plan does not hold tensor {piece.tensor} once, in order, unbroken."
                )
            reached[piece.tensor] = piece.stop
        last = bucket.slices[-1]
        # Padding would come between the two parts of a tensor that is cut here.
        is_full = last.offset + last.numel == bucket.padded_numel
        filled_by[bucket.family] = last.tensor if is_full else None
    for tensor in tensors:
        if reached[tensor.index] != tensor.numel:
            raise ValueError(f"The plan does not hold all of {tensor.name}.")
    numbers = list(range(len(plan.buckets)))
    if sorted(plan.reduce_order) != numbers:
        raise ValueError("The plan's reduce_order does not name every bucket once.")
    if len(set(plan.early)) < len(plan.early) or not set(plan.early) <= set(plan.reduce_order[:-1]):
        raise ValueError("The plan's early buckets must differ and not be reduced last.")
    for kind in ("all_reduced", "uncompressed"):
        named = getattr(plan, kind)
        if list(named) != sorted(set(named)) or not set(named) <= set(numbers):
            raise ValueError(f"The plan's {kind} must name some of its buckets, once and in order.")
    if not set(plan.all_reduced).isdisjoint(plan.early):
        raise ValueError("The plan's all-reduced buckets cannot be early: nothing is gathered.")


def _matched(saved: Sequence[Any], tensors: Specs) -> dict[int, TensorSpec]:
    """Saved index -> the tensor of that name."""
    names = {tensor.name: tensor for tensor in tensors}
    matched = {}
    for index, name, numel, itemsize in saved:
        if name not in names:
            raise ValueError(f"The plan is for another model: {name} is not in this one.")
        tensor = names.pop(name)
        if (tensor.numel, tensor.itemsize) != (numel, itemsize):
            raise ValueError(
                f"The plan is for another model: there {name} has {numel} elements of {itemsize}"
                f" bytes, here {tensor.numel} of {tensor.itemsize}."
            )
        matched[index] = tensor
    if names:
        raise ValueError(f"The plan is for another model: it does not know {next(iter(names))}.")
    return matched


def reduce_order(buckets: Sequence[BucketSpec], tensors: Specs) -> tuple[int, ...]:
    """Returns bucket numbers by the time their last gradient came; those without go last."""
    ready = {tensor.index: tensor.ready for tensor in tensors}

    def last_gradient(number: int) -> tuple[float, int]:
        times = [ready[piece.tensor] for piece in buckets[number].slices]
        return max(float("inf") if time is None else time for time in times), -number

    return tuple(sorted(range(len(buckets)), key=last_gradient))


def distinct(plans: Iterable[BucketPlan]) -> list[BucketPlan]:
    """Returns the plans without those that differ from an earlier one in name alone."""
    kept: dict[BucketPlan, BucketPlan] = {}
    for plan in plans:
        kept.setdefault(replace(plan, name=""), plan)
    return list(kept.values())


def with_whole_tensors(plan: BucketPlan, tensors: Specs) -> BucketPlan:
    """Returns `plan`, but with a bucket for every tensor that it cuts. Pure.

    For optimizers that need to see tensors whole. What else was in its buckets stays together,
    before it or after it; no bucket is early, or all-reduced. A bucket is uncompressed if that
    bucket was in which all it holds began.

    Args:
        plan: Over `tensors`.
        tensors: For their sizes and the order of their gradients.
    """
    num_parts = Counter(piece.tensor for bucket in plan.buckets for piece in bucket.slices)
    if max(num_parts.values(), default=1) == 1:
        return replace(plan, early=(), all_reduced=())
    by_index = {tensor.index: tensor for tensor in tensors}

    def cut_tensor(piece: Slice) -> int | None:
        return piece.tensor if num_parts[piece.tensor] > 1 else None

    buckets: list[BucketSpec] = []
    uncompressed: list[int] = []
    for number, bucket in enumerate(plan.buckets):
        # A run of tensors that lie in this bucket alone, or a part of one that is cut.
        for _, run in groupby(bucket.slices, cut_tensor):
            # Where a cut tensor begins, all of it goes; its later parts leave nothing behind.
            members = [by_index[piece.tensor] for piece in run if piece.start == 0]
            if not members:
                continue
            if number in plan.uncompressed:
                uncompressed.append(len(buckets))
            parts = [(tensor, 0, tensor.numel) for tensor in members]
            buckets.append(bucket_of(parts, plan.world_size))
    name, order = f"{plan.name}, no tensor cut", reduce_order(buckets, tensors)
    return BucketPlan(name, plan.world_size, tuple(buckets), order, (), (), tuple(uncompressed))


def save_plan(path: str | Path, plan: BucketPlan, tensors: Specs) -> None:
    """Writes `plan`, which is over `tensors`, as JSON that `FixedPlan` reads."""
    Path(path).write_text(json.dumps(plan.to_dict(tensors)) + "\n")


class FixedPlan:
    """Uses a plan that was made before, for the same model on as many ranks.

    Args:
        path_or_plan: File of `save_plan`, read when training has recorded its first step, on every
            rank; or the plan itself.
    """

    def __init__(self, path_or_plan: str | Path | BucketPlan) -> None:
        self.path_or_plan = path_or_plan

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """See `FusionPlanner`.

        Raises:
            ValueError: If the plan is for another model or another number of ranks.
            OSError: If the file cannot be read.
        """
        plan = self.path_or_plan
        if isinstance(plan, BucketPlan):
            return BucketPlan.from_dict(plan.to_dict(tensors), tensors, world_size)
        try:
            return BucketPlan.from_dict(json.loads(Path(plan).read_text()), tensors, world_size)
        except ValueError as error:
            raise ValueError(f"{Path(plan)}: {error}") from None
