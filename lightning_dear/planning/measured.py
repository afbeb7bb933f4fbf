"""What planners know about a training: times of a step, costs of collectives and of the codec.

P is the number of ranks. The link is a rank's connection to the network. A time in seconds that
depends linearly on a size is alpha + beta x size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_dear.planning.plan import BucketPlan, BucketSpec


@dataclass(frozen=True)
class ModelTimes:
    """Holds the seconds of one step without communication, and what plans of the training may do.

    Attributes:
        forward_s: Seconds of the forward.
        backward_s: Seconds of the backward.
        first_use_s: Tensor index -> seconds from the beginning of forward to the tensor's first
            read. A tensor that is missing here is not read in forward.
        ready_s: Tensor index -> seconds from the beginning of backward to the tensor's gradient. A
            tensor that is missing here got no gradient. Its bucket is sent when backward has ended.
        step_s: Seconds of the optimizer step, after backward, on this rank's shards of all buckets.
        late_step_s: Seconds of the optimizer step on all buckets if every rank steps whole buckets
            (gather="gradients"). Each bucket is then stepped in forward, before its first read. 0
            otherwise.
        allows_all_reduce: Whether some buckets of a plan may be all-reduced.
        allows_cuts: Whether a tensor may be cut between two buckets.
    """

    forward_s: float
    backward_s: float
    first_use_s: Mapping[int, float]
    ready_s: Mapping[int, float]
    step_s: float = 0.0
    late_step_s: float = 0.0
    allows_all_reduce: bool = True
    allows_cuts: bool = True

    def scaled(self, factor: float) -> "ModelTimes":
        """Returns the times of a rank that takes `factor` times as long for everything."""
        return combined_times([self], lambda times_s: factor * times_s[0])

    def ready_of(self, bucket: BucketSpec) -> float:
        """Returns the seconds from the beginning of backward to the last gradient of `bucket`.

        If a tensor in it got no gradient, that is the end of backward.
        """
        return max(self.ready_s.get(piece.tensor, self.backward_s) for piece in bucket.slices)

    def first_use_of(self, bucket: BucketSpec) -> float:
        """Returns the seconds from the beginning of forward to the first read of `bucket`.

        A tensor that forward does not read counts as read at the end of forward.
        """
        return min(self.first_use_s.get(piece.tensor, self.forward_s) for piece in bucket.slices)


def combined_times(
    times: Sequence[ModelTimes], combine: Callable[[Sequence[float]], float]
) -> ModelTimes:
    """Combines the times of several steps of a rank, or of several ranks, into one `ModelTimes`.

    Each time is combined separately; times of tensors are combined tensor by tensor. The result
    allows only what all of `times` allow.

    Args:
        times: Times to combine; at least one.
        combine: Returns one number for several: `median` for the steps of one rank, and `max` for
            several ranks, since a bucket can be reduced only when the last rank has filled it.
    """

    def combined(rows: Sequence[Any]) -> Any:
        if isinstance(rows[0], bool):
            return all(rows)
        if not isinstance(rows[0], Mapping):
            return combine(rows)
        # A tensor's time may be missing for some ranks or steps: these did not read it, or got no
        # gradient for it. It is combined over the others.
        indices = sorted({index for row in rows for index in row})
        return {index: combine([row[index] for row in rows if index in row]) for index in indices}

    return ModelTimes(*map(combined, zip(*(vars(one).values() for one in times), strict=True)))


@dataclass(frozen=True)
class LinkCost:
    """Holds the cost of one collective, as a line: alpha + beta x bytes that each rank sends.

    Reduce-scatters and all-gathers cost the same.

    Attributes:
        alpha_s: Seconds that a collective takes however small it is.
        beta_s: Seconds for each byte that the rank sends: 1 / rate of the link.
        all_reduce: Cost of an all-reduce of the backend, in which a rank sends twice as many bytes
            as in a reduce-scatter. None means that an all-reduce costs as much as a reduce-scatter
            plus an all-gather.
    """

    alpha_s: float
    beta_s: float
    all_reduce: "LinkCost | None" = None

    def reduce_scatter_s(self, nbytes: float, world_size: int) -> float:
        """Returns the seconds to reduce-scatter `nbytes`: alpha + beta x nbytes x (P-1)/P.

        Returns 0 at world size 1, where nothing is sent.
        """
        if world_size == 1:
            return 0.0
        return self.alpha_s + self.beta_s * sent_bytes(nbytes, world_size)

    all_gather_s = reduce_scatter_s
    """Seconds to all-gather `nbytes`: as many as to reduce-scatter them, since a rank sends as many
    bytes."""

    def all_reduce_s(self, nbytes: float, world_size: int) -> float:
        """Returns the seconds to all-reduce `nbytes`, with the costs in `all_reduce`.

        Returns 0 at world size 1, where nothing is sent.
        """
        # A reduce-scatter plus an all-gather are two collectives, so that alpha counts twice.
        cost = self.all_reduce or LinkCost(2 * self.alpha_s, self.beta_s)
        return cost.reduce_scatter_s(2 * nbytes, world_size)


def sent_bytes(nbytes: float, world_size: int) -> float:
    """Returns the bytes that each rank sends to reduce-scatter, or to all-gather, `nbytes`."""
    return nbytes * (world_size - 1) / world_size


@dataclass(frozen=True)
class Train:
    """Holds a measurement of a train: several collectives that are launched at once.

    Attributes:
        count: Number of collectives.
        sent_bytes: Bytes that a rank sends in each collective.
        seconds: Seconds from the first launch until all collectives have ended.
    """

    count: int
    sent_bytes: float
    seconds: float


def fitted(*, many: Train, few: Train, small: Train, long: Train) -> LinkCost:
    """Returns the alpha and beta that follow from four measured trains. Neither is below 0.

    Every train also takes a fixed time: until its first message is under way, and until the last
    rank has received the last message. This time cancels, mostly, in the difference of two trains.
    The rest of it weighs little against a long train.

    Args:
        many: Train that sends as many bytes in sum as `few`, in more collectives. It takes longer
            only because it starts more collectives. So the difference of both gives alpha.
        few: Train of fewer and larger collectives than `many`.
        small: Train that sends the fewest bytes in sum. The difference to `long` gives beta.
        long: Train that sends the most bytes in sum.
    """
    # By noise, `many` may be faster than `few`, and the difference negative.
    alpha_s = max((many.seconds - few.seconds) / (many.count - few.count), 0.0)
    starts_s = alpha_s * (long.count - small.count)
    more_bytes = long.count * long.sent_bytes - small.count * small.sent_bytes
    beta_s = (long.seconds - small.seconds - starts_s) / more_bytes
    return LinkCost(alpha_s=alpha_s, beta_s=max(beta_s, 0.0))


Way = Literal["half", "to_owners", "both_halves", "all_gather", "all_reduce"]
"""How the encoded gradients of a bucket reach the ranks.

