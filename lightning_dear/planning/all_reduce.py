"""Chooses the buckets that are all-reduced: stepped whole by every rank, and never gathered.

A bucket that is all-reduced sends everything in backward, in one exchange instead of two. That pays
where backward leaves the link idle and early gathers are not allowed, where starts are what costs,
and where the backend's all-reduce is cheaper than both our halves. The price: its optimizer state
is whole on every rank, and so is the work of stepping it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from lightning_dear.planning.early import choose_early
from lightning_dear.planning.fusion import MIB, fuse_groups, runs_of
from lightning_dear.planning.measured import LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.predict import StepModel

_MIN_GAIN = 1e-2
"""Share of the step that must be gained for more state."""

_MAX_TRIALS = 24
"""Steps predicted for one order of buckets; of longer ones not every beginning is tried."""

_DDP_CAPS_BYTES = 1 * MIB, 25 * MIB


def choose_all_reduce(
    plan: BucketPlan,
    tensors: Sequence[TensorSpec],
    times: ModelTimes,
    link: LinkCost,
    max_share: float,
) -> BucketPlan:
    """`plan` with `all_reduced` set to what `predict` says makes the step shortest.

    Tried are the beginnings of three orders: the first to be reduced first, which moves gathers
    from forward into backward; the last first, for which the step and forward wait; the smallest
    first, which saves the most starts. Of choices that are (nearly) as good as any, the one with
    the least elements is kept; none if none gains anything, or is allowed. Early buckets are
    chosen anew if that is better still.

    Args:
        plan: Over `tensors`; its early buckets stay early unless they are all-reduced.
        tensors: What it is made of.
        times: Of a step with sharded buckets.
        link: What exchanges cost.
        max_share: Most of all elements that may be all-reduced, 0..1.
    """
    plan = replace(plan, all_reduced=())
    if plan.world_size == 1 or not times.allows_all_reduce:
        return plan

    step_s = StepModel(tensors, plan.world_size, times, link).step_s
    numel = [bucket.numel for bucket in plan.buckets]
    tried: dict[tuple[int, ...], float] = {(): step_s(plan)}
    by_size = sorted(plan.reduce_order, key=lambda number: numel[number])
    for order in (plan.reduce_order, plan.reduce_order[::-1], by_size):
        fitting = _fitting(order, numel, max_share * sum(numel))
        size = -(-len(fitting) // _MAX_TRIALS) or 1
        for count in (*range(size, len(fitting), size), len(fitting)):
            chosen = tuple(sorted(fitting[:count]))
            if chosen not in tried:
                tried[chosen] = step_s(_with(plan, chosen))
    enough_s = min(tried.values()) + _MIN_GAIN * tried[()]
    most_s = (1 - _MIN_GAIN) * tried[()]
    good = [
        chosen
        for chosen, seconds in tried.items()
        if seconds <= enough_s and (not chosen or seconds <= most_s)
    ] or [()]
    best = _with(plan, min(good, key=lambda chosen: sum(numel[number] for number in chosen)))
    if not (best.all_reduced and plan.early):
        return best
    # Another choice of early gathers may have become better, or none to be needed.
    return min(best, choose_early(best, tensors, times, link), key=step_s)


def _fitting(order: Iterable[int], numel: Sequence[int], budget: float) -> list[int]:
    """What fits into the budget, of the first ones first."""
    chosen, used = [], 0
    for number in order:
        # A smaller one later on may still fit.
        if used + numel[number] <= budget:
            chosen.append(number)
            used += numel[number]
    return chosen


def _with(plan: BucketPlan, chosen: tuple[int, ...]) -> BucketPlan:
    early = tuple(number for number in plan.early if number not in chosen)
    return replace(plan, all_reduced=chosen, early=early)


def everything_all_reduced(
    tensors: Sequence[TensorSpec], world_size: int, divisor: int = 1
) -> BucketPlan:
    """DDP's exchange: buckets of 25 MiB in the order of the gradients, the first of 1 MiB.

    A bucket is closed by the tensor with which it reaches its cap; no tensor is cut. Both caps are
    divided by `divisor`.
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
