"""What planners are told of a training: its times, what the link costs, and what a codec does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dear.planning.plan import BucketPlan, BucketSpec


@dataclass(frozen=True)
class ModelTimes:
    """Holds the seconds of one step without any communication.

    Attributes:
        forward_s: Length of the forward.
        backward_s: Length of the backward.
        first_use_s: Tensor index -> seconds from the forward's beginning to its first read. A
            tensor that is missing is not read in forward.
        ready_s: Tensor index -> seconds from the backward's beginning to its gradient. A tensor
            that is missing got no gradient and is sent when backward has ended.
        step_s: Optimizer step on this rank's shards, all buckets together.
        late_step_s: Optimizer step of whole buckets, all together, each where forward first reads
            it; for gather="gradients".
        allows_early: Whether buckets may be stepped and gathered before backward has ended.
        allows_all_reduce: Whether buckets may be all-reduced.
        allows_cuts: Whether a tensor may be cut between two buckets.
    """

    forward_s: float
    backward_s: float
    first_use_s: Mapping[int, float]
    ready_s: Mapping[int, float]
    step_s: float = 0.0
    late_step_s: float = 0.0
    allows_early: bool = True
    allows_all_reduce: bool = True
    allows_cuts: bool = True

    def ready_of(self, bucket: BucketSpec) -> float:
        """Returns when the last gradient of `bucket` is there, seconds since backward began."""
        return max(self.ready_s.get(piece.tensor, self.backward_s) for piece in bucket.slices)

    def first_use_of(self, bucket: BucketSpec) -> float:
        """Returns when forward first reads `bucket`, seconds since it began; at most its length."""
        return min(self.first_use_s.get(piece.tensor, self.forward_s) for piece in bucket.slices)


def combined_times(
    times: Sequence[ModelTimes], combine: Callable[[Sequence[float]], float]
) -> ModelTimes:
    """Returns several steps of one rank as one (`median`), or several ranks (`max`).

    Each figure for itself, tensor by tensor where there is one for each tensor. The maximum, since
    a bucket is exchanged when the last rank has it.
    """

    def combined(rows: Sequence[Any]) -> Any:
        if isinstance(rows[0], bool):
            # Only what every step and every rank allows is allowed.
            return all(rows)
        if not isinstance(rows[0], Mapping):
            return combine(rows)
        # Ranks may have read, or got gradients for, different tensors.
        indices = sorted({index for row in rows for index in row})
        return {index: combine([row[index] for row in rows if index in row]) for index in indices}

    return ModelTimes(*map(combined, zip(*(vars(one).values() for one in times), strict=True)))


@dataclass(frozen=True)
class LinkCost:
    """Holds the cost of one exchange on a rank's link, the same in both directions.

    Attributes:
        alpha_s: Seconds that an exchange takes however small it is.
        beta_s: Seconds for each byte that the rank sends: 1 / rate.
        all_reduce: Cost of the backend's all-reduce, which sends twice the bytes of one half; None:
            that of a reduce-scatter and an all-gather.
    """

    alpha_s: float
    beta_s: float
    all_reduce: LinkCost | None = None

    def reduce_scatter_s(self, nbytes: float, world_size: int) -> float:
        """Returns seconds for `nbytes`: alpha + beta x nbytes x (P-1)/P; 0 at one rank."""
        if world_size == 1:
            return 0.0
        return self.alpha_s + self.beta_s * sent_bytes(nbytes, world_size)

    all_gather_s = reduce_scatter_s
    """The same: it sends what a reduce-scatter sends."""

    def all_reduce_s(self, nbytes: float, world_size: int) -> float:
        """Returns seconds for `nbytes`, as measured, or as both halves; 0 at one rank."""
        # Nothing was measured: as two halves, so two starts.
        cost = self.all_reduce or LinkCost(2 * self.alpha_s, self.beta_s)
        return cost.reduce_scatter_s(2 * nbytes, world_size)


def sent_bytes(nbytes: float, world_size: int) -> float:
    """Returns what each rank sends to reduce-scatter, or to all-gather, `nbytes`."""
    return nbytes * (world_size - 1) / world_size


@dataclass(frozen=True)
class Train:
    """Holds a measurement of exchanges that were under way at once.

    Attributes:
        count: How many.
        sent_bytes: By a rank, in each.
        seconds: Until all had ended.
    """

    count: int
    sent_bytes: float
    seconds: float


def fitted(*, many: Train, few: Train, small: Train, long: Train) -> LinkCost:
    """Returns what four trains say; never below zero.

    Every train also takes some time once: until its first message is under way, and until the last
    rank has its last one. A difference between two trains leaves that out, though only roughly; in
    a long train it weighs little.

    Args:
        many: Sends in all what `few` sends, so that it takes longer by its starts alone.
        few: Fewer and larger exchanges; for alpha only.
        small: Sends least in all.
        long: Sends most in all.
    """
    # Noise may make more starts look cheaper than few.
    alpha_s = max((many.seconds - few.seconds) / (many.count - few.count), 0.0)
    starts_s = alpha_s * (long.count - small.count)
    more_bytes = long.count * long.sent_bytes - small.count * small.sent_bytes
    beta_s = (long.seconds - small.seconds - starts_s) / more_bytes
    return LinkCost(alpha_s=alpha_s, beta_s=max(beta_s, 0.0))


Way = Literal["half", "to_owners", "both_halves", "all_gather", "all_reduce"]
"""How the first half of what is encoded travels: to owners, summed on its way; to owners as it is;
so, and from them to everybody; all of it to everybody; or in one all-reduce. Planners know of the
first alone, simulations of all.
"""


@dataclass(frozen=True)
class Linear:
    """Computes alpha + beta x elements."""

    alpha: float = 0.0
    beta: float = 0.0

    def of(self, numel: float) -> float:
        """Returns its value for so many elements."""
        return self.alpha + self.beta * numel


@dataclass(frozen=True)
class BucketCost:
    """Holds what one bucket costs in a step, beside its turns on the link.

    Attributes:
        encode_s: In backward, when its last gradient is there: encoding it, starting its messages.
        sum_s: After backward, when all ranks' bytes are there: decoding and summing them.
        publish_s: In the step, after this rank's shard is stepped: the same of that.
        decode_s: In forward, at the first read.
        reduce_bytes: Size of what travels in the reduce half, as if all of it were sent.
        gather_bytes: The same of the gather half.
        way: See `Way`.
        reduce_starts: See `CodecCost`.
    """

    encode_s: float
    sum_s: float
    publish_s: float
    decode_s: float
    reduce_bytes: float
    gather_bytes: float
    way: Way = "half"
    reduce_starts: float | None = None


@dataclass(frozen=True)
class CodecCost:
    """Holds what a codec costs; without arguments numbers travel as they are, for nothing.

    A half that is not encoded has no size here, and no costs but for starting its messages.

    Attributes:
        encode: Seconds to encode a bucket, what is kept of it included, and to start its messages;
            of its elements.
        decode_sum: Seconds to decode all ranks' parts of this rank's shard and to sum them, or to
            decode their sum (with summing, where the host does that); of the bucket's elements.
        encode_shard: Seconds to encode the owner's shard, and to start its messages; of the shard's
            elements.
        decode: Seconds to decode what was gathered; of the bucket's elements.
        reduce_bytes: Of a shard that is encoded for its owner; of the shard's elements. None: as
            many as it has.
        gather_bytes: Of a shard that its owner has encoded; the same.
        way: See `Way`.
        reduce_starts: Messages, one after the other, with which the first half begins; None: as
            many as any half of the network. Planners take it that there are as many.
    """

    encode: Linear = Linear()
    decode_sum: Linear = Linear()
    encode_shard: Linear = Linear()
    decode: Linear = Linear()
    reduce_bytes: Linear | None = None
    gather_bytes: Linear | None = None
    way: Way = "half"
    reduce_starts: float | None = None

    def of(self, numel: float, itemsize: int, world_size: int) -> BucketCost:
        """Returns costs of a bucket of `numel` elements, padding included, by `itemsize` bytes."""
        # Each rank encodes a shard for every rank, and publishes its own.
        shard = numel / world_size

        def size(wire: Linear | None) -> float:
            return numel * itemsize if wire is None else world_size * wire.of(shard)

        return BucketCost(
            encode_s=self.encode.of(numel),
            sum_s=self.decode_sum.of(numel),
            publish_s=self.encode_shard.of(shard),
            decode_s=self.decode.of(numel),
            reduce_bytes=size(self.reduce_bytes),
            gather_bytes=size(self.gather_bytes),
            way=self.way,
            reduce_starts=self.reduce_starts,
        )


@dataclass(frozen=True)
class CodecCosts:
    """Holds costs of the buckets that are compressed, and of those that are not.

    Attributes:
        compressed: By the training's codec; without one, nothing.
        uncompressed: What travelling as they are costs among buckets that are compressed.
        may_mix: Whether a plan may leave buckets uncompressed. Not where there is no codec, nor
            where what comes back is no gradient, such as a vote.
        may_plan: Whether planners may try other buckets with it. Not with sparse all-reduces.
        unseen_s: Seconds of a step that no cost shows, such as ranks that wait for each other;
            negative where steps are shorter than all costs say. The same for every plan.
        fitted_to: The plan whose measured step all these add up to, if there is one.
    """

    compressed: CodecCost = CodecCost()
    uncompressed: CodecCost = CodecCost()
    may_mix: bool = False
    may_plan: bool = True
    unseen_s: float = 0.0
    fitted_to: BucketPlan | None = None

    @property
    def are_none(self) -> bool:
        """Tells whether there is no codec."""
        return self.compressed == CodecCost()

    def of(self, plan: BucketPlan, number: int) -> CodecCost:
        """Returns the cost of bucket `number` of `plan`."""
        return self.uncompressed if number in plan.uncompressed else self.compressed

    def of_all(self, plan: BucketPlan) -> list[BucketCost]:
        """Returns what each bucket of `plan` costs, padding included."""
        return [
            self.of(plan, number).of(bucket.padded_numel, bucket.itemsize, plan.world_size)
            for number, bucket in enumerate(plan.buckets)
        ]


NO_CODEC = CodecCosts()
