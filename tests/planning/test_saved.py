"""Plans come back from files as they were, and only for the model they were made for."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    BucketPlan,
    FixedPlan,
    FusionPlanner,
    NoFusion,
    TensorSpec,
    ThresholdFusion,
    save_plan,
)
from tests.planning.test_fusion import models, planners

TENSORS = [TensorSpec(i, f"layer{i}", 300 * (i + 1), 4, "float32", i, 2 - i) for i in range(3)]
PLAN = ThresholdFusion(bucket_cap_mb=2**-10, first_bucket_cap_mb=2**-11).plan(TENSORS, 2)


@settings(max_examples=40)
@given(models(), planners, st.integers(1, 5), st.randoms())
def test_a_plan_comes_back_equal_whatever_the_tensors_are_numbered(
    tensors: list[TensorSpec], planner: FusionPlanner, world_size: int, random: Any
) -> None:
    plan = planner.plan(tensors, world_size)
    uncompressed = tuple(sorted(plan.reduce_order[::2]))
    all_reduced = tuple(sorted(plan.reduce_order[1::2]))
    plan = replace(plan, all_reduced=all_reduced, uncompressed=uncompressed)
    data = json.loads(json.dumps(plan.to_dict(tensors)))
    assert BucketPlan.from_dict(data, tensors, world_size) == plan
    order = list(range(len(tensors)))
    random.shuffle(order)
    moved = sorted(
        (replace(one, index=order[one.index]) for one in tensors), key=lambda one: one.index
    )
    back = BucketPlan.from_dict(data, moved, world_size)
    assert [[order[piece.tensor] for piece in bucket.slices] for bucket in plan.buckets] == [
        [piece.tensor for piece in bucket.slices] for bucket in back.buckets
    ]


@pytest.mark.parametrize("kind", ["all_reduced", "uncompressed"])
def test_plans_of_before_have_no_such_buckets(kind: str) -> None:
    data = replace(PLAN, **{kind: (0,)}).to_dict(TENSORS)  # type: ignore[arg-type]
    assert getattr(BucketPlan.from_dict(data, TENSORS, 2), kind) == (0,)
    del data[kind]
    assert BucketPlan.from_dict(data, TENSORS, 2) == PLAN


def test_gathers_during_backward_are_told_of_and_left_out() -> None:
    data = PLAN.to_dict(TENSORS)
    assert "early" not in data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BucketPlan.from_dict({**data, "early": []}, TENSORS, 2) == PLAN
    early = list(PLAN.reduce_order[:2])
    with pytest.warns(UserWarning, match="gathers 2 buckets during backward.*too little") as told:
        plan = BucketPlan.from_dict({**data, "early": early}, TENSORS, 2)
    assert len(told) == 1
    assert plan == PLAN


def test_a_file_is_read_when_the_plan_is_asked_for(tmp_path: Path) -> None:
    planner = FixedPlan(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        planner.plan(TENSORS, 2)
    save_plan(tmp_path / "plan.json", PLAN, TENSORS)
    assert planner.plan(TENSORS, 2) == PLAN
    assert FixedPlan(PLAN).plan(TENSORS, 2) == PLAN


def _broken(**changes: Any) -> dict[str, Any]:
    return {**PLAN.to_dict(TENSORS), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no plan of format version 1"),
        (_broken(version=2), "no plan of format version 1"),
        ({"version": 1}, "lacks buckets, name"),
        (_broken(world_size=4), "made for 4 ranks, and there are 2"),
        (_broken(tensors=[[0, "else", 300, 4]]), "only for a model with a parameter else"),
        (_broken(tensors=[[0, "layer0", 300, 4]]), "lacks layer1 of this model"),
        (_broken(tensors=[[0, "layer0", 3, 4]]), "layer0 has 3 elements of 4 bytes, here 300 of 4"),
        (_broken(buckets=[[[7, 0, 1]]]), "Tensor 7 of a bucket must"),
        (_broken(buckets=[[[0, 0, 300]]]), "must hold all elements of layer1"),
        (_broken(buckets=[[[0, 128, 300], [0, 0, 128]]]), "tensor 0 once, in order"),
        (_broken(buckets=[[[0, 0, 100]], [[0, 100, 300]]]), "tensor 0 once, in order, unbroken"),
        (_broken(reduce_order=[0]), "reduce_order must name every bucket once"),
        (_broken(all_reduced=[99]), "all_reduced must be bucket numbers"),
        (_broken(uncompressed=[99]), "uncompressed must be bucket numbers"),
        (_broken(uncompressed=[1, 0]), "uncompressed must be .* once and in order"),
        (_broken(uncompressed=[0, 0]), "uncompressed must be .* once and in order"),
    ],
)
def test_what_does_not_fit_is_refused(data: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        FixedPlan(path).plan(TENSORS, 2)


def test_tensors_that_differ_in_type_now_share_no_bucket() -> None:
    data = FixedPlan(PLAN).plan(TENSORS, 2).to_dict(TENSORS)
    data["buckets"] = [[[i, 0, one.numel] for i, one in enumerate(TENSORS)]]
    data["reduce_order"] = [0]
    other = [*TENSORS[:2], replace(TENSORS[2], family="bfloat16")]
    assert len(BucketPlan.from_dict(data, TENSORS, 2).buckets) == 1
    with pytest.raises(ValueError, match="layer0, layer1 in one bucket, where dtype, device"):
        BucketPlan.from_dict(data, other, 2)


def test_a_plan_for_other_tensors_is_refused_without_a_file() -> None:
    plan = NoFusion().plan(TENSORS, 2)
    with pytest.raises(ValueError, match="Tensor 2 of a bucket must"):
        FixedPlan(plan).plan(TENSORS[:2], 2)
    with pytest.raises(ValueError, match="made for 2 ranks"):
        FixedPlan(plan).plan(TENSORS, 3)
