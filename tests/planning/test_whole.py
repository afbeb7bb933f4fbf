"""A plan whose tensors are not cut: the same tensors once each, in the same order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.planning import NoFusion, TensorSpec, ThresholdFusion
from lightning_dear.planning.plan import ALIGNMENT, BucketPlan, with_whole_tensors


def _tensors(sizes: list[int]) -> list[TensorSpec]:
    return [
        TensorSpec(i, f"t{i}", numel, 4, "float32/cpu", first_use=i, ready=len(sizes) - i)
        for i, numel in enumerate(sizes)
    ]


def _members(plan: BucketPlan) -> list[list[int]]:
    return [[piece.tensor for piece in bucket.slices] for bucket in plan.buckets]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(2, 4))
def test_every_tensor_is_whole_and_where_it_was(sizes: list[int], world_size: int) -> None:
    tensors = _tensors(sizes)
    cut = ThresholdFusion(bucket_cap_mb=0.004, first_bucket_cap_mb=0.002).plan(tensors, world_size)
    whole = with_whole_tensors(cut, tensors)
    assert [member for bucket in _members(whole) for member in bucket] == list(range(len(sizes)))
    for bucket in whole.buckets:
        assert bucket.padded_numel % (ALIGNMENT * world_size) == 0
        end = 0
        for piece in bucket.slices:
            assert (piece.start, piece.stop) == (0, sizes[piece.tensor])
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.numel
        assert end <= bucket.padded_numel
    assert sorted(whole.reduce_order) == list(range(len(whole.buckets)))


def test_a_cut_tensor_has_a_bucket_of_its_own() -> None:
    tensors = _tensors([100, 3000, 100, 100])
    cut = ThresholdFusion(bucket_cap_mb=0.004, first_bucket_cap_mb=0.002).plan(tensors, 2)
    assert sum(members.count(1) for members in _members(cut)) > 1
    whole = with_whole_tensors(cut, tensors)
    assert _members(whole) == [[0], [1], [2, 3]]
    assert whole.reduce_order == (2, 1, 0)
    assert whole.name.endswith("no tensor cut")


def test_what_was_uncompressed_stays_so() -> None:
    tensors = _tensors([100, 3000, 100, 100])
    cut = ThresholdFusion(bucket_cap_mb=0.004, first_bucket_cap_mb=0.002).plan(tensors, 2)
    numbers = range(len(cut.buckets))
    holds_cut = [n for n in numbers if 1 in _members(cut)[n]]
    for left, expected in (
        (holds_cut[:1], {1} if _members(cut)[holds_cut[0]] == [1] else {0, 1}),
        (holds_cut[1:2], set()),
        (numbers[-1:], {2}),
        (numbers, {0, 1, 2}),
    ):
        whole = with_whole_tensors(replace(cut, uncompressed=tuple(left)), tensors)
        assert set(whole.uncompressed) == expected
    whole = replace(NoFusion().plan(tensors, 2), uncompressed=(1, 2))
    assert with_whole_tensors(whole, tensors) == whole


def test_a_plan_that_cuts_nothing_stays_but_for_all_reduced_buckets() -> None:
    tensors = _tensors([100, 3000])
    plan = replace(NoFusion().plan(tensors, 2), all_reduced=(1,))
    assert with_whole_tensors(plan, tensors) == replace(plan, all_reduced=())
