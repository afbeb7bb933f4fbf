"""MG-WFBP: merges tensors that would only wait for each other (Shi et al., arXiv 1811.11141)."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from lightning_dear.planning.codec_cost import NO_CODEC, CodecCosts
from lightning_dear.planning.cost import LinkCost
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.plan import BucketPlan, TensorSpec
from lightning_dear.planning.search import PredictingPlanner
from lightning_dear.planning.times import ModelTimes


class MGWFBPFusion(PredictingPlanner):
    """Merges a tensor into the next one of backward where that saves a start and delays nothing.

    Needs measured times: until then it trains with `ThresholdFusion`'s buckets. Its plan is used
    without being measured against others. No tensor is cut. Tensors of different families are
    planned apart, each as if it had the link to itself.
    """

    name = "mgwfbp"

    @override
    def best_plan(
        self,
        tensors: Sequence[TensorSpec],
        world_size: int,
        times: ModelTimes,
        link: LinkCost,
        codecs: CodecCosts = NO_CODEC,
    ) -> BucketPlan:
        """The plan that the rule makes, with the costs of a reduce-scatter in `link`.

        The rule knows nothing of `codecs`, so that the strategy refuses it with a compressor.
        """
        per_byte_s = link.beta_s * (world_size - 1) / world_size
        groups = [
            [family[place].index for place in group]
            for family in backward_order(tensors, times)
            for group in merged(
                [one.numel * one.itemsize for one in family],
                [times.ready_s.get(one.index, times.backward_s) for one in family],
                link.alpha_s,
                per_byte_s,
            )
        ]
        return fuse_groups(self.name, tensors, world_size, groups)


def backward_order(tensors: Sequence[TensorSpec], times: ModelTimes) -> list[list[TensorSpec]]:
    """The tensors that get gradients, in the order of those, family by family; largest first."""
    families: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        if tensor.is_used:
            families.setdefault(tensor.family, []).append(tensor)
    for family in families.values():
        family.sort(
            key=lambda one: (times.ready_s.get(one.index, times.backward_s), one.ready, -one.index)
        )
    return sorted(
        families.values(), key=lambda family: -sum(one.numel * one.itemsize for one in family)
    )


def merged(
    sizes: Sequence[float], ready_s: Sequence[float], alpha_s: float, beta_s: float
) -> list[list[int]]:
    """The groups that the MG-WFBP rule makes; both arguments and groups are in backward order.

    With `t = alpha + beta x size` and a group `l` that would begin at `c` (when the link is free
    and its last gradient is there), the next tensor, ready at `r`, joins the group if it is ready
    before the group has been sent, `r < c + t`, and either the group has not begun by then,
    `c > r`, or waiting for it costs less than a start, `r - c < alpha`. As alpha is between 0 and
    t, this comes to `r - c < alpha`.

    Args:
        sizes: Bytes of each tensor.
        ready_s: When each gradient is there; not decreasing.
        alpha_s: Start of an exchange, seconds.
        beta_s: Seconds for a byte of a tensor.
    """
    groups: list[list[int]] = []
    free_s = begin_s = end_s = size = 0.0
    for place, (nbytes, at_s) in enumerate(zip(sizes, ready_s, strict=True)):
        if groups and at_s - begin_s < alpha_s:
            groups[-1].append(place)
            size += nbytes
        else:
            groups.append([place])
            free_s, size = end_s, nbytes
        begin_s = max(free_s, at_s)
        end_s = begin_s + alpha_s + beta_s * size
    return groups