half: A reduce-scatter sends them to the owners of shards, already summed.
to_owners: An all-to-all sends them to the owners of shards, which sum the rows that arrive.
both_halves: Same as to_owners, but the owners then send the sums to all ranks, still in backward.
all_gather: The encoded gradients of each rank are sent to all ranks, and each rank sums them.
all_reduce: One all-reduce sums them on all ranks.

Planners calculate as with "half" in any case. The simulator distinguishes them.
"""


@dataclass(frozen=True)
class Linear:
    """A linear function of a number, usually of a number of elements: alpha + beta x number."""

    alpha: float = 0.0
    beta: float = 0.0

    def of(self, numel: float) -> float:
        """Returns alpha + beta x `numel`."""
        return self.alpha + self.beta * numel


class BucketCost(NamedTuple):
    """Holds the costs of one bucket in a step: seconds of the host or device, and message sizes.

    The seconds in which the bucket's messages occupy the link follow from the sizes; see
    `LinkCost`.

    Attributes:
        encode_s: Seconds to encode the bucket's gradients and to start their messages. Spent in
            backward, once the bucket's last gradient is there.
        sum_s: Seconds to decode and sum the bytes of all ranks. Spent after backward, once the
            bytes have arrived.
        publish_s: Seconds to encode this rank's shard for the gather half and to start its
            messages. Spent in the optimizer step, once the shard has been stepped.
        decode_s: Seconds to decode what was gathered. Spent in forward, before the bucket's first
            read.
        reduce_bytes: Bytes of the (encoded) bucket in the reduce half, the shards of all ranks
            together. A rank sends (P-1)/P of them.
        gather_bytes: Bytes of the (encoded) bucket in the gather half, the shards of all ranks
            together. A rank sends (P-1)/P of them.
        way: How the encoded gradients travel: see `Way`.
        reduce_starts: Same as the attribute of `CodecCost`.
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
    """Holds what a codec costs, as functions of a number of elements.

    Made without arguments it stands for no codec: values travel uncompressed, and no time is spent
    on encoding. For a half that is not encoded, `encode` or `encode_shard` holds the time to start
    its messages.

    Attributes:
        encode: Elements of a bucket -> seconds to encode it, to update the residual, and to start
            its messages.
        decode_sum: Elements of a bucket -> seconds to decode what all ranks have sent for this
            rank's shard and to sum it. If a reduce-scatter sums encoded rows
            (`Codec.is_summable`), seconds to decode the sum, and to add up the rows if the host
            does that.
        encode_shard: Elements of a shard -> seconds for its owner to encode it and to start its
            messages.
        decode: Elements of a bucket -> seconds to decode what was gathered.
        reduce_bytes: Elements of a shard -> bytes of the gradients that one rank encodes for the
            owner of the shard. None means that gradients travel uncompressed.
        gather_bytes: Elements of a shard -> bytes that the owner of the shard encodes for all
            ranks. None means that the gather half travels uncompressed.
        way: How the encoded gradients travel: see `Way`.
        reduce_starts: Number of messages of the reduce half that are sent one after the other, for
            each of which the start counts. None means as many as an uncompressed half has in the
            simulated network. Planners do not read this attribute.
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
        """Returns the costs of a bucket.

        Args:
            numel: Elements of the bucket, padding included.
            itemsize: Bytes of an uncompressed element.
            world_size: Number of ranks.
        """
        # In both halves a row of bytes is the encoding of one shard, and a bucket has one row for
        # each rank.
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
    """Holds the costs of compressed buckets and of uncompressed ones in one training.

    Attributes:
        compressed: Costs of a bucket that the training's codec compresses. The default stands for a
            training without a codec.
        uncompressed: Costs of a bucket that a plan leaves uncompressed although there is a codec.
        may_mix: Whether a plan may leave buckets uncompressed. False without a codec, with a codec
            that votes (see `Codec`), and with `Fp32`, which compresses nothing.
        may_plan: Whether planners may try other buckets with this codec. False for sparse
            all-reduces. Read by the simulator only.
        unseen_s: Seconds of a measured step that the costs do not explain, such as those in which
            ranks wait for each other. Added to the prediction of every plan. Negative if the
            measured step was shorter than its prediction.
        fitted_to: Plan whose measured step gave `unseen_s`. None means that no step was measured.
    """

    compressed: CodecCost = CodecCost()
    uncompressed: CodecCost = CodecCost()
    may_mix: bool = False
    may_plan: bool = True
    unseen_s: float = 0.0
    fitted_to: BucketPlan | None = None

    @property
    def are_none(self) -> bool:
        """Tells whether these costs stand for a training without a codec."""
        return self.compressed == CodecCost()

    def of(self, plan: BucketPlan, number: int) -> CodecCost:
        """Returns the cost of bucket `number` of `plan`."""
        return self.uncompressed if number in plan.uncompressed else self.compressed

    def of_all(self, plan: BucketPlan) -> list[BucketCost]:
        """Returns the costs of each bucket of `plan`, in the order of bucket numbers."""
        return [
            self.of(plan, number).of(bucket.padded_numel, bucket.itemsize, plan.world_size)
            for number, bucket in enumerate(plan.buckets)
        ]


NO_CODEC = CodecCosts()
"""Costs of a training without a codec."""
