"""Chooses which buckets of a plan are all-reduced.

An all-reduced bucket is stepped whole by every rank and never gathered: all of its communication is
in backward, in one collective instead of two. That gains time in three cases: the link is idle
during backward; starting collectives takes longer than sending their bytes; or the backend's
all-reduce is cheaper than a reduce-scatter and an all-gather. The price is that every rank has the
whole optimizer state of the bucket, and steps the whole bucket.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from lightning_dear.planning.fusion import MIB, fuse_groups, runs_of
from lightning_dear.planning.plan import BucketPlan, Specs
from lightning_dear.planning.predict import StepModel

_MIN_WHOLE_GAIN = 1e-2
"""Buckets are all-reduced only if the step gets shorter by this share or more, since they need more
optimizer state. If predicted steps differ by this share or less, the choice with the fewest
all-reduced elements is kept."""

_MAX_TRIALS = 24
"""Most beginnings of one list of buckets for which a step is predicted. If the list is longer, not
every beginning of it is tried."""

_DDP_CAPS_BYTES = 1 * MIB, 25 * MIB
"""(DistributedDataParallel's cap of its first bucket, its cap of all other buckets)."""


def _beginnings(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns at most `_MAX_TRIALS` beginnings of `numbers`, shortest first; the last is all."""
    size = -(-len(numbers) // _MAX_TRIALS) or 1
    return [tuple(numbers[:count]) for count in (*range(size, len(numbers), size), len(numbers))]


def choose_all_reduce(plan: BucketPlan, model: StepModel, max_share: float) -> BucketPlan:
    """Returns `plan` with `all_reduced` set to the buckets that make the predicted step shortest.

    Sets of buckets are tried that are beginnings of three orders:

    - the reduce order: moves communication of buckets that are reduced first into backward;
    - the opposite order: the optimizer step and forward wait for the buckets reduced last;
    - by size, smallest first: saves the most starts of collectives for its elements.

    The set with the fewest elements is kept whose step is at most 1 % longer than with the best
    set. No bucket is all-reduced if no set makes the step 1 % shorter, at world size
    1, or if the model's times do not allow it. Pure.

    Args:
        plan: Plan over the model's tensors.
        model: Training that is planned for, without a codec.
        max_share: Largest share of all elements that may be all-reduced, 0..1.
    """
    plan = replace(plan, all_reduced=())
    if plan.world_size == 1 or not model.times.allows_all_reduce:
        return plan
    numel = [bucket.numel for bucket in plan.buckets]
    tried: dict[tuple[int, ...], float] = {(): model.step_s(plan)}
    by_size = sorted(plan.reduce_order, key=lambda number: numel[number])
    for order in (plan.reduce_order, plan.reduce_order[::-1], by_size):
        for beginning in _beginnings(_affordable(order, numel, max_share * sum(numel))):
            chosen = tuple(sorted(beginning))
            if chosen not in tried:
                tried[chosen] = model.step_s(replace(plan, all_reduced=chosen))
    enough_s = min(tried.values()) + _MIN_WHOLE_GAIN * tried[()]
    most_s = (1 - _MIN_WHOLE_GAIN) * tried[()]
    good = [
        chosen
        for chosen, seconds in tried.items()
        if seconds <= enough_s and (not chosen or seconds <= most_s)
    ] or [()]
    fewest = min(good, key=lambda chosen: sum(numel[number] for number in chosen))
    return replace(plan, all_reduced=fewest)


def _affordable(order: Iterable[int], numel: Sequence[int], budget: float) -> list[int]:
    """Returns the buckets of `order` that fit into a budget of elements.

    The buckets are considered in this order, and each is taken if the budget still has room for it.

    Args:
        order: Bucket numbers, in the order in which they are considered.
        numel: Elements of each bucket, by its number.
        budget: Most elements in sum.
    """
    chosen, used = [], 0
    for number in order:
        # A bucket that does not fit is skipped, since a smaller bucket after it may fit.
        if used + numel[number] <= budget:
            chosen.append(number)
            used += numel[number]
    return chosen


def everything_all_reduced(tensors: Specs, world_size: int, divisor: int = 1) -> BucketPlan:
    """Returns a plan with DDP's buckets, all of them all-reduced.

    DDP fills buckets in the order of gradients: the first until it has 1 MiB, and every other until
    it has 25 MiB (by family). So a bucket may be larger than its cap, by a part of its last tensor.
    No tensor is cut.

    Args:
        tensors: All tensors of one optimizer.
        world_size: Number of ranks.
        divisor: Number by which both caps are divided.
    """
    used = sorted((t for t in tensors if t.is_used), key=lambda t: (t.family, t.ready or 0))
    first_bytes, cap_bytes = (cap / divisor for cap in _DDP_CAPS_BYTES)
    groups = [
        [tensor.index for tensor in run]
        for _, family in groupby(used, key=lambda t: t.family)
        for run in runs_of(family, lambda t: t.nbytes, cap_bytes, first_bytes)
    ]
    name = "all-reduces with DDP's caps" + (f" / {divisor}" if divisor > 1 else "")
    plan = fuse_groups(name, tensors, world_size, groups)
    return replace(plan, all_reduced=tuple(range(len(plan.buckets))))
