"""Planners with fixed rules, which need no measured times.

They make a bucket for each tensor, one bucket for all tensors, or buckets up to some size. (Tensors
of different families never share a bucket, nor do tensors with and without a gradient.) First-use
order is the order in which forward first reads tensors.
"""

import math
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from numbers import Real
from typing import Protocol, TypeVar

from lightning_dear.planning import plan as layout
from lightning_dear.planning.plan import BucketPlan, Part, Specs, TensorSpec

MIB = 1 << 20
"""Number of bytes of a MiB."""

_CAPS_PER_OCTAVE = 4
"""Caps that `ThresholdFusion.plans_of_caps` tries between a cap and twice that cap."""

T = TypeVar("T")


class FusionPlanner(Protocol):
    """Interface of planners, which decide which tensors share a bucket."""

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns a plan in which every element of every tensor lies in exactly one bucket. Pure.

        Args:
            tensors: All tensors of one optimizer, with the orders in which the recorded (first)
                step read them and made their gradients.
            world_size: Number of ranks.
        """


class ThresholdFusion:
    """Fuses tensors, in the order in which forward first reads them, into buckets up to a cap.

    The bucket nearest the model's input has a smaller cap: backward fills it last and forward reads
    it first, so that no computation hides its communication. A tensor that is larger than the cap
    is cut into slices of about equal size, at most the cap each. Padding is not counted in the cap.
    At world size 1 the caps do not apply.

    Args:
        bucket_cap_mb: Most MiB of a bucket. None means `default_cap_mb(world_size)`.
        first_bucket_cap_mb: Most MiB of the bucket nearest the input. A value above `bucket_cap_mb`
            means `bucket_cap_mb`.

    Raises:
        ValueError: If a cap is not positive.
    """

    name = "threshold"

    def __init__(
        self, *, bucket_cap_mb: float | None = None, first_bucket_cap_mb: float = 1.0
    ) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.first_bucket_cap_mb = first_bucket_cap_mb
        for option in ("bucket_cap_mb", "first_bucket_cap_mb"):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, Real) and float(value) > 0):
                raise ValueError(f"fusion={self.name!r}: {option} must be > 0 MiB, got {value!r}.")

    def caps_mb(self, world_size: int) -> tuple[float, float]:
        """Returns (cap of the bucket nearest the input, cap of all other buckets), both in MiB.

        These are the options, or their defaults for `world_size`.
        """
        cap_mb = default_cap_mb(world_size) if self.bucket_cap_mb is None else self.bucket_cap_mb
        return min(self.first_bucket_cap_mb, cap_mb), cap_mb

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan that the class describes: see `FusionPlanner`. Pure.

        The caps do not apply at world size 1, where there is no communication to overlap.
        """
        first_mb, cap_mb = self.caps_mb(world_size)
        name = f"threshold({cap_mb:g} MiB, first {first_mb:g} MiB)"
        caps = (first_mb * MIB, cap_mb * MIB) if world_size > 1 else (math.inf, math.inf)
        return _fuse(name, tensors, world_size, *caps)

    def plans_of_caps(
        self, tensors: Specs, world_size: int, least_mb: float, most_mb: float
    ) -> dict[float, BucketPlan]:
        """Returns a dict from caps in MiB to their plans, for caps spaced evenly on a log scale.

        The cap of the bucket nearest the input is the same in all plans, but never larger than the
        other cap. If several caps make the same buckets, only the smallest of these caps is
        returned. A cap that makes more than `MAX_BUCKETS` buckets is left out, except for
        `most_mb`.

        Args:
            tensors: All tensors of one optimizer.
            world_size: Number of ranks.
            least_mb: Smallest cap, MiB.
            most_mb: Largest cap, MiB.
        """
        num_steps = max(round(_CAPS_PER_OCTAVE * math.log2(most_mb / least_mb)), 1)
        first_mb, _ = self.caps_mb(world_size)
        plans: dict[float, BucketPlan] = {}
        for step in range(num_steps + 1):
            cap_mb = least_mb * (most_mb / least_mb) ** (step / num_steps)
            planner = ThresholdFusion(bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_mb)
            plan = planner.plan(tensors, world_size)
            is_possible = len(plan.buckets) <= layout.MAX_BUCKETS or step == num_steps
            if is_possible and not any(map(plan.has_buckets_of, plans.values())):
                plans[cap_mb] = plan
        return plans


def default_cap_mb(world_size: int) -> float:
    """Returns the default cap of a bucket in MiB: 4 for each rank, but at least 8 and at most 25.

    The cap grows with the world size because a bucket is cut into one message for each rank, and
    each message takes some time however small it is. 25 MiB is DistributedDataParallel's cap.
    """
    return min(max(4.0 * world_size, 8.0), 25.0)


class NoFusion:
    """Makes a bucket for every tensor ("without tensor fusion" in the DeAR paper)."""

    name = "none"

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns a plan with a separate bucket for every tensor: see `FusionPlanner`. Pure."""
        return fuse_groups(self.name, tensors, world_size, [[tensor.index] for tensor in tensors])


class SingleFusion:
    """Makes one bucket for each family of tensors, and another for tensors without a gradient.

    (Without a gradient in the recorded step, by family.) With one family that is the fewest
    messages, but no communication overlaps with computation.
    """

    name = "single"

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Returns the plan that the class describes: see `FusionPlanner`. Pure."""
        return _fuse(self.name, tensors, world_size, math.inf, math.inf)


