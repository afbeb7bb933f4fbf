"""Predicts the steady-state step of a plan: what is on the link when, and who waits for it.

Each rank has one link, used by one exchange at a time, the same in all ranks. Seconds count from
the beginning of backward, as a step does here: backward, optimizer step, next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dear.planning.measured import NO_CODEC, CodecCosts, LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, TensorSpec


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
        spans: The link's timeline.
    """

    step_s: float
    spans: tuple[PredictedSpan, ...]


@dataclass
class LinkTimeline:
    """What is on the link, and when, while the step is gone through.

    Attributes:
        free_s: When the last exchange ends.
        spans: All exchanges, in the order of the link.
        ends: (lane, bucket) -> when it ends.
    """

    free_s: float = 0.0
    spans: list[PredictedSpan] = field(default_factory=list)
    ends: dict[tuple[str, int], float] = field(default_factory=dict)

    def send(self, lane: str, bucket: int, earliest_s: float, duration_s: float) -> None:
        """Puts an exchange after all others, not before `earliest_s`."""
        begin_s = max(self.free_s, earliest_s)
        self.free_s = self.ends[lane, bucket] = begin_s + duration_s
        self.spans.append(PredictedSpan(lane, bucket, begin_s, self.free_s))


@dataclass(frozen=True)
class StepModel:
    """What is known of a training's steps. It tells what they take with a plan; pure.

    Attributes:
        tensors: What plans are made of.
        world_size: Number of ranks.
        times: Of a step without communication, nor a codec.
        link: What exchanges cost.
        codecs: What encoding costs.
    """

    tensors: Sequence[TensorSpec]
    world_size: int
    times: ModelTimes
    link: LinkCost
    codecs: CodecCosts = NO_CODEC

    def step_s(self, plan: BucketPlan) -> float:
        """The predicted step, seconds."""
        return self.predict(plan).step_s

    def predict(self, plan: BucketPlan) -> Prediction:
        """See the function `predict`."""
        times, codecs = self.times, self.codecs
        nbytes = [bucket.stepped_bytes for bucket in plan.buckets]
        costs = codecs.of_all(plan)
        timeline = self.reduced(plan)
        reduced_s = times.backward_s + sum(costs[number].encode_s for number in plan.reduce_order)
        for number in plan.reduce_order:
            arrived_s = timeline.ends["reduce_scatter", number]
            reduced_s = max(reduced_s, arrived_s) + costs[number].sum_s
        stepped_s = reduced_s
        per_byte_s, late_per_byte_s = (
            seconds / max(sum(nbytes), 1) for seconds in (times.step_s, times.late_step_s)
        )
        for number, cost in enumerate(costs):
            if number in plan.all_reduced:
                continue
            stepped_s += per_byte_s * nbytes[number] + cost.publish_s
            if ("all_gather", number) not in timeline.ends:
                gather_s = self.link.all_gather_s(cost.gather_bytes, plan.world_size)
                timeline.send("all_gather", number, stepped_s, gather_s)
        # Every rank steps all of these. They come last, as no other rank waits for them.
        whole_bytes = sum(nbytes[number] for number in plan.all_reduced)
        stepped_s += per_byte_s * whole_bytes * plan.world_size
        # What a bucket's first read in forward takes, even if its bytes have long been there.
        used_s = [
            cost.decode_s + late_per_byte_s * size for cost, size in zip(costs, nbytes, strict=True)
        ]
        delay_s = self._delay_in_forward(plan, timeline, stepped_s, used_s)
        step_s = stepped_s + times.forward_s + delay_s + codecs.unseen_s
        return Prediction(step_s, tuple(timeline.spans))

    def reduced(self, plan: BucketPlan) -> LinkTimeline:
        """The link until the last reduce-scatter has ended, with the early gathers among them.

        All-reduces are among the reduce-scatters, whose turn they take.
        """
        costs = self.codecs.of_all(plan)
        timeline, waiting = LinkTimeline(), list(plan.early)
        ready_s = encoded_s = gathered_s = 0.0
        for number in plan.reduce_order:
            bucket = plan.buckets[number]
            ready_s = max(ready_s, self.times.ready_of(bucket))
            # Whoever computes also encodes: all later gradients wait for it.
            encoded_s += costs[number].encode_s
            launched_s = ready_s + encoded_s
            while waiting and ("reduce_scatter", waiting[0]) in timeline.ends:
                gathered_s = max(gathered_s, timeline.ends["reduce_scatter", waiting[0]])
                if gathered_s >= launched_s:
                    break
                nbytes = plan.buckets[waiting[0]].nbytes
                duration_s = self.link.all_gather_s(nbytes, plan.world_size)
                timeline.send("all_gather", waiting.pop(0), gathered_s, duration_s)
            duration_s = self.link.reduce_scatter_s(costs[number].reduce_bytes, plan.world_size)
            if number in plan.all_reduced:
                # 16-bit gradients are all-reduced in fp32.
                widening = max(4 / bucket.itemsize, 1)
                duration_s = self.link.all_reduce_s(widening * bucket.nbytes, plan.world_size)
            timeline.send("reduce_scatter", number, launched_s, duration_s)
        return timeline

    def _delay_in_forward(
        self, plan: BucketPlan, timeline: LinkTimeline, begin_s: float, used_s: Sequence[float]
    ) -> float:
        """How much longer forward takes: for what it waits for, and what it decodes and steps."""
        needs = sorted(
            (self.times.first_use_of(bucket), number)
            for number, bucket in enumerate(plan.buckets)
            if number not in plan.all_reduced
        )
        delay_s = 0.0
        for first_use_s, number in needs:
            late_s = timeline.ends["all_gather", number] - (begin_s + first_use_s)
            # Delays do not add up: a wait for one bucket is time for the next one to come.
            delay_s = max(delay_s, late_s) + used_s[number]
        return delay_s


def predict(
    plan: BucketPlan,
    tensors: Sequence[TensorSpec],
    times: ModelTimes,
    link: LinkCost,
    codecs: CodecCosts = NO_CODEC,
) -> Prediction:
    """The steady-state step of `plan`. Padding is encoded, sent and decoded, and not stepped.

    Backward: reduce-scatters and all-reduces in reduce order, each launched when its last gradient
    is there, and early gathers in their order, each launched when its bucket is reduced; the link
    takes what was launched first. Then the step, bucket by bucket, each other all-gather when its
    bucket is stepped (the steps of early buckets are counted here too); last those buckets that are
    all-reduced, of which a rank steps all instead of its share. Then forward, which stands still at
    a bucket's first read until it is there.

    A codec takes turns with what else is computed: buckets are encoded before their launch, which
    delays all later gradients; after backward they are decoded and summed one after the other, in
    reduce order; a stepped shard is encoded before its gather, and what was gathered is decoded at
    the first read, which delays all later ones, as do steps that are made there. Codecs are not
    for plans with early or all-reduced buckets. What a codec's costs do not show is added to the
    step.
    """
    return StepModel(tensors, plan.world_size, times, link, codecs).predict(plan)
