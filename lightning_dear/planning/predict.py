"""Predicts the steady-state step of a plan: what is on the link when, and who waits for it.

Each rank has one link, used by one exchange at a time, the same in all ranks. Seconds count from
the beginning of backward, as a step does here: backward, optimizer step, next forward.
"""

from dataclasses import dataclass

from typing_extensions import override

from lightning_dear.planning import step as steps
from lightning_dear.planning.measured import NO_CODEC, CodecCosts, LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, Specs


@dataclass(frozen=True)
class Prediction:
    """Says what a plan's step is expected to take.

    Attributes:
        step_s: From one backward to the next.
        spans: The link's timeline.
    """

    step_s: float
    spans: tuple[steps.Carried, ...]


@dataclass(frozen=True)
class StepModel:
    """Knows a training's steps, and tells what they take with a plan; pure.

    Attributes:
        tensors: What plans are made of.
        world_size: Number of ranks.
        times: Of a step without communication, nor a codec.
        link: What exchanges cost.
        codecs: What encoding costs.
    """

    tensors: Specs
    world_size: int
    times: ModelTimes
    link: LinkCost
    codecs: CodecCosts = NO_CODEC

    def step_s(self, plan: BucketPlan) -> float:
        """Returns the predicted step, seconds."""
        return self.predict(plan).step_s

    def predict(self, plan: BucketPlan) -> Prediction:
        """See the function `predict`."""
        step, run = _MeasuredStep(plan, self), steps.Run()
        run.do(0, step.backward())
        run.do(0, step.reduced())
        run.do(0, step.stepped())
        # Of the next step: it reads what this one has gathered.
        run.do(1, step.forward())
        return Prediction(run.clock_s + self.codecs.unseen_s, tuple(run.link.spans))


class _MeasuredStep(steps.PlannedStep):
    """A step whose costs were measured in training."""

    def __init__(self, plan: BucketPlan, model: StepModel) -> None:
        times = model.times
        super().__init__(plan, times, model.codecs.of_all(plan), times.step_s, times.late_step_s)
        self._link = model.link

    @override
    def reduce(self, number: int) -> steps.Message:
        world_size = self.plan.world_size
        if number not in self.plan.all_reduced:
            seconds = self._link.reduce_scatter_s(self.costs[number].reduce_bytes, world_size)
            return steps.Message(steps.REDUCE_SCATTER, number, seconds)
        bucket = self.plan.buckets[number]
        # 16-bit gradients are all-reduced in fp32.
        size = bucket.nbytes * max(4 / bucket.itemsize, 1)
        return steps.Message(steps.ALL_REDUCE, number, self._link.all_reduce_s(size, world_size))

    @override
    def gather(self, number: int) -> steps.Message:
        seconds = self._link.all_gather_s(self.costs[number].gather_bytes, self.plan.world_size)
        return steps.Message(steps.ALL_GATHER, number, seconds)


def predict(
    plan: BucketPlan,
    tensors: Specs,
    times: ModelTimes,
    link: LinkCost,
    codecs: CodecCosts = NO_CODEC,
) -> Prediction:
    """Predicts the steady-state step of `plan`. Padding is encoded, sent and decoded too.

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
