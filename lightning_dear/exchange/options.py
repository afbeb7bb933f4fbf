"""Options of the exchange: what each half carries, and how it is compressed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from lightning_dear.bucket import LOW_PRECISION, Role
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec, Compressor, SparseAllReduce
from lightning_dear.compression.codec import Setting
from lightning_dear.compression.groups import Groups, check_groups, codec_for
from lightning_dear.planning.plan import BucketPlan

GATHERS = ("parameters", "gradients")
"""Values of the option `gather`, which names what the gather half carries; see `Setting`."""


@dataclass(frozen=True)
class ExchangeOptions(Setting):
    """The strategy's options of the exchange: those of `Setting`, and the compressors.

    Attributes:
        compressor: Compressor of the halves that it names (see `Compressor.halves`). None means no
            compression.
        groups: (pattern, codec) pairs: codecs for the parameters whose names match the pattern,
            in place of `compressor`.
        reduce_dtype: "fp32" means that 16-bit gradients are summed in fp32 on every backend. They
            still travel in 16 bits. None means in the way of the backend.

    Raises:
        ValueError: If `gather` is unknown, if a compressor does not fit the other
            options, or if decouple is False without gather="gradients".
    """

    compressor: Compressor | None = None
    groups: Groups = ()
    reduce_dtype: Literal["fp32"] | None = None

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise ValueError(f"Unknown gather {self.gather!r}; valid names: {', '.join(GATHERS)}.")
        check_groups(self.groups, self.compressor)
        # Each compressor knows which of the other options it cannot be used with.
        for compressor in (self.compressor, *(compressor for _, compressor in self.groups)):
            if compressor is not None:
                compressor.check_with(self)
        if not (self.decouple or self.is_of_gradients):
            raise ValueError(
                "decouple=False all-reduces whole gradients. Pass gather='gradients' with it: then"
                " each rank steps with them. Parameters are gathered only after reduce-scatters."
            )
        if self.reduce_dtype is not None and (self.compressor is not None or not self.decouple):
            raise ValueError(
                "reduce_dtype='fp32' sums gradients at the owners of their shards. Leave it out, or"
                " leave out compressor and decouple=False: a compressor sums what it has decoded,"
                " and all-reduces sum in the backend."
            )

    @cached_property
    def all_reduces(self) -> bool:
        """Whether the reduce half gives every rank the whole mean of all buckets.

        Then nothing is gathered. If False, a plan may still all-reduce some buckets.
        """
        return not self.decouple or (self.compressor is not None and self.compressor.all_reduces)

    @cached_property
    def encodes_both(self) -> bool:
        """Whether the gather half is compressed, too."""
        return self.compressor is not None and self.compressor.halves == "both"

    @cached_property
    def encodes_differences(self) -> bool:
        """Whether the gather half sends encoded differences of shards and replicas.

        So it is if both halves are encoded and parameters are gathered.
        """
        return not self.is_of_gradients and self.encodes_both

    def codec_of(self, name: str, num_dimensions: int) -> Codec | None:
        """Returns the codec of the tensor with this name, from `groups` or `compressor`.

        None means that the compressor is no codec, or that there is none.
        """
        if not isinstance(self.compressor, Codec):
            return None
        return codec_for(self.groups, self.compressor, name, num_dimensions)

    def check(self, collectives: Collectives, num_optimizers: int) -> None:
        """Refuses options that do not fit the collectives or the number of optimizers. Local.

        Raises:
            ValueError: If a sparse all-reduce sends messages of variable length and the collectives
                cannot (NCCL), if all buckets are all-reduced and there are several optimizers, or
                if `reduce_dtype` is given with two hops on NCCL.
        """
        compressor = self.compressor
        looks_up_counts = isinstance(compressor, SparseAllReduce) and not compressor.is_static
        if compressor is not None and looks_up_counts and not collectives.has_variable_lengths:
            raise ValueError(
                f"compressor={compressor.name!r} works only on CPUs. Use compressor=OkTopk("
                "mode='static') on devices: how many values travel depends on the gradients, for"
                " which the host would have to wait."
            )
        needs_gloo = self.reduce_dtype is not None and collectives.hops == 2
        if needs_gloo and not collectives.wait_blocks_host:
            raise ValueError(
                "reduce_dtype='fp32' with hops=2 works only with gloo. Use hops=1: within a host"
                " NCCL sums 16-bit gradients itself."
            )
        # All-reduces are matched by order, and each rank's backward may fill the buckets of two
        # optimizers in another order.
        if self.all_reduces and num_optimizers > 1:
            what = "decouple=False" if compressor is None else f"compressor={compressor.name!r}"
            raise ValueError(
                f"{what} works with one optimizer, and there are {num_optimizers}. Leave it out, or"
                " use one optimizer: ranks could start the all-reduces of two in different orders."
            )

    @cached_property
    def is_scattered(self) -> bool:
        """Whether a sparse all-reduce sums each region of a bucket at one rank (Ok-Topk, TopkDSA).

        If so, buckets have the role SCATTERED. False for codecs, and without a compressor.
        """
        return self.compressor is not None and self.compressor.is_scattered

    def ranks_together(self, collectives: Collectives) -> int:
        """Returns how many ranks first sum on their host, and then each encode a part of that sum.

        In two hops that is all ranks of a host. 1 means that each rank encodes its own gradients,
        if they are encoded at all. 1 is returned in one hop, and if `encodes_row_by_row` is False.
        """
        is_summed = collectives.hops == 2 and self.encodes_row_by_row
        return collectives.world.ranks_a_host if is_summed else 1

    @cached_property
    def encodes_row_by_row(self) -> bool:
        """Whether every compressor is a codec and none votes, so that a host's sum can be encoded.

        False without a compressor. A vote of a host's sum would not be the votes of its ranks.
        """
        codecs = [self.compressor, *(compressor for _, compressor in self.groups)]
        return all(isinstance(codec, Codec) and not codec.votes for codec in codecs)

    def role_of(self, plan: BucketPlan, number: int, dtype: torch.dtype) -> Role:
        """Returns the role of bucket `number` of the plan, whose parameters have `dtype`."""
        if self.is_scattered:
            # SCATTERED has no masters. Gathered gradients are stepped as whole tensors, for which
            # 16-bit parameters are refused.
            return Role.SCATTERED
        has_masters = dtype in LOW_PRECISION
        if self.all_reduces or number in plan.all_reduced:
            return Role.REPLICATED_MASTERS if has_masters else Role.REPLICATED
        if self.encodes_differences:
            return Role.LAGGING_MASTERS if has_masters else Role.LAGGING
        return Role.SHARDED_MASTERS if has_masters else Role.SHARDED


def default_gather(compressor: Compressor | None, groups: Groups = ()) -> str:
    """Returns what the gather half carries if the user does not say.

    That is "gradients" if a compressor of both halves cannot send differences of parameters (its
    `lag` is not "small"). Otherwise it is "parameters".
    """
    codecs = [] if compressor is None else [compressor, *(other for _, other in groups)]
    send_differences = all(codec.halves == "reduce" or codec.lag == "small" for codec in codecs)
    return "parameters" if send_differences else "gradients"


def why_not_all_reduce(options: ExchangeOptions, *, is_one_optimizer: bool) -> str | None:
    """Returns why a plan may not all-reduce some of its buckets. None means that it may.

    The text is a part of error messages.

    Args:
        options: Options of the exchange.
        is_one_optimizer: Whether no other optimizer uses the same process groups. If others do, no
            bucket may be all-reduced.
    """
    if options.compressor is not None:
        whole = "sends every bucket in a form of its own"
        how = whole if options.all_reduces else "encodes each part for its owner alone"
        return f"{options.compressor.name} {how}. Leave it out to use such a plan"
    if options.reduce_dtype is not None:
        return "reduce_dtype='fp32' sums each part at its owner. Leave it out to use such a plan"
    if options.is_of_gradients:
        return (
            "gather='gradients' steps every bucket on every rank, and all-reduces all of them (set"
            " decouple=False for that) or none"
        )
    if not is_one_optimizer:
        return "ranks would start two optimizers' all-reduces in another order. Use one optimizer"
    return None
