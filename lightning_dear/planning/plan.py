"""Plans: which elements of which tensor lie in which bucket, and the orders of the buckets."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
"""Version of the format that `BucketPlan.to_dict` writes and `from_dict` reads."""

_FIELDS = {"name", "world_size", "tensors", "buckets", "reduce_order"}
_ORDERS = ("reduce_order", "all_reduced", "uncompressed")

MAX_BUCKETS = 1 << 12
"""Most buckets of one optimizer; training refuses a plan with more. The message tags of two
optimizers are at least this far apart, so that no two buckets share a tag."""

ALIGNMENT = 64
"""In a bucket, tensors begin at multiples of this many elements, and so do shards. torch's fused
CPU kernels compute the last few elements of a tensor by other instructions than all elements before
them. Without alignment, an update's last bits would depend on where shards are cut."""


def aligned(numel: int, multiple: int = ALIGNMENT) -> int:
    """Returns `numel`, rounded up to a multiple of `multiple`."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """Describes one parameter for planners, as recorded in the first step of training.

    Attributes:
        index: Index of the parameter among the trained parameters of its optimizer.
        name: Qualified name of the parameter in the module.
        numel: Number of elements of the parameter.
        itemsize: Bytes of one element of the parameter.
        family: Key made of dtype, type of device and codec. Tensors of different families never
            share a bucket.
        first_use: Place of the parameter, from 0, in the order in which the recorded forward first
            read parameters. None means that the forward did not read it.
        ready: Place of the parameter, from 0, in the order in which the recorded backward made
            gradients. None means that it got no gradient.
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
    """Describes the part of one tensor, or the whole tensor, that lies in a bucket.

    Attributes:
        tensor: `TensorSpec.index` of the tensor.
        start: Index in the flattened tensor of the first element of the slice.
        stop: Index in the flattened tensor of the first element after the slice.
        offset: Index in the bucket of the first element of the slice.
    """

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Returns the number of elements of the slice."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketSpec:
    """Describes one bucket: slices of tensors, with padding between them and at the end.

    Padding makes every slice begin at a multiple of ALIGNMENT, and all ranks' shards equally long.

    Attributes:
        family: Family of all tensors in the bucket: see `TensorSpec`.
        slices: Slices that lie in the bucket, in the order of their offsets.
        padded_numel: Number of elements, padding included; a multiple of ALIGNMENT x world_size.
        itemsize: Bytes of one uncompressed element.
    """

    family: str
    slices: tuple[Slice, ...]
    padded_numel: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Returns the number of elements of the bucket without padding."""
        return sum(part.numel for part in self.slices)

    @property
    def nbytes(self) -> int:
        """Returns the uncompressed size of the bucket in bytes, padding included."""
        return self.padded_numel * self.itemsize

    @property
    def stepped_bytes(self) -> int:
        """Returns the bytes that the optimizer steps: the size of the bucket without padding.

        Planners divide the measured time of the optimizer step among buckets in proportion to this
        size. So the step of a tensor costs the same in every plan, however much padding the plan
        has.
        """
        return self.numel * self.itemsize


Part = tuple[TensorSpec, int, int]
"""(tensor, start, stop): a tensor, and the range [start, stop) of its flattened elements that lies
in a bucket."""


def bucket_of(ranges: Sequence[Part], world_size: int) -> BucketSpec:
    """Returns a bucket that holds `ranges` in the given order, each at a multiple of ALIGNMENT.

    Raises:
        ValueError: If `ranges` is empty, or its tensors differ in their family.
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
    # All shards are equally long, and begin at multiples of ALIGNMENT.
    padded_numel = aligned(filled, ALIGNMENT * world_size)
    return BucketSpec(families.pop(), tuple(slices), padded_numel, ranges[0][0].itemsize)


