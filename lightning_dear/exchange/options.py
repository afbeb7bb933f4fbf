"""What travels in each half, and in what form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_dear.bucket import LOW_PRECISION, Role
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Codec, Compressor, SparseAllReduce
from lightning_dear.compression.codec import Setting
from lightning_dear.compression.groups import Groups, check_groups, codec_for
from lightning_dear.planning.plan import BucketPlan

GATHERS = ("parameters", "gradients")
"""Names of what an all-gather may carry."""


@dataclass(frozen=True)
class ExchangeOptions(Setting):
    """Options of the strategies, for the engine: a `Setting`, and what is used beside it.

    Attributes:
        compressor: What encodes the halves that it names; None: both travel as they are.
        groups: Other codecs for some tensors.

    Raises:
        ValueError: For unknown names, and options that exclude each other.
    """

    compressor: Compressor | None = None
    groups: Groups = ()

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise ValueError(f"Unknown gather {self.gather!r}; valid names: {', '.join(GATHERS)}.")
        check_groups(self.groups, self.compressor)
        # What cannot be used beside what is the compressors' own matter.
        for compressor in (self.compressor, *(compressor for _, compressor in self.groups)):
            if compressor is not None:
                compressor.check_with(self)
        if not (self.decouple or self.is_of_gradients):
            raise ValueError(
                "decouple=False all-reduces whole gradients, which gather='parameters' has no use"
                " for; set gather='gradients' with it."
            )

    @cached_property
    def all_reduces(self) -> bool:
        """Whether every rank gets whole means during backward, and nothing is gathered."""
        return not self.decouple or (self.compressor is not None and self.compressor.all_reduces)

    @cached_property
    def encodes_both(self) -> bool:
        """Whether what is gathered is encoded, too."""
        return self.compressor is not None and self.compressor.halves == "both"

    @cached_property
    def encodes_differences(self) -> bool:
        """Whether what is gathered is how far replicas are behind their owners, encoded."""
        return not self.is_of_gradients and self.encodes_both

    def codec_of(self, name: str, num_dimensions: int) -> Codec | None:
        """What encodes the tensor of this name, row by row; None: nothing does."""
        if not isinstance(self.compressor, Codec):
            return None
        return codec_for(self.groups, self.compressor, name, num_dimensions)

    def check(self, collectives: Collectives, num_optimizers: int) -> None:
        """Refuses what cannot be done with these collectives and optimizers.

        Raises:
            ValueError: Saying what to leave out.
        """
        compressor = self.compressor
        looks_up_counts = isinstance(compressor, SparseAllReduce) and not compressor.is_static
        if compressor is not None and looks_up_counts and not collectives.has_variable_lengths:
            raise ValueError(
                f"compressor={compressor.name!r} works so with gloo only: how many numbers travel"
                " depends on the gradients, which with NCCL the host would have to wait for. Use"
                " process_group_backend='gloo' on CPUs, or OkTopk(mode='static')."
            )
        # Two optimizers' backwards fill their buckets in an order of each rank's own.
        if self.all_reduces and num_optimizers > 1:
            what = (
                "decouple=False"
                if self.compressor is None
                else f"compressor={self.compressor.name!r}"
            )
            raise ValueError(
                f"{what} works with one optimizer, and there are {num_optimizers}: two optimizers'"
                " all-reduces could start in another order on other ranks. Leave it out."
            )

    @cached_property
    def is_scattered(self) -> bool:
        """Whether of a whole mean gradient each rank has what lies in its region."""
        return self.compressor is not None and self.compressor.is_scattered

    def ranks_together(self, collectives: Collectives) -> int:
        """How many ranks of a host encode their sum, each a part.

        1, each its own gradients: in one hop; if gradients are not encoded; if a codec votes, or
        does not encode row by row.
        """
        is_summed = collectives.hops == 2 and self.encodes_row_by_row
        return collectives.world.ranks_a_host if is_summed else 1

    @cached_property
    def encodes_row_by_row(self) -> bool:
        """Whether every codec does, and none votes: so a host's sum can be encoded."""
        codecs = [self.compressor, *(compressor for _, compressor in self.groups)]
        return all(isinstance(one, Codec) and not one.votes for one in codecs)

    def role_of(self, plan: BucketPlan, number: int, dtype: torch.dtype) -> Role:
        """What ranks do with the plan's bucket `number`, whose parameters are of `dtype`."""
        if self.is_scattered:
            # Whole tensors are stepped, which 16 bits are too few for: there are no masters.
            return Role.SCATTERED
        has_masters = dtype in LOW_PRECISION
        if self.all_reduces or number in plan.all_reduced:
            return Role.REPLICATED_MASTERS if has_masters else Role.REPLICATED
        if self.encodes_differences:
            return Role.LAGGING_MASTERS if has_masters else Role.LAGGING
        if number in plan.early and plan.world_size > 1:
            return Role.EARLY_MASTERS if has_masters else Role.EARLY
        return Role.SHARDED_MASTERS if has_masters else Role.SHARDED


def default_gather(compressor: Compressor | None, groups: Groups = ()) -> str:
    """What travels back if nobody says: parameters, unless a codec cannot send differences."""
    codecs = [] if compressor is None else [compressor, *(other for _, other in groups)]
    send_differences = all(one.halves == "reduce" or one.lag == "small" for one in codecs)
    return "parameters" if send_differences else "gradients"


def why_not_all_reduce(options: ExchangeOptions, *, is_one_optimizer: bool) -> str | None:
    """Why buckets that a plan all-reduces must not be; None if they may.

    Args:
        options: What travels, and how.
        is_one_optimizer: Whether nobody else all-reduces in the same process groups.
    """
    if options.compressor is not None and options.all_reduces:
        return (
            f"with {options.compressor.name} nothing travels there but what it makes of gradients"
        )
    if options.compressor is not None:
        return f"{options.compressor.name} encodes each part for its owner alone"
    if options.is_of_gradients:
        return (
            "gather='gradients' steps every bucket on every rank, and all-reduces all of them with"
            " decouple=False, or none"
        )
    if not is_one_optimizer:
        return "two optimizers' all-reduces could start in another order on other ranks"
    return None
