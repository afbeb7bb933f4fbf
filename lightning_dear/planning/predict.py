"""Predicts how long a step with a plan takes once training has settled, and when the link is used.

The model: all ranks do the same at the same time. Each has one link (its connection to the
network), which carries one collective at a time. A step is a backward, the optimizer step and the
next forward. Seconds count from the beginning of backward.
"""

from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from lightning_dear.planning import step as steps
from lightning_dear.planning.measured import NO_CODEC, CodecCosts, LinkCost, ModelTimes
from lightning_dear.planning.plan import BucketPlan, Specs

KNOWN_ERROR = 0.06
"""Average error of predictions, as a share of a step; see docs/simulator.md. Two predictions that
differ by less are said to be alike."""


class Prediction(NamedTuple):
    """Holds the predicted step of a plan.

    Attributes:
        step_s: Seconds from the beginning of one backward to the beginning of the next.
        spans: Collectives of the step, each with its beginning and end, in the order in which the
            link carries them.
    """

    step_s: float
    spans: tuple[steps.Carried, ...]


@dataclass(frozen=True)
class StepModel:
    """Predicts the step of a training for any plan. Pure.

    Attributes:
        tensors: All tensors of the optimizer, over which plans are made.
        world_size: Number of ranks.
        times: Times of a step without communication and without a codec.
        link: Costs of collectives.
        codecs: Costs of encoding and decoding.
    """

    tensors: Specs
    world_size: int
    times: ModelTimes
    link: LinkCost
    codecs: CodecCosts = NO_CODEC

    def step_s(self, plan: BucketPlan) -> float:
        """Returns the predicted seconds of a step with `plan`."""
        return self.predict(plan).step_s

    def predict(self, plan: BucketPlan) -> Prediction:
        """Returns the predicted step with `plan`; the function `predict` says how it is made up."""
        step, run = _MeasuredStep(plan, self), steps.Run()
        run.do(0, [*step.backward(), *step.reduced(), *step.stepped()])
        # With step number 1, since forward waits for the gathers that the step before has launched.
        run.do(1, step.forward())
        return Prediction(run.clock_s + self.codecs.unseen_s, tuple(run.link.spans))


class _MeasuredStep(steps.PlannedStep):
    """Makes the operations of a step of a plan, with costs that were measured in training."""

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
    """Predicts the step of `plan` once training has settled. Pure.

    The predicted step consists of:

    1. Backward. Reduce-scatters and all-reduces are launched in reduce order, each once the
       bucket's last gradient is there. The link carries collectives in the order of their launches.
    2. The optimizer step, bucket by bucket, once all buckets are reduced. A bucket's all-gather is
       launched once the bucket is stepped. All-reduced buckets come last: a rank steps all of their
       elements, not only 1/world_size.
    3. The next forward, which waits before the first read of a bucket until it is gathered.

    With a codec, encoding and decoding delay the model's own computing. A bucket is encoded before
    its launch, which delays all later gradients. After backward, buckets are decoded and summed one
    after the other, in reduce order. A stepped shard is encoded before its gather. What was
    gathered is decoded before the bucket's first read, which delays all later reads. If every rank
    steps whole buckets, the bucket is stepped there, too, with the same effect. Plans with
    all-reduced buckets are predicted only for trainings without a codec. `CodecCosts.unseen_s` is
    added to the step. Padding is encoded, sent and decoded like other elements.

    Args:
        plan: Plan whose step is predicted.
        tensors: All tensors that the plan holds.
        times: Times of a step without communication and without a codec.
        link: Costs of collectives.
        codecs: Costs of encoding and decoding.
    """
    return StepModel(tensors, plan.world_size, times, link, codecs).predict(plan)
