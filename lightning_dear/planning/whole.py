"""A plan without tensors that are cut, for optimizers that need to see them whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from lightning_dear.planning.plan import (
    ALIGNMENT,
    BucketPlan,
    BucketSpec,
    Slice,
    TensorSpec,
    aligned,
    reduce_order,
)


def with_whole_tensors(plan: BucketPlan, tensors: Sequence[TensorSpec]) -> BucketPlan:
    """`plan`, but every tensor that it cuts has a bucket of its own. Pure.

    What else was in its buckets stays together, before it or after it; no bucket is early, or
    all-reduced. A bucket is uncompressed if the one was that all it holds began in.

    Args:
        plan: Over `tensors`.
        tensors: For their sizes and the order of their gradients.
    """
    num_parts = Counter(piece.tensor for bucket in plan.buckets for piece in bucket.slices)
    if max(num_parts.values(), default=1) == 1:
        return replace(plan, early=(), all_reduced=())
    numel = {tensor.index: tensor.numel for tensor in tensors}
    unit = ALIGNMENT * plan.world_size
    buckets: list[BucketSpec] = []
    uncompressed: list[int] = []
    placed: set[int] = set()
    for number, bucket in enumerate(plan.buckets):
        # A run of tensors that lie in one bucket alone, or one that is cut.
        for is_cut, run in groupby(bucket.slices, lambda piece: num_parts[piece.tensor] > 1):
            members = [piece.tensor for piece in run if piece.tensor not in placed]
            placed.update(members)
            for own in [[member] for member in members] if is_cut else [members]:
                if number in plan.uncompressed:
                    uncompressed.append(len(buckets))
                buckets.append(_bucket(bucket.family, own, numel, unit))
    order = reduce_order(buckets, tensors)
    return BucketPlan(
        f"{plan.name}, no tensor cut",
        plan.world_size,
        tuple(buckets),
        order,
        uncompressed=tuple(uncompressed),
    )


def _bucket(family: str, members: Sequence[int], numel: dict[int, int], unit: int) -> BucketSpec:
    slices, filled = [], 0
    for member in members:
        slices.append(Slice(member, 0, numel[member], filled))
        filled += aligned(numel[member])
    return BucketSpec(family, tuple(slices), aligned(filled, unit))
