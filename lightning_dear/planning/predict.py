"""Predicts the steady-state step of a plan: what is on the link when, and who waits for it.

Each rank has one link, used by one exchange at a time, the same in all ranks. Seconds count from
the beginning of backward, as a step does here: backward, optimizer step, next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.times import ModelTimes


@dataclass(frozen=True)
class PredictedSpan:
    """An exchange of `bucket` on the link, from `begin_s` to `end_s` since backward began."""

    lane: str
    bucket: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """What a plan's step is expected to take.

    Attributes:
        step_s: From one backward to the next.
        exposed_reduce_scatter_s: For which the optimizer step waits after backward.
        exposed_all_gather_s: For which the next forward stands still.
        bound_s: See `LinkCost.bound_s`.
        dear_bound_s: See `LinkCost.dear_bound_s`.
        spans: The link's timeline.
    """

    step_s: float
    exposed_reduce_scatter_s: float
    exposed_all_gather_s: float
    bound_s: float
    dear_bound_s: float
    spans: tuple[PredictedSpan, ...]


@dataclass
class Link:
    """The link's timeline while it is being filled.

    Attributes:
        free_s: When the last exchange ends.
        ends: (lane, bucket) -> when it ends.
    """

    free_s: float = 0.0
    spans: list[PredictedSpan] = field(default_factory=list)
    ends: dict[tuple[str, int], float] = field(default_factory=dict)

    def send(self, lane: str, bucket: int, earliest_s: float, duration_s: float) -> float:
        """Puts an exchange after all others, not before `earliest_s`; returns its end."""
        begin_s = max(self.free_s, earliest_s)
        self.free_s = begin_s + duration_s
        self.spans.append(PredictedSpan(lane, bucket, begin_s, self.free_s))
        self.ends[lane, bucket] = self.free_s
        return self.free_s


def predict(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> Prediction:
    """The steady-state step of `plan`.

    Backward: reduce-scatters and all-reduces in plan order, each launched when its last gradient is
    there, and early gathers in their order, each launched when its bucket is reduced; the link
    takes what was launched first. Then the step, bucket by bucket, each other all-gather when its
    bucket is stepped (the steps of early buckets are counted here too); last those buckets that are
    all-reduced, of which a rank steps all instead of its share. Then forward, which stands still at
    a bucket's first read until it is there.
    """
    nbytes = bucket_bytes(plan, tensors)
    timeline = reduced_timeline(plan, tensors, times, link)
    reduced_s = max(times.backward_s, timeline.free_s)
    stepped_s = reduced_s
    per_byte_s = times.step_s / max(sum(nbytes), 1)
    for number, size in enumerate(nbytes):
        if number in plan.all_reduced:
            continue
        stepped_s += per_byte_s * size
        if ("all_gather", number) not in timeline.ends:
            gather_s = link.all_gather_s(size, plan.world_size)
            timeline.send("all_gather", number, stepped_s, gather_s)
    whole_bytes = sum(nbytes[number] for number in plan.all_reduced)
    stepped_s += per_byte_s * whole_bytes * plan.world_size
    exposed_gather_s = _exposed_in_forward(plan, times, timeline, stepped_s)
    exposed_reduce_s = reduced_s - times.backward_s
    total = sum(tensor.numel * tensor.itemsize for tensor in tensors)
    lengths = times.forward_s, times.backward_s
    return Prediction(
        step_s=stepped_s + times.forward_s + exposed_gather_s,
        exposed_reduce_scatter_s=exposed_reduce_s,
        exposed_all_gather_s=exposed_gather_s,
        bound_s=link.bound_s(total, plan.world_size, *lengths),
        dear_bound_s=link.dear_bound_s(total, plan.world_size, *lengths),
        spans=tuple(timeline.spans),
    )


def bucket_bytes(plan: BucketPlan, tensors: Sequence[TensorSpec]) -> list[int]:
    """Size of each bucket, padding included."""
    itemsize = {tensor.index: tensor.itemsize for tensor in tensors}
    return [bucket.padded_numel * itemsize[bucket.slices[0].tensor] for bucket in plan.buckets]


def reduced_timeline(
    plan: BucketPlan, tensors: Sequence[TensorSpec], times: ModelTimes, link: LinkCost
) -> Link:
    """The link until the last reduce-scatter has ended, with the early gathers among them.

    All-reduces are among the reduce-scatters, whose place they take.
    """
    nbytes = bucket_bytes(plan, tensors)
    itemsize = {tensor.index: tensor.itemsize for tensor in tensors}
    timeline, waiting = Link(), list(plan.early)
    launched_s = gathered_s = 0.0
    for number in plan.reduce_order:
        launched_s = max(launched_s, times.ready_of(plan.buckets[number]))
        while waiting and ("reduce_scatter", waiting[0]) in timeline.ends:
            gathered_s = max(gathered_s, timeline.ends["reduce_scatter", waiting[0]])
            if gathered_s >= launched_s:
                break
            duration_s = link.all_gather_s(nbytes[waiting[0]], plan.world_size)
            timeline.send("all_gather", waiting.pop(0), gathered_s, duration_s)
        duration_s = link.reduce_scatter_s(nbytes[number], plan.world_size)
        if number in plan.all_reduced:
            # 16-bit gradients are all-reduced in fp32.
            widening = max(4 / itemsize[plan.buckets[number].slices[0].tensor], 1)
            duration_s = link.all_reduce_s(widening * nbytes[number], plan.world_size)
        timeline.send("reduce_scatter", number, launched_s, duration_s)
    return timeline


def _exposed_in_forward(
    plan: BucketPlan, times: ModelTimes, timeline: Link, begin_s: float
) -> float:
    needs = sorted(
        (times.first_use_of(bucket), timeline.ends["all_gather", number])
        for number, bucket in enumerate(plan.buckets)
        if number not in plan.all_reduced
    )
    exposed_s = 0.0
    for first_use_s, end_s in needs:
        exposed_s = max(exposed_s, end_s - (begin_s + first_use_s))
    return exposed_s
