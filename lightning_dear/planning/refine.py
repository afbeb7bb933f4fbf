"""Chooses which buckets of a plan are gathered in backward, and which are all-reduced.

Early gathers use the time in which backward leaves the link idle.

A bucket that is all-reduced is stepped whole by every rank, and never gathered: it sends everything
in backward, in one exchange instead of two. That pays where backward leaves the link idle and early
gathers are not allowed, where starts are what costs, and where the backend's all-reduce is cheaper
than both our halves. The price: its optimizer state is whole on every rank, and so is the work of
stepping it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from lightning_dear.planning.fusion import MIB, fuse_groups, runs_of
from lightning_dear.planning.measured import LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, Specs
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.step import ALL_GATHER

_MIN_EARLY_GAIN = 1e-3
"""Share of the step below which an early gather is not worth its second buffer."""

_MIN_WHOLE_GAIN = 1e-2
"""Share of the step that must be gained for more state."""

_MAX_TRIALS = 24
"""Steps predicted for one order of buckets; of longer ones not every beginning is tried."""

_DDP_CAPS_BYTES = 1 * MIB, 25 * MIB


def choose_early(plan: BucketPlan, tensors: Specs, times: ModelTimes, link: LinkCost) -> BucketPlan:
    """Returns `plan` with `early` set: gathers while backward leaves the link idle.

    Whenever the link would stand still before the next reduce-scatter, of the buckets reduced so
    far the one is chosen that forward needs first of those whose gather delays the last
    reduce-scatter by nothing (others may move). No sooner: where the link has a little time left
    throughout backward, early buckets from all over the model help most, because forward then finds
    one among every few, and compute catches up with the gathers of the others. (This decides which;
    each is launched as soon as it is reduced.)
    Neither the last bucket to be reduced nor one that is all-reduced is ever early. Of this list
    the shortest beginning is kept that `predict` finds (nearly) as good as any; none if it gains
    nothing, or is not allowed.
    """
    plan = replace(plan, early=())
    model = StepModel(tensors, plan.world_size, times, link)
    chosen = fitting(plan, model) if times.allows_early else ()
    tried = ((), *_beginnings(chosen))
    steps_s = {early: model.step_s(replace(plan, early=early)) for early in tried}
    enough_s = min(steps_s.values()) + _MIN_EARLY_GAIN * steps_s[()]
    return replace(plan, early=next(e for e, step_s in steps_s.items() if step_s <= enough_s))


def _beginnings(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The first few of `numbers`, more and more of them up to all."""
    size = -(-len(numbers) // _MAX_TRIALS) or 1
    return [tuple(numbers[:count]) for count in (*range(size, len(numbers), size), len(numbers))]


def fitting(plan: BucketPlan, model: StepModel) -> tuple[int, ...]:
    """Returns gathers that fit between the reduce-scatters of a plan; see `choose_early`."""
    gather_s = [model.link.all_gather_s(one.nbytes, plan.world_size) for one in plan.buckets]
    spans = [span for span in model.predict(plan).spans if span.lane != ALL_GATHER]
    chosen: list[int] = []
    reduced: set[int] = set()
    free_s = launched_s = 0.0
    # When each of them may begin at the latest so that the last one is in time.
    earlier_s = [span.begin_s - span.end_s for span in spans[-2::-1]]
    limits_s = list(accumulate(earlier_s, initial=spans[-1].begin_s))[::-1]
    for span, limit_s in zip(spans, limits_s, strict=True):
        launched_s = max(launched_s, model.times.ready_of(plan.buckets[span.bucket]))
        while free_s < launched_s:
            fits = [one for one in reduced if free_s + gather_s[one] <= limit_s]
            if not fits:
                break
            # Buckets are numbered in the order in which forward needs them.
            first = min(fits)
            chosen.append(first)
            reduced.remove(first)
            free_s += gather_s[first]
        free_s = max(free_s, launched_s) + (span.end_s - span.begin_s)
        if span.bucket not in plan.all_reduced:
            reduced.add(span.bucket)
    return tuple(chosen)


def choose_all_reduce(
    plan: BucketPlan, tensors: Specs, times: ModelTimes, link: LinkCost, max_share: float
) -> BucketPlan:
    """Returns `plan` with `all_reduced` set to what `predict` says makes the step shortest.

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
        for beginning in _beginnings(_affordable(order, numel, max_share * sum(numel))):
            chosen = tuple(sorted(beginning))
            if chosen not in tried:
                tried[chosen] = step_s(_with(plan, chosen))
    enough_s = min(tried.values()) + _MIN_WHOLE_GAIN * tried[()]
    most_s = (1 - _MIN_WHOLE_GAIN) * tried[()]
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


def _affordable(order: Iterable[int], numel: Sequence[int], budget: float) -> list[int]:
    """What is within the budget, of the first ones first."""
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


def everything_all_reduced(tensors: Specs, world_size: int, divisor: int = 1) -> BucketPlan:
    """Returns DDP's exchange: buckets of 25 MiB in gradient order, the first of 1 MiB.

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