@dataclass(frozen=True)
class BucketPlan:
    """Says which tensors share a bucket, and in which orders buckets are reduced and gathered.

    A bucket's number is its index in `buckets`. Buckets are stepped and gathered in the order of
    their numbers, except for those in `all_reduced`. Buckets of one family follow each
    other in one flat buffer, so that a tensor that is cut between two buckets stays contiguous.

    Attributes:
        name: Description of the plan for people, such as the planner and its options.
        world_size: Number of ranks that the plan was made for.
        buckets: Buckets in the order in which forward first reads them.
        reduce_order: Numbers of all buckets, in the order in which backward fills the buckets and
            their reductions are launched.
        all_reduced: Numbers, ascending, of the buckets that are all-reduced during backward. Every
            rank steps such a bucket whole, and it is never gathered. At world size 1 the buckets
            named here are treated like all others.
        uncompressed: Numbers, ascending, of the buckets that travel uncompressed although the
            training has a compressor.
    """

    name: str
    world_size: int
    buckets: tuple[BucketSpec, ...]
    reduce_order: tuple[int, ...]
    all_reduced: tuple[int, ...] = ()
    uncompressed: tuple[int, ...] = ()

    @cached_property
    def gather_order(self) -> tuple[int, ...]:
        """Returns the numbers of the buckets that are gathered, in the order of their gathers.

        That is the order of their numbers. All-reduced buckets are left out.
        """
        return tuple(n for n in range(len(self.buckets)) if n not in self.all_reduced)

    @property
    def padded_numel(self) -> int:
        """Returns the number of elements of all buckets together, padding included."""
        return sum(bucket.padded_numel for bucket in self.buckets)

    @property
    def fill(self) -> float:
        """Returns the share of all buckets' elements that is not padding, 0..1.

        Returns 0 if there are no buckets.
        """
        return sum(bucket.numel for bucket in self.buckets) / max(self.padded_numel, 1)

    @property
    def all_reduced_share(self) -> float:
        """Returns the share of all elements, without padding, in all-reduced buckets, 0..1."""
        numel = sum(self.buckets[number].numel for number in self.all_reduced)
        return numel / max(sum(bucket.numel for bucket in self.buckets), 1)

    def has_buckets_of(self, other: "BucketPlan") -> bool:
        """Tells whether the two plans are equal except for their names."""
        return self == replace(other, name=self.name)

    def to_dict(self, tensors: Specs) -> dict[str, Any]:
        """Returns the plan as a dict that JSON can hold, with the names and sizes of `tensors`.

        `from_dict` reads it. Offsets and padding are not in it, since `from_dict` computes them.

        Args:
            tensors: Tensors that the plan was made for.
        """
        slices = [bucket.slices for bucket in self.buckets]
        buckets = [[[part.tensor, part.start, part.stop] for part in parts] for parts in slices]
        return {
            "version": FORMAT_VERSION,
            "name": self.name,
            "world_size": self.world_size,
            "tensors": [[t.index, t.name, t.numel, t.itemsize] for t in tensors],
            "buckets": buckets,
            **{order: list(getattr(self, order)) for order in _ORDERS},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], tensors: Specs, world_size: int) -> "BucketPlan":
        """Returns the plan that `to_dict` has written, with the indices of the present `tensors`.

        Saved tensors are matched to `tensors` by name, since a tensor's index may have changed.

        Args:
            data: Dict that `to_dict` returned, perhaps in an earlier run.
            tensors: Tensors of the present training.
            world_size: Number of ranks of the present training.

        Raises:
            ValueError: If `data` is not a plan of this format version, or a plan for another number
                of ranks or for other tensors (the message names one that differs), or if
                `check_plan` refuses the plan.
        """
        if not isinstance(data, dict) or data.get("version") != FORMAT_VERSION:
            raise ValueError(f"This is no plan of format version {FORMAT_VERSION}. It must be one.")
        if missing := _FIELDS - data.keys():
            raise ValueError(f"The plan lacks {', '.join(sorted(missing))}. It must have these.")
        if (ranks := data["world_size"]) != world_size:
            raise ValueError(f"The plan was made for {ranks} ranks, and there are {world_size}.")
        # Tensors are matched by name, since indices may have changed since the plan was made.
        matched = _matched(data["tensors"], tensors)
        if unknown := {part[0] for parts in data["buckets"] for part in parts} - matched.keys():
            raise ValueError(f"Tensor {min(unknown)} of a bucket must be in the plan's tensors.")
        ranges = [[(matched[index], *span) for index, *span in parts] for parts in data["buckets"]]
        buckets = tuple(bucket_of(own, world_size) for own in ranges)
        if data.get("early"):
            warnings.warn(
                f"The plan gathers {len(data['early'])} buckets during backward. That gained too"
                " little and is not done any more: they are gathered after the step.",
                stacklevel=2,
            )
        # Plans that earlier versions wrote lack the keys "all_reduced" and "uncompressed".
        orders = (tuple(data.get(order, ())) for order in _ORDERS)
        plan = cls(data["name"], world_size, buckets, *orders)
        check_plan(plan, tensors)
        return plan


