"""Plans: which elements of which tensor lie in which bucket, and the orders of the buckets."""

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
"""Version of the format that `BucketPlan.to_dict` writes and `from_dict` reads."""

_FIELDS = {"name", "world_size", "tensors", "buckets", "reduce_order", "early"}
_ORDERS = ("reduce_order", "early", "all_reduced", "uncompressed")

MAX_BUCKETS = 1 << 12
"""Most buckets of one optimizer. Message tags of two optimizers are at least this far apart."""

ALIGNMENT = 64
"""Tensors start, and shards are cut, at multiples of this many elements. torch's fused CPU kernels
compute the tail of a tensor by other instructions than its vectorised part, so that an element that
moved from one to the other would get other bits."""


def aligned(numel: int, multiple: int = ALIGNMENT) -> int:
    """Returns `numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """Describes one parameter for planners.

    Attributes:
        index: Index of the parameter in the engine's list of parameters.
        name: Qualified name of the parameter in the module.
        numel: Number of elements.
        itemsize: Bytes of an element.
        family: Key made of dtype, device and codec. Tensors of different families never share a
            bucket.
        first_use: Position among the first reads of the recorded forward. None means that the
            forward did not read it.
        ready: Position among the gradients of the recorded backward. None means that it got no
            gradient.
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
        """Tells whether the recorded step produced a gradient for the parameter."""
        return self.ready is not None

    @property
    def nbytes(self) -> int:
        """Returns the size of the parameter in bytes."""
        return self.numel * self.itemsize


Specs = Sequence[TensorSpec]
"""All tensors of one optimizer, as planners get them."""


