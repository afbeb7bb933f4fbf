"""Chooses the buckets that are gathered while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_dear.planning.measured import LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.step import ALL_GATHER, Carried

_MIN_GAIN = 1e-3
"""Share of the step below which an early gather is not worth its second buffer."""

_MAX_TRIALS = 24
"""Steps predicted for one plan; of longer lists not every beginning is tried."""


def choose_early(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> BucketPlan:
    """`plan` with `early` set: gathers for the time in which backward leaves the link idle.

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
    fitting = _fitting(plan, model) if times.allows_early else ()
    size = -(-len(fitting) // _MAX_TRIALS) or 1
    steps_s = {
        count: model.step_s(replace(plan, early=fitting[:count]))
        for count in (*range(0, len(fitting), size), len(fitting))
    }
    enough_s = min(steps_s.values()) + _MIN_GAIN * steps_s[0]
    count = next(count for count, step_s in steps_s.items() if step_s <= enough_s)
    return replace(plan, early=fitting[:count])


def _fitting(plan: BucketPlan, model: StepModel) -> tuple[int, ...]:
    gather_s = [model.link.all_gather_s(one.nbytes, plan.world_size) for one in plan.buckets]
    spans = [span for span in model.predict(plan).spans if span.lane != ALL_GATHER]
    chosen: list[int] = []
    reduced: set[int] = set()
    free_s = launched_s = 0.0
    for span, limit_s in zip(spans, _latest_begins(spans), strict=True):
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


def _latest_begins(spans: Sequence[Carried]) -> list[float]:
    """When each of the reduce-scatters may begin at the latest so that the last one is in time."""
    earlier_s = [span.begin_s - span.end_s for span in spans[-2::-1]]
    return list(accumulate(earlier_s, initial=spans[-1].begin_s))[::-1]