def check_plan(plan: BucketPlan, tensors: Specs) -> None:
    """Refuses a plan that does not hold every element of `tensors` exactly once, in order.

    A tensor that is cut must go on at the beginning of the next bucket of its family, without
    padding at the cut. The plan's lists of bucket numbers are checked, too: see `BucketPlan`.

    Raises:
        ValueError: If the plan is wrong; the message names the tensor or the list.
        KeyError: If a slice has a tensor index that is not in `tensors`.
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
        # A tensor cannot go on in the next bucket if padding at the end of this bucket would
        # separate its two slices in the flat buffer.
        is_full = last.offset + last.numel == bucket.padded_numel
        filled_by[bucket.family] = last.tensor if is_full else None
    for tensor in tensors:
        if reached[tensor.index] != tensor.numel:
            raise ValueError(f"The plan must hold all elements of {tensor.name}.")
    numbers = list(range(len(plan.buckets)))
    if sorted(plan.reduce_order) != numbers:
        raise ValueError("The plan's reduce_order must name every bucket once.")
    for kind in ("all_reduced", "uncompressed"):
        named = getattr(plan, kind)
        if list(named) != sorted(set(named)) or not set(named) <= set(numbers):
            raise ValueError(f"The plan's {kind} must be bucket numbers, once and in order.")


def _matched(saved: Sequence[Any], tensors: Specs) -> dict[int, TensorSpec]:
    """Returns a dict from each saved tensor's index to the tensor of the same name in `tensors`.

    Args:
        saved: Saved tensors, each as [index, name, number of elements, bytes of an element].
        tensors: Tensors of the present training.

    Raises:
        ValueError: If the names, or the sizes of two tensors of the same name, differ.
    """
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
    """Returns all bucket numbers, in the order in which the buckets' last gradients come.

    A bucket with a tensor that got no gradient in the recorded step comes after all others. Of such
    buckets, and of equal times, the higher number comes first.
    """
    ready = {t.index: float("inf") if t.ready is None else t.ready for t in tensors}

    def last_gradient(number: int) -> tuple[float, int]:
        return max(ready[part.tensor] for part in buckets[number].slices), -number

    return tuple(sorted(range(len(buckets)), key=last_gradient))


def distinct(plans: Iterable[BucketPlan]) -> list[BucketPlan]:
    """Returns the plans, without each plan that equals an earlier plan in all but its name."""
    kept: dict[BucketPlan, BucketPlan] = {}
    for plan in plans:
        kept.setdefault(replace(plan, name=""), plan)
    return list(kept.values())


def with_whole_tensors(plan: BucketPlan, tensors: Specs) -> BucketPlan:
    """Returns `plan` with a separate bucket for every tensor that `plan` cuts. Pure.

    For optimizers that must see whole tensors. In a bucket that holds a slice of a cut tensor, the
    whole tensors before that slice stay together, and so do the whole tensors after it. No bucket
    of the result is all-reduced, even if no tensor was cut. A bucket of the result is
    uncompressed if the bucket in which its tensors began was uncompressed.

    Args:
        plan: Plan over `tensors`; not changed.
        tensors: All tensors of `plan`, with their sizes and the order of their gradients.
    """
    num_parts = Counter(part.tensor for bucket in plan.buckets for part in bucket.slices)
    if max(num_parts.values(), default=1) == 1:
        return replace(plan, all_reduced=())
    by_index = {tensor.index: (tensor, 0, tensor.numel) for tensor in tensors}

    def cut_tensor(part: Slice) -> int | None:
        return part.tensor if num_parts[part.tensor] > 1 else None

    buckets: list[BucketSpec] = []
    uncompressed: list[int] = []
    for number, bucket in enumerate(plan.buckets):
        # Each run is a slice of one cut tensor, or several tensors that lie whole in this bucket.
        for _, run in groupby(bucket.slices, cut_tensor):
            # The whole cut tensor goes where its first slice was; its later slices are left out.
            if not (ranges := [by_index[part.tensor] for part in run if part.start == 0]):
                continue
            if number in plan.uncompressed:
                uncompressed.append(len(buckets))
            buckets.append(bucket_of(ranges, plan.world_size))
    name, order = f"{plan.name}, no tensor cut", reduce_order(buckets, tensors)
    return BucketPlan(name, plan.world_size, tuple(buckets), order, (), tuple(uncompressed))


def save_plan(path: str | Path, plan: BucketPlan, tensors: Specs) -> None:
    """Writes `plan`, which was made for `tensors`, to a JSON file that `FixedPlan` reads. Local.

    Overwrites the file. `path` should differ from rank to rank, or only one rank should call this.
    """
    Path(path).write_text(json.dumps(plan.to_dict(tensors)) + "\n")


class FixedPlan:
    """Planner that returns a given plan, made before for the same model and number of ranks.

    Args:
        path_or_plan: File that `save_plan` wrote, or the plan itself. Every rank reads the file, at
            the end of the first step (the recorded step).
    """

    def __init__(self, path_or_plan: str | Path | BucketPlan) -> None:
        self.path_or_plan = path_or_plan

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the given plan, with the tensors' present indices: see `FusionPlanner`.

        Tensors of a plan from a file are matched by name. A plan that was given as an object is
        taken to have the present indices.

        Raises:
            ValueError: If the plan is for another model or another number of ranks, or damaged.
            OSError: If the file cannot be read.
        """
        plan, where = self.path_or_plan, ""
        try:
            if isinstance(plan, BucketPlan):
                return BucketPlan.from_dict(plan.to_dict(tensors), tensors, world_size)
            where = f"{Path(plan)}: "
            return BucketPlan.from_dict(json.loads(Path(plan).read_text()), tensors, world_size)
        except ValueError as error:
            raise ValueError(
                f"{where}{error} Make the plan again: train this model on {world_size} rank(s) with"
                " another fusion, and call trainer.strategy.save_plan(path) after the fit's first"
                " step."
            ) from None