@dataclass(frozen=True)
class Slice:
    """Describes the part of one tensor that lies in a bucket.

    Attributes:
        tensor: Index of the tensor.
        start: First element of the part, in the order in which the tensor's elements are stored.
        stop: First element after the part.
        offset: Element of the bucket at which the part begins.
    """

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
        family: Family that all of its tensors have.
        slices: Parts of tensors that lie in the bucket, in the order of their offsets.
        padded_numel: Number of elements, padding included; a multiple of ALIGNMENT x world_size.
        itemsize: Bytes of an element.
    """

    family: str
    slices: tuple[Slice, ...]
    padded_numel: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Returns the number of elements without padding."""
        return sum(part.numel for part in self.slices)

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes, padding included."""
        return self.padded_numel * self.itemsize

    @property
    def stepped_bytes(self) -> int:
        """Returns the size in bytes without padding, which no optimizer steps.

        Planners share the time of the optimizer step among buckets by this size, so that a tensor
        costs the same in every plan.
        """
        return self.numel * self.itemsize


Part = tuple[TensorSpec, int, int]
"""A tensor, and the range [start, stop) of its elements that lies in a bucket."""


def bucket_of(ranges: Sequence[Part], world_size: int) -> BucketSpec:
    """Returns a bucket that holds `ranges` one after the other, each aligned.

    Raises:
        ValueError: If the tensors are of several families.
    """
    families = {tensor.family for tensor, _, _ in ranges}
    if len(families) != 1:
        names = ", ".join(tensor.name for tensor, _, _ in ranges[:2])
        raise ValueError(
            f"The plan puts {names} in one bucket, where dtype, device, compressor must be equal."
        )
    slices, filled = [], 0
    for tensor, start, stop in ranges:
        slices.append(Slice(tensor.index, start, stop, filled))
        filled += aligned(stop - start)
    # A multiple of ALIGNMENT for each rank, so that every shard begins at one.
    padded_numel = aligned(filled, ALIGNMENT * world_size)
    return BucketSpec(families.pop(), tuple(slices), padded_numel, ranges[0][0].itemsize)


@dataclass(frozen=True)
class BucketPlan:
    """Says which tensors share a bucket, and in which orders buckets are reduced and gathered.

    A bucket's number is its index in `buckets`. Buckets are stepped and gathered in the order of
    their numbers. Buckets of one family follow each other in one flat buffer, so that a tensor that
    is split between two buckets stays contiguous.

    Attributes:
        name: Description for people: the planner and its options.
        world_size: Number of ranks that the plan was made for.
        buckets: Buckets in the order in which forward first reads them.
        reduce_order: Bucket numbers in the order in which backward completes the buckets.
        early: Numbers of the buckets that may be stepped and gathered while backward still runs, in
            the order in which they are to be gathered.
        all_reduced: Numbers, ascending, of the buckets that are all-reduced during backward,
            stepped whole by every rank and never gathered. None of them is early. At one rank they
            are treated as all others.
        uncompressed: Numbers, ascending, of the buckets that travel uncompressed although there is
            a compressor.
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
        """Returns the numbers of gathered buckets: early ones first, then in first-use order."""
        others = frozenset((*self.early, *self.all_reduced))
        return *self.early, *(n for n in range(len(self.buckets)) if n not in others)

    @property
    def padded_numel(self) -> int:
        """Returns the elements of all buckets, padding included."""
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def fill(self) -> float:
        """Returns the share of all buckets' elements that is not padding, 0..1."""
        return sum(bucket.numel for bucket in self.buckets) / max(self.padded_numel, 1)

    @property
    def all_reduced_share(self) -> float:
        """Returns the share of all elements that lie in all-reduced buckets, 0..1."""
        numel = sum(self.buckets[number].numel for number in self.all_reduced)
        return numel / max(sum(bucket.numel for bucket in self.buckets), 1)

    def has_buckets_of(self, other: BucketPlan) -> bool:
        """Tells whether the two plans are equal except for their names."""
        return self == replace(other, name=self.name)

    def to_dict(self, tensors: Specs) -> dict[str, Any]:
        """Returns the plan in a form that JSON can hold, with the names and sizes of `tensors`.

        Args:
            tensors: Tensors that the plan was made for.
        """
        return {
            "version": FORMAT_VERSION,
            "name": self.name,
            "world_size": self.world_size,
            "tensors": [[t.index, t.name, t.numel, t.itemsize] for t in tensors],
            "buckets": [
                [[part.tensor, part.start, part.stop] for part in bucket.slices]
                for bucket in self.buckets
            ],
            **{order: list(getattr(self, order)) for order in _ORDERS},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan that `to_dict` has written, for `tensors`, which are matched by name.

        Args:
            data: What `to_dict` has returned.
            tensors: Tensors of the present training.
            world_size: Number of ranks of the present training.

        Raises:
            ValueError: If `data` is not a plan, or a plan for other tensors (the message names the
                first that differs) or for another number of ranks.
        """
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"This is no plan of format version {FORMAT_VERSION}. It must be one.")
        if missing := _FIELDS - data.keys():
            raise ValueError(f"The plan lacks {', '.join(sorted(missing))}. It must have these.")
        if data["world_size"] != world_size:
            raise ValueError(
                f"The plan was made for {data['world_size']} ranks, and there are {world_size}."
                " It can be used only with as many."
            )
        matched = _matched(data["tensors"], tensors)
        if unknown := {part[0] for parts in data["buckets"] for part in parts} - matched.keys():
            raise ValueError(f"Tensor {min(unknown)} of a bucket must be in the plan's tensors.")
        # Tensors are matched by name, since indices may have changed since the plan was made.
        buckets = tuple(
            bucket_of([(matched[index], *span) for index, *span in parts], world_size)
            for parts in data["buckets"]
        )
        # Plans of earlier versions have neither all-reduced nor uncompressed buckets.
        orders = (tuple(data.get(order, ())) for order in _ORDERS)
        plan = cls(data["name"], world_size, buckets, *orders)
        check_plan(plan, tensors)
        return plan


def check_plan(plan: BucketPlan, tensors: Specs) -> None:
    """Refuses a plan that does not hold every element of `tensors` exactly once, in order.

    A tensor that is cut must go on at the beginning of the next bucket of its family.

    Raises:
        ValueError: If the plan is wrong; the message names the tensor or the order.
    """
    reached = {tensor.index: 0 for tensor in tensors}
    filled_by: dict[str, int | None] = {}
    families = {tensor.index: tensor.family for tensor in tensors}
    for bucket in plan.buckets:
        if {families[part.tensor] for part in bucket.slices} != {bucket.family}:
            raise ValueError("Tensors of a plan's bucket must have one dtype and compressor.")
        for number, part in enumerate(bucket.slices):
            continues = number == 0 and filled_by.get(bucket.family) == part.tensor
            is_next = part.start == reached[part.tensor] < part.stop
            if not is_next or (part.start > 0 and not continues):
                raise ValueError(f"A plan must hold tensor {part.tensor} once, in order, unbroken.")
            reached[part.tensor] = part.stop
        last = bucket.slices[-1]
        # Padding at the end of this bucket would separate the parts of a tensor that is cut here.
        is_full = last.offset + last.numel == bucket.padded_numel
        filled_by[bucket.family] = last.tensor if is_full else None
    for tensor in tensors:
        if reached[tensor.index] != tensor.numel:
            raise ValueError(f"The plan must hold all elements of {tensor.name}.")
    numbers = list(range(len(plan.buckets)))
    if sorted(plan.reduce_order) != numbers:
        raise ValueError("The plan's reduce_order must name every bucket once.")
    if len(set(plan.early)) < len(plan.early) or not set(plan.early) <= set(plan.reduce_order[:-1]):
        raise ValueError("The plan's early buckets must differ and not be reduced last.")
    for kind in ("all_reduced", "uncompressed"):
        named = getattr(plan, kind)
        if list(named) != sorted(set(named)) or not set(named) <= set(numbers):
            raise ValueError(f"The plan's {kind} must be bucket numbers, once and in order.")
    if not set(plan.all_reduced).isdisjoint(plan.early):
        raise ValueError(
            "A bucket of the plan is in both early and all_reduced. Only one of them may hold it."
        )


def _matched(saved: Sequence[Any], tensors: Specs) -> dict[int, TensorSpec]:
    """Returns saved index -> the tensor of the same name; refuses a plan for other tensors."""
    names = {tensor.name: tensor for tensor in tensors}
    matched = {}
    for index, name, numel, itemsize in saved:
        if name not in names:
            raise ValueError(f"The plan can be used only for a model with a parameter {name}.")
        tensor = names.pop(name)
        if (tensor.numel, tensor.itemsize) != (numel, itemsize):
            raise ValueError(
                f"The plan can be used only for a model in which {name} has {numel} elements of"
                f" {itemsize} bytes, here {tensor.numel} of {tensor.itemsize}."
            )
        matched[index] = tensor
    if names:
        raise ValueError(f"The plan lacks {next(iter(names))} of this model, which it must hold.")
    return matched


def reduce_order(buckets: Sequence[BucketSpec], tensors: Specs) -> tuple[int, ...]:
    """Returns bucket numbers by the time of the last gradient; buckets that lack one go last."""
    ready = {tensor.index: tensor.ready for tensor in tensors}

    def last_gradient(number: int) -> tuple[float, int]:
        times = [ready[part.tensor] for part in buckets[number].slices]
        return max(float("inf") if time is None else time for time in times), -number

    return tuple(sorted(range(len(buckets)), key=last_gradient))


def distinct(plans: Iterable[BucketPlan]) -> list[BucketPlan]:
    """Returns the plans without those that differ from an earlier one only in their names."""
    kept: dict[BucketPlan, BucketPlan] = {}
    for plan in plans:
        kept.setdefault(replace(plan, name=""), plan)
    return list(kept.values())


def with_whole_tensors(plan: BucketPlan, tensors: Specs) -> BucketPlan:
    """Returns `plan` with a bucket of its own for every tensor that `plan` cuts. Pure.

    For optimizers that must see whole tensors. The tensors before a cut one in its bucket stay
    together, and so do the tensors after it. No bucket is early or all-reduced. A new bucket is
    uncompressed if the bucket in which its tensors began was.

    Args:
        plan: Plan over `tensors`; not changed.
        tensors: Tensors with their sizes and the order of their gradients.
    """
    num_parts = Counter(part.tensor for bucket in plan.buckets for part in bucket.slices)
    if max(num_parts.values(), default=1) == 1:
        return replace(plan, early=(), all_reduced=())
    by_index = {tensor.index: tensor for tensor in tensors}

    def cut_tensor(part: Slice) -> int | None:
        return part.tensor if num_parts[part.tensor] > 1 else None

    buckets: list[BucketSpec] = []
    uncompressed: list[int] = []
    for number, bucket in enumerate(plan.buckets):
        # Each run is a part of one cut tensor, or several tensors that lie in this bucket alone.
        for _, run in groupby(bucket.slices, cut_tensor):
            # The whole cut tensor goes where its first part was; later parts are left out.
            members = [by_index[part.tensor] for part in run if part.start == 0]
            if not members:
                continue
            if number in plan.uncompressed:
                uncompressed.append(len(buckets))
            ranges = [(tensor, 0, tensor.numel) for tensor in members]
            buckets.append(bucket_of(ranges, plan.world_size))
    name, order = f"{plan.name}, no tensor cut", reduce_order(buckets, tensors)
    return BucketPlan(name, plan.world_size, tuple(buckets), order, (), (), tuple(uncompressed))


def save_plan(path: str | Path, plan: BucketPlan, tensors: Specs) -> None:
    """Writes `plan`, over `tensors`, as a JSON file that `FixedPlan` reads. Local."""
    Path(path).write_text(json.dumps(plan.to_dict(tensors)) + "\n")


class FixedPlan:
    """Planner that uses a plan made before, for the same model and the same number of ranks.

    Args:
        path_or_plan: File written by `save_plan`, or the plan itself. Every rank reads the file
            when training has recorded its first step.
    """

    def __init__(self, path_or_plan: str | Path | BucketPlan) -> None:
        self.path_or_plan = path_or_plan

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan, matched to `tensors`: see `FusionPlanner`.

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
            raise ValueError(
                f"{Path(plan)} holds no plan for this training. Train this model on {world_size}"
                " rank(s) with another fusion, call trainer.strategy.save_plan(path) after the"
                f" fit's first step, and give FixedPlan that file. {error}"
            ) from None
