"""Plans cover every element once, in order, within their caps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.planning import (
    FUSIONS,
    BucketPlan,
    FusionPlanner,
    NoFusion,
    SearchingPlanner,
    SingleFusion,
    TensorSpec,
    ThresholdFusion,
    resolve_fusion,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.plan import ALIGNMENT, aligned

ITEMSIZE = 4
FAMILIES = ["float32", "bfloat16"]


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    numels = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=25))
    first_use = draw(st.permutations(range(len(numels))))
    ready = draw(st.permutations(range(len(numels))))
    return [
        TensorSpec(
            index=index,
            name=f"tensor {index}",
            numel=numel,
            itemsize=ITEMSIZE,
            family=draw(st.sampled_from(FAMILIES)),
            first_use=draw(st.sampled_from([first_use[index], None])),
            ready=draw(st.sampled_from([ready[index], None])),
        )
        for index, numel in enumerate(numels)
    ]


class Grouped:
    """Neighbours in the order of gradients, so many at a time, through `fuse_groups`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        used = sorted((one for one in tensors if one.is_used), key=lambda one: one.ready)
        families = [[t.index for t in used if t.family == name] for name in FAMILIES]
        groups = [
            family[start : start + self.size]
            for family in families
            for start in range(0, len(family), self.size)
        ]
        return fuse_groups("grouped", tensors, world_size, groups)


planners = st.one_of(
    st.builds(Grouped, st.integers(1, 6)),
    st.just(NoFusion()),
    st.just(SingleFusion()),
    st.builds(
        ThresholdFusion,
        bucket_cap_mb=st.floats(1e-4, 1e-2),
        first_bucket_cap_mb=st.floats(1e-4, 1e-2),
    ),
)


def _ranges(plan: BucketPlan) -> dict[int, list[tuple[int, int]]]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    for bucket in plan.buckets:
        for piece in bucket.slices:
            ranges.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    return ranges


@given(models(), planners, st.integers(1, 5))
def test_every_element_lies_in_exactly_one_bucket(
    tensors: list[TensorSpec], planner: FusionPlanner, world_size: int
) -> None:
    ranges = _ranges(planner.plan(tensors, world_size))
    assert sorted(ranges) == [tensor.index for tensor in tensors]
    for tensor in tensors:
        edges = ranges[tensor.index]
        assert edges[0][0] == 0
        assert edges[-1][1] == tensor.numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))


@given(models(), planners, st.integers(1, 5))
def test_buckets_are_aligned_shardable_and_of_one_family(
    tensors: list[TensorSpec], planner: FusionPlanner, world_size: int
) -> None:
    plan = planner.plan(tensors, world_size)
    family = {tensor.index: tensor.family for tensor in tensors}
    for bucket in plan.buckets:
        assert bucket.padded_numel % (ALIGNMENT * world_size) == 0
        assert bucket.padded_numel >= bucket.numel
        end = 0
        for piece in bucket.slices:
            assert family[piece.tensor] == bucket.family
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset == aligned(end)
            end = piece.offset + piece.numel
        assert bucket.padded_numel - end < ALIGNMENT * world_size


@given(models(), planners, st.integers(1, 5))
def test_a_split_tensor_stays_contiguous_in_its_family(
    tensors: list[TensorSpec], planner: FusionPlanner, world_size: int
) -> None:
    plan = planner.plan(tensors, world_size)
    position: dict[str, int] = {}
    begins: dict[int, int] = {}
    for bucket in plan.buckets:
        base = position.get(bucket.family, 0)
        for piece in bucket.slices:
            begin = begins.setdefault(piece.tensor, base + piece.offset)
            assert base + piece.offset - begin == piece.start
        position[bucket.family] = base + bucket.padded_numel


@given(models(), st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), st.integers(2, 5))
def test_caps_hold_except_for_rounding(
    tensors: list[TensorSpec], cap_mb: float, first_mb: float, world_size: int
) -> None:
    planner = ThresholdFusion(bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_mb)
    slack = ALIGNMENT * world_size
    for bucket in planner.plan(tensors, world_size).buckets:
        assert bucket.padded_numel * ITEMSIZE <= cap_mb * 2**20 + 2 * slack * ITEMSIZE


