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

_MAX_TRIALS = 24
"""Steps predicted for one plan; longer lists are tried several buckets at a time."""


def choose_early(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> BucketPlan:
    """`plan` with `early` set: gathers for the time in which backward leaves the link idle.

    Before each reduce-scatter the link takes, of the buckets reduced so far, the one that forward
    needs first of those whose gather delays the last reduce-scatter by nothing (others may move).
    The last bucket to be reduced is never early. Of this list those are left out that make the
    predicted step longer, and of the rest the shortest beginning is kept that is (nearly) as good
    as all; none if it gains nothing.
    """

    def step_s(early: tuple[int, ...]) -> float:
        return predict(replace(plan, early=early), tensors, times, link).step_s

    fitting = _fitting(replace(plan, early=()), tensors, times, link)
    kept: tuple[int, ...] = ()
    steps_s = {kept: step_s(kept)}
    size = -(-len(fitting) // _MAX_TRIALS) or 1
    for start in range(0, len(fitting), size):
        longer = kept + fitting[start : start + size]
        longer_s = step_s(longer)
        if longer_s <= steps_s[kept]:
            kept = longer
            steps_s[kept] = longer_s
    enough_s = min(steps_s.values()) + _MIN_GAIN * steps_s[()]
    return replace(plan, early=next(one for one, time_s in steps_s.items() if time_s <= enough_s))


def _fitting(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> tuple[int, ...]:
    nbytes = bucket_bytes(plan, tensors)
    gather_s = [link.all_gather_s(size, plan.world_size) for size in nbytes]
    spans = reduced_timeline(plan, nbytes, times, link).spans
    chosen: list[int] = []
    reduced: dict[int, float] = {}
    free_s = launched_s = 0.0
    for span, limit_s in zip(spans, _latest_begins(spans), strict=True):
        launched_s = max(launched_s, times.ready_of(plan.buckets[span.bucket]))
        while fits := [
            one
            for one, end_s in reduced.items()
            if end_s < launched_s and free_s + gather_s[one] <= limit_s
        ]:
            # Buckets are numbered in the order in which forward needs them.
            chosen.append(min(fits))
            del reduced[min(fits)]
            free_s += gather_s[min(fits)]
        free_s = max(free_s, launched_s) + (span.end_s - span.begin_s)
        reduced[span.bucket] = free_s
    return tuple(chosen)


def _latest_begins(spans: Sequence[PredictedSpan]) -> list[float]:
    """When each of the reduce-scatters may begin at the latest so that the last one is in time."""
    latest_s = [span.begin_s for span in spans]
    for place in range(len(spans) - 2, -1, -1):
        duration_s = spans[place].end_s - spans[place].begin_s
        latest_s[place] = latest_s[place + 1] - duration_s
    return latest_s
