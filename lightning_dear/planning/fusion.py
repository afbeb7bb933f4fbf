"""Fixed-rule planners: one bucket a tensor, one bucket in all, or buckets up to a threshold."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Protocol, TypeVar

from lightning_dear.planning import plan as layout
from lightning_dear.planning.plan import BucketPlan, Part, Specs, TensorSpec

MIB = 1 << 20

_CAPS_PER_OCTAVE = 4

T = TypeVar("T")


class FusionPlanner(Protocol):
    """Turns tensors into buckets."""

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """Assigns every element of every tensor to exactly one bucket; pure."""


class ThresholdFusion:
    """Fuses tensors in first-use order into buckets of at most `bucket_cap_mb`.

    The bucket nearest the input is smaller: it is the last to be reduced and the first to be read,
    so nothing hides its time. A tensor over the cap is cut into equal parts.

    Args:
        bucket_cap_mb: Cap of a bucket, MiB; None: `default_cap_mb` of the number of ranks.
        first_bucket_cap_mb: Cap of the bucket nearest the input, MiB; more than `bucket_cap_mb`
            counts as that much.

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
                raise ValueError(f"{option} must be > 0 MiB, got {value!r}.")

    def caps_mb(self, world_size: int) -> tuple[float, float]:
        """Returns the caps of the bucket nearest the input and of the others, MiB."""
        cap_mb = default_cap_mb(world_size) if self.bucket_cap_mb is None else self.bucket_cap_mb
        return min(self.first_bucket_cap_mb, cap_mb), cap_mb

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """See `FusionPlanner`. One rank has nothing to overlap: there the caps do not apply."""
        first_mb, cap_mb = self.caps_mb(world_size)
        name = f"threshold({cap_mb:g} MiB, first {first_mb:g} MiB)"
        caps = (first_mb * MIB, cap_mb * MIB) if world_size > 1 else ()
        return _fuse(name, tensors, world_size, *caps)

    def plans_of_caps(
        self, tensors: Specs, world_size: int, least_mb: float, most_mb: float
    ) -> dict[float, BucketPlan]:
        """Returns caps from `least_mb` to `most_mb`, evenly on a log scale, with their plans.

        The bucket nearest the input keeps its cap. Of caps that make the same buckets only the
        smallest is there, and of those that make more than possible none, but for the largest.
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
    """Returns 4 MiB for each rank, from 8 to 25 MiB.

    A bucket is cut into a message for every rank, whose overhead is the same however small it is;
    25 MiB is what DistributedDataParallel takes.
    """
    return min(max(4.0 * world_size, 8.0), 25.0)


class NoFusion:
    """Makes a bucket for every tensor (the paper's "without tensor fusion")."""

    name = "none"

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """See `FusionPlanner`."""
        return fuse_groups(self.name, tensors, world_size, [[tensor.index] for tensor in tensors])


class SingleFusion:
    """Makes one bucket for everything: no overlap at all, the fewest messages."""

    name = "single"

    def plan(self, tensors: Specs, world_size: int) -> BucketPlan:
        """See `FusionPlanner`."""
        return _fuse(self.name, tensors, world_size)


def fuse_groups(
    name: str, tensors: Specs, world_size: int, groups: Iterable[Iterable[int]]
) -> BucketPlan:
    """Makes a bucket for each of `groups` (tensor indices of one family); cuts no tensor.

    Tensors that no group names come last, one bucket a family; those are for tensors without a
    gradient, which may wait for the end of backward, and nothing else should wait with them.
    """
    by_index = {tensor.index: tensor for tensor in tensors}
    members = [[by_index.pop(index) for index in group] for group in groups]
    left: dict[str, list[TensorSpec]] = {}
    for tensor in by_index.values():
        left.setdefault(tensor.family, []).append(tensor)
    parts = [
        [(tensor, 0, tensor.numel) for tensor in sorted(group, key=use_key)]
        for group in (*members, *left.values())
    ]
    return _plan_of(name, tensors, world_size, parts)


def _fuse(
    name: str,
    tensors: Specs,
    world_size: int,
    first_cap_bytes: float = float("inf"),
    cap_bytes: float = float("inf"),
) -> BucketPlan:
    """Greedy fusion in first-use order; see `ThresholdFusion`.

    Tensors without a gradient in the recorded step get buckets of their own: they may wait for the
    end of backward, and nothing else should wait with them.
    """
    groups: dict[tuple[str, bool], list[TensorSpec]] = {}
    for tensor in sorted(tensors, key=use_key):
        groups.setdefault((tensor.family, tensor.is_used), []).append(tensor)
    unit = layout.ALIGNMENT * world_size
    buckets: list[list[Part]] = []
    for group in groups.values():
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


def _plan_of(
    name: str, tensors: Specs, world_size: int, parts: Iterable[Sequence[Part]]
) -> BucketPlan:
    """A plan with a bucket for each of `parts`, in the order in which forward reads them."""
    # Sorting keeps the order of the parts of one tensor.
    in_use_order = sorted(parts, key=lambda bucket: use_key(bucket[0][0]))
    buckets = tuple(layout.bucket_of(bucket, world_size) for bucket in in_use_order)
    return BucketPlan(name, world_size, buckets, layout.reduce_order(buckets, tensors))


def runs_of(
    items: Iterable[T], nbytes: Callable[[T], float], least: float, first_least: float | None = None
) -> list[list[T]]:
    """Returns consecutive items together, up to the one with which they have `least` bytes.

    The first run has `first_least`, if that is given.
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
    """Sorts tensors as forward first reads them; those without a gradient last."""
    first_use = float("inf") if tensor.first_use is None else tensor.first_use
    return not tensor.is_used, first_use, tensor.index


def _cuts(numel: int, first_cap: float, cap: float, unit: int) -> list[tuple[int, int]]:
    """Ranges that cover a tensor: whole if it fits, else a first part and equal parts after it.

    Every cut is at a multiple of `unit`, so that no padding separates the parts.
    """
    if numel <= max(first_cap, unit):
        return [(0, numel)]
    # A cap below one unit still has to make progress.
    first = max(int(first_cap) // unit, 1) * unit
    num_parts = -(-(numel - first) // max(int(cap) // unit * unit, unit))
    size = layout.aligned(-(-(numel - first) // num_parts), unit)
    return list(pairwise([0, *range(first, numel, size), numel]))