@given(models(), planners, st.integers(1, 5))
def test_orders_follow_the_recording_and_unused_tensors_hold_nobody_up(
    tensors: list[TensorSpec], planner: FusionPlanner, world_size: int
) -> None:
    plan = planner.plan(tensors, world_size)
    by_index = {tensor.index: tensor for tensor in tensors}
    assert sorted(plan.reduce_order) == list(range(len(plan.buckets)))
    is_used = [
        {by_index[piece.tensor].is_used for piece in bucket.slices} for bucket in plan.buckets
    ]
    assert all(len(kinds) == 1 for kinds in is_used)
    for order in (range(len(plan.buckets)), plan.reduce_order):
        kinds = [is_used[number] == {True} for number in order]
        assert kinds == sorted(kinds, reverse=True)
    opening = [
        by_index[bucket.slices[0].tensor]
        for bucket, kinds in zip(plan.buckets, is_used, strict=True)
        if kinds == {True}
    ]
    uses = [float("inf") if one.first_use is None else one.first_use for one in opening]
    assert uses == sorted(uses)
    last = [
        max(by_index[piece.tensor].ready for piece in plan.buckets[number].slices)
        for number in plan.reduce_order
        if is_used[number] == {True}
    ]
    assert last == sorted(last)


def test_the_bucket_nearest_the_input_is_small_and_large_tensors_are_split() -> None:
    tensors = [
        TensorSpec(0, "embedding", 30522 * 768, 4, "f", first_use=0, ready=2),
        TensorSpec(1, "bias", 768, 4, "f", first_use=1, ready=1),
        TensorSpec(2, "head", 768 * 768, 4, "f", first_use=2, ready=0),
    ]
    plan = ThresholdFusion(bucket_cap_mb=8, first_bucket_cap_mb=1).plan(tensors, 4)
    sizes_mb = [bucket.padded_numel * 4 / 2**20 for bucket in plan.buckets]
    assert sizes_mb[0] == pytest.approx(1, rel=0.01)
    assert max(sizes_mb) <= 8.01
    assert len(_ranges(plan)[0]) == 13
    assert plan.reduce_order[0] == len(plan.buckets) - 1


def test_only_the_first_bucket_has_the_first_cap() -> None:
    mib = 1 << 20
    sizes = [mib // 2, 3 * mib, mib // 2]
    tensors = [
        TensorSpec(i, "t", size // 4, 4, "f", first_use=i, ready=2 - i)
        for i, size in enumerate(sizes)
    ]
    plan = ThresholdFusion(bucket_cap_mb=4, first_bucket_cap_mb=1).plan(tensors, 2)
    assert [bucket.padded_numel * 4 / mib for bucket in plan.buckets] == [0.5, 3.5]


@pytest.mark.parametrize(
    ("world_size", "cap_mb"), [(2, 8), (3, 12), (4, 16), (6, 24), (7, 25), (64, 25)]
)
def test_the_default_cap_grows_with_the_number_of_ranks(world_size: int, cap_mb: int) -> None:
    tensors = [TensorSpec(i, "t", 1 << 18, 4, "f", first_use=i, ready=80 - i) for i in range(80)]
    plan = ThresholdFusion().plan(tensors, world_size)
    sizes_mb = [bucket.numel >> 18 for bucket in plan.buckets]
    assert (sizes_mb[0], max(sizes_mb)) == (1, cap_mb)
    assert ThresholdFusion(bucket_cap_mb=8).plan(tensors, world_size).buckets[1].numel >> 18 == 8


def test_one_rank_needs_one_bucket() -> None:
    tensors = [TensorSpec(i, "t", 1 << 22, 4, "f", first_use=i, ready=9 - i) for i in range(9)]
    assert len(ThresholdFusion().plan(tensors, 1).buckets) == 1


@pytest.mark.parametrize("option", ["bucket_cap_mb", "first_bucket_cap_mb"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_caps_must_be_positive(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be > 0"):
        ThresholdFusion(**{option: value})


def test_unknown_fusion_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="valid names: " + ", ".join(FUSIONS)):
        resolve_fusion("bogus", None)


def test_a_cap_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="has no effect"):
        resolve_fusion("single", 4)
    with pytest.raises(ValueError, match="has no effect"):
        resolve_fusion(ThresholdFusion(), 4)
    planner = resolve_fusion("threshold", 7)
    assert isinstance(planner, ThresholdFusion)
    assert planner.bucket_cap_mb == 7


@pytest.mark.parametrize("name", FUSIONS)
def test_every_name_makes_a_planner_that_can_begin_without_times(name: str) -> None:
    planner = resolve_fusion(name, None)
    tensors = [TensorSpec(i, f"t{i}", 1 << 18, 4, "f", first_use=i, ready=9 - i) for i in range(9)]
    plan = planner.plan(tensors, 2)
    searches = ("mgwfbp", "bayesian", "mergecomp", "mergecomp_heuristic", "auto")
    assert isinstance(planner, SearchingPlanner) is (name in searches)
    if name in searches:
        assert planner.name == name
        assert plan == ThresholdFusion().plan(tensors, 2)


def test_something_else_is_no_planner() -> None:
    with pytest.raises(TypeError, match="plan"):
        resolve_fusion(3, None)  # type: ignore[arg-type]
