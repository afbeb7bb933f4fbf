"""What encoding costs: time of whoever computes, and bytes on the link, linear in the elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_dear.planning.plan import BucketPlan
from lightning_dear.planning.times import ModelTimes

Way = Literal["half", "to_owners", "both_halves", "all_gather", "all_reduce"]
"""How the first half of what is encoded travels: to owners, summed on its way; to owners as it is;
so, and from them to everybody; all of it to everybody; or in one all-reduce. Planners know of the
first alone, simulations of all.
"""


@dataclass(frozen=True)
class Linear:
    """alpha + beta x elements."""

    alpha: float = 0.0
    beta: float = 0.0

    def of(self, numel: float) -> float:
        """Its value for so many elements."""
        return self.alpha + self.beta * numel


@dataclass(frozen=True)
class BucketCost:
    """What one bucket costs in a step, beside its turns on the link.

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
    """What a codec costs; without arguments: nothing, and numbers travel as they are.

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
        kept_bytes: Of each element, for what encoding has left.
    """

    encode: Linear = Linear()
    decode_sum: Linear = Linear()
    encode_shard: Linear = Linear()
    decode: Linear = Linear()
    reduce_bytes: Linear | None = None
    gather_bytes: Linear | None = None
    way: Way = "half"
    reduce_starts: float | None = None
    kept_bytes: float = 0.0

    def with_launches(self, reduce_s: float, gather_s: float) -> CodecCost:
        """With what starting messages takes of each half, whatever the size of a bucket."""
        encode, shard = self.encode, self.encode_shard
        return replace(
            self,
            encode=replace(encode, alpha=encode.alpha + reduce_s),
            encode_shard=replace(shard, alpha=shard.alpha + gather_s),
        )

    def of(self, numel: float, itemsize: int, world_size: int) -> BucketCost:
        """Of a bucket of `numel` elements, padding included, of `itemsize` bytes each."""
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
    """Costs of the buckets that are compressed, and of those that a plan leaves uncompressed.

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
        """Whether there is no codec."""
        return self.compressed == CodecCost()

    def of(self, plan: BucketPlan, number: int) -> CodecCost:
        """Of bucket `number` of `plan`."""
        return self.uncompressed if number in plan.uncompressed else self.compressed

    def restricted(self, times: ModelTimes) -> ModelTimes:
        """`times` that allow what can be done: with a codec nothing is early, or all-reduced."""
        if self.are_none:
            return times
        return replace(times, allows_early=False, allows_all_reduce=False)


NO_CODEC = CodecCosts()
