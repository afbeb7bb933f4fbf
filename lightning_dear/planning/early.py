"""Chooses the buckets that are gathered while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.predict import PredictedSpan, bucket_bytes, predict, reduced_timeline
from lightning_dear.planning.times import ModelTimes

_MIN_GAIN = 1e-3
"""Share of the step below which an early gather is not worth its second buffer."""


def choose_early(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> BucketPlan:
    """`plan` with `early` set: gathers for the time in which backward leaves the link idle.

    A gap takes, of the buckets reduced so far, the one that forward needs first of those whose
    gather delays the last reduce-scatter by nothing (others may move). The last bucket to be
    reduced is never early. Of this list the shortest beginning is kept that `predict` finds
    (nearly) as good as any; none if it gains nothing.
    """
    plan = replace(plan, early=())
    fitting = _fitting(plan, tensors, times, link)
    steps_s = {
        count: predict(replace(plan, early=fitting[:count]), tensors, times, link).step_s
        for count in _counts(len(fitting))
    }
    enough_s = min(steps_s.values()) + _MIN_GAIN * steps_s[0]
    count = next(count for count, step_s in steps_s.items() if step_s <= enough_s)
    return replace(plan, early=fitting[:count])


def _counts(most: int) -> list[int]:
    """0 to `most`, the more apart the larger, for the time it takes to try them."""
    counts = [0]
    while counts[-1] < most:
        counts.append(min(counts[-1] + 1 + counts[-1] // 4, most))
    return counts


def _fitting(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> tuple[int, ...]:
    nbytes = bucket_bytes(plan, tensors)
    gather_s = [link.all_gather_s(size, plan.world_size) for size in nbytes]
    spans = reduced_timeline(plan, nbytes, times, link).spans
    latest_s = _latest_begins(spans)
    chosen: list[int] = []
    reduced: list[int] = []
    free_s = launched_s = 0.0
    for span, limit_s in zip(spans, latest_s, strict=True):
        launched_s = max(launched_s, times.ready_of(plan.buckets[span.bucket]))
        while free_s < launched_s:
            fits = [one for one in reduced if free_s + gather_s[one] <= limit_s]
            if not fits:
                break
            # Buckets are numbered in the order in which forward needs them.
            chosen.append(min(fits))
            reduced.remove(min(fits))
            free_s += gather_s[min(fits)]
        free_s = max(free_s, launched_s) + (span.end_s - span.begin_s)
        reduced.append(span.bucket)
    return tuple(chosen)


def _latest_begins(spans: Sequence[PredictedSpan]) -> list[float]:
    """When each of the reduce-scatters may begin at the latest so that the last one is in time."""
    latest_s = [span.begin_s for span in spans]
    for place in range(len(spans) - 2, -1, -1):
        duration_s = spans[place].end_s - spans[place].begin_s
        latest_s[place] = latest_s[place + 1] - duration_s
    return latest_s