def fuse_groups(
    name: str, tensors: Specs, world_size: int, groups: Iterable[Iterable[int]]
) -> BucketPlan:
    """Returns a plan with one bucket for each of `groups`. No tensor is cut. Pure.

    Tensors that are in no group, usually tensors without a gradient in the recorded step, get one
    more bucket for each family. They are not added to other buckets: a bucket with such a tensor is
    launched only when backward has ended, and the other gradients in it would wait for that.

    Args:
        name: Name of the plan.
        tensors: All tensors of one optimizer.
        world_size: Number of ranks.
        groups: Indices of the tensors of each bucket; no index may occur twice. In the bucket they
            are put into first-use order.

    Raises:
        ValueError: If the tensors of a group differ in their family.
    """
    by_index = {tensor.index: tensor for tensor in tensors}
    members = [[by_index.pop(index) for index in group] for group in groups]
    left = sorted(by_index.values(), key=lambda tensor: tensor.family)
    members += [list(family) for _, family in groupby(left, lambda tensor: tensor.family)]
    parts = [[(one, 0, one.numel) for one in sorted(group, key=use_key)] for group in members]
    return _plan_of(name, tensors, world_size, parts)


def _fuse(
    name: str, tensors: Specs, world_size: int, first_cap_bytes: float, cap_bytes: float
) -> BucketPlan:
    """Returns the plan of greedy fusion in first-use order; see `ThresholdFusion`.

    Tensors without a gradient in the recorded step share no bucket with other tensors: their bucket
    is launched only when backward has ended, and other gradients in it would wait for that.

    Args:
        name: Name of the plan.
        tensors: All tensors of one optimizer.
        world_size: Number of ranks.
        first_cap_bytes: Most bytes of the bucket nearest the input, of each family.
        cap_bytes: Most bytes of each other bucket.
    """
    in_order = sorted(tensors, key=lambda tensor: (tensor.family, *use_key(tensor)))
    unit = layout.ALIGNMENT * world_size
    buckets: list[list[Part]] = []
    for _, group in groupby(in_order, lambda tensor: (tensor.family, tensor.is_used)):
        # The first bucket of each group is the one nearest the input.
        bucket, filled, open_cap_bytes = list[Part](), 0, first_cap_bytes
        for tensor in group:
            if bucket and filled + tensor.numel > open_cap_bytes / tensor.itemsize:
                buckets.append(bucket)
                bucket, filled, open_cap_bytes = [], 0, cap_bytes
            caps = open_cap_bytes / tensor.itemsize, cap_bytes / tensor.itemsize
            for start, stop in _cuts(tensor.numel, *caps, unit):
                if start > 0:
                    buckets.append(bucket)
                    bucket, filled, open_cap_bytes = [], 0, cap_bytes
                bucket.append((tensor, start, stop))
                filled += layout.aligned(stop - start)
        buckets.append(bucket)
    return _plan_of(name, tensors, world_size, buckets)


def _plan_of(name: str, tensors: Specs, world_size: int, parts: list[list[Part]]) -> BucketPlan:
    """Returns a plan with a bucket for each of `parts`, in the order in which forward reads them.

    Args:
        name: Name of the plan.
        tensors: All tensors of one optimizer.
        world_size: Number of ranks.
        parts: Contents of each bucket, in first-use order.
    """
    # sorted() is stable, so that several buckets that begin in the same tensor keep their order.
    in_use_order = sorted(parts, key=lambda bucket: use_key(bucket[0][0]))
    buckets = tuple(layout.bucket_of(bucket, world_size) for bucket in in_use_order)
    return BucketPlan(name, world_size, buckets, layout.reduce_order(buckets, tensors))


def runs_of(
    items: Iterable[T], nbytes: Callable[[T], float], least: float, first_least: float | None = None
) -> list[list[T]]:
    """Cuts `items` into runs of consecutive items; a run ends once it has `least` bytes or more.

    Args:
        items: Items in their order.
        nbytes: Returns the size of an item in bytes.
        least: Fewest bytes of a run, except for the first and the last one.
        first_least: Fewest bytes of the first run, unless it is the last. None means `least`.
    """
    runs: list[list[T]] = []
    filled = 0.0
    for item in items:
        enough = least if first_least is None or len(runs) > 1 else first_least
        if not runs or filled >= enough:
            runs.append([])
            filled = 0.0
        runs[-1].append(item)
        filled += nbytes(item)
    return runs


def use_key(tensor: TensorSpec) -> tuple[bool, float, int]:
    """Returns the sort key of first-use order.

    Tensors without a gradient come last, and before them those that forward did not read.
    """
    first_use = float("inf") if tensor.first_use is None else tensor.first_use
    return not tensor.is_used, first_use, tensor.index


def _cuts(numel: int, first_cap: float, cap: float, unit: int) -> list[tuple[int, int]]:
    """Returns ranges [start, stop) that cover a tensor of `numel` elements.

    The tensor stays whole if it fits into `first_cap` or into `unit`. Otherwise the first range has
    at most `first_cap` elements, and the other ranges are of equal size, at most `cap` (but at
    least `unit`), except for the last one, which may be shorter. Every cut is at a multiple of
    `unit`, so that no padding separates the slices of the tensor.

    Args:
        numel: Number of elements of the tensor.
        first_cap: Most elements of the first range, which goes into the bucket being filled.
        cap: Most elements of every other range.
        unit: Number of elements of which a full bucket is a multiple.
    """
    if numel <= max(first_cap, unit):
        return [(0, numel)]
    # At least one unit, since a cap below one unit would otherwise make empty ranges.
    first = max(int(first_cap) // unit, 1) * unit
    num_parts = -(-(numel - first) // max(int(cap) // unit * unit, unit))
    size = layout.aligned(-(-(numel - first) // num_parts), unit)
    return list(pairwise([0, *range(first, numel, size), numel]))
