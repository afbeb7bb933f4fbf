"""Another plan in mid-training changes when things are sent, and not a bit of what is computed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.engine import active_plan, plan_lifecycle
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import (
    BucketPlan,
    FusionPlanner,
    NoFusion,
    SingleFusion,
    TensorSpec,
    ThresholdFusion,
)
from tests.distributed.harness import distributed
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS, new_pipeline, train_steps

LARGER = ThresholdFusion(bucket_cap_mb=0.05, first_bucket_cap_mb=0.02)
NUM_STEPS = 7


def _train(
    optimizer_name: str, first: FusionPlanner, then: dict[int, FusionPlanner], dtype: torch.dtype
) -> tuple[list[Tensor], dict]:
    model = build("deep_mlp", dtype=dtype)
    optimizer = optimizer_for(optimizer_name, model)
    pipeline = new_pipeline(model, optimizer, first)
    part = pipeline.parts[0]
    for step in range(NUM_STEPS):
        if step in then:
            part.replan(then[step].plan(part.tensors, dist.get_world_size()))
            assert not part.stepper.outside.plain
        train_steps(pipeline, model, [step], "deep_mlp")
    state = part.optimizer_state_dict()
    pipeline.detach()
    return weights(model), state


@distributed(world_sizes=(2, 3))
def test_values_that_have_not_arrived_yet_are_in_the_next_plan() -> None:
    """Without optimizer state, whose exchange would take as long as they do."""
    ends = []
    for delays in (None, Delays(before_all_gather_s=0.05)):
        model = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pipeline = new_pipeline(model, optimizer, delays=delays)
        part = pipeline.parts[0]
        for step in range(4):
            if step in (2, 3) and delays is not None:
                part.replan(
                    (LARGER, SMALL_BUCKETS)[step % 2].plan(part.tensors, part.plan.world_size)
                )
            train_steps(pipeline, model, [step])
        pipeline.detach()
        ends.append(weights(model))
    _assert_same(*ends)


def _assert_same(left: object, right: object) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            _assert_same(one, other)
    else:
        assert left == right


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_a_new_plan_in_mid_run_is_bit_equal_to_the_last_plan_from_the_start(
    optimizer_name: str, dtype: torch.dtype
) -> None:
    changes = {2: SingleFusion(), 3: NoFusion(), 5: LARGER}
    changed = _train(optimizer_name, SMALL_BUCKETS, changes, dtype)
    _assert_same(changed, _train(optimizer_name, LARGER, {}, dtype))


@distributed(world_sizes=(2,))
def test_a_plan_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    part = pipeline.parts[0]
    with pytest.raises(RuntimeError, match="between an optimizer step and the next forward"):
        part.replan(SingleFusion().plan([], 2))

    def refused(step: int) -> None:
        with pytest.raises(RuntimeError, match="no step has used yet"):
            part.replan(SingleFusion().plan(part.tensors, 2))

    train_steps(pipeline, model, [0])
    train_steps(pipeline, model, [1], between=refused)
    plan, tensors = part.plan, part.tensors
    with pytest.raises(ValueError, match="for 3 ranks, and there are 2"):
        part.replan(SingleFusion().plan(tensors, 3))
    with pytest.raises(ValueError, match="for another model"):
        part.replan(SingleFusion().plan(tensors[1:], 2))
    own = SingleFusion() if dist.get_rank() else NoFusion()
    with pytest.raises(ValueError, match="Ranks have different plans"):
        part.replan(own.plan(tensors, 2))
    with (
        mock.patch.object(active_plan, "MAX_BUCKETS", 1),
        pytest.raises(ValueError, match="Fuse more"),
    ):
        part.replan(NoFusion().plan(tensors, 2))
    assert part.plan is plan
    part.replan(replace(plan, name="renamed"))
    assert part.plan.name == "renamed"
    pipeline.detach()


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@distributed(world_sizes=(2,))
def test_the_old_buffers_are_gone_before_there_are_new_ones(gather: str) -> None:
    model = build("mlp")
    options = ExchangeOptions(gather)
    pipeline = new_pipeline(model, optimizer_for("sgd", model), options=options)
    part = pipeline.parts[0]
    train_steps(pipeline, model, [0])
    buffers = [
        weakref.ref(one) for one in (part.plans.active.flat.buckets[0].gradients, part.plans.active)
    ]
    allocate = plan_lifecycle.allocate

    def checked(*args: Any, **options: Any) -> object:
        gc.collect()
        assert [buffer() for buffer in buffers] == [None, None]
        return allocate(*args, **options)

    with mock.patch.object(plan_lifecycle, "allocate", checked):
        part.replan(SingleFusion().plan(part.tensors, 2))
    train_steps(pipeline, model, [1])
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_measured_step_tells_when_parameters_are_read_and_gradients_ready() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    part = pipeline.parts[0]
    are_known: list[bool] = []
    for step in range(4):
        if step == 2:
            pipeline.measure_next_step()
        train_steps(
            pipeline,
            model,
            [step],
            between=lambda _: are_known.append(part.timer.times is not None),
        )
    assert are_known == [False, False, False, True]
    times, tensors = part.timer.times, part.tensors
    assert times is not None
    assert times.first_use_s.keys() == times.ready_s.keys() == {one.index for one in tensors}
    assert all(0 <= one <= times.forward_s for one in times.first_use_s.values())
    assert all(0 <= one <= times.backward_s for one in times.ready_s.values())
    by_use = sorted(tensors, key=lambda one: one.first_use)
    uses = [times.first_use_s[one.index] for one in by_use]
    assert uses == sorted(uses)
    by_ready = sorted(tensors, key=lambda one: one.ready)
    assert [times.ready_s[one.index] for one in by_ready] == sorted(times.ready_s.values())
    pipeline.detach()


class _OtherOnEachRank:
    """As a file of a plan that is older on one host."""

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        return (SingleFusion() if dist.get_rank() else NoFusion()).plan(tensors, world_size)


class _Overlapping:
    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        plan = SingleFusion().plan(tensors, world_size)
        return replace(plan, reduce_order=(0, 0))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(
    ("fusion", "message"),
    [(_OtherOnEachRank(), "Ranks have different plans"), (_Overlapping(), "reduce_order")],
)
def test_a_first_plan_is_checked_too(fusion: FusionPlanner, message: str) -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model), fusion)
    with pytest.raises(ValueError, match=message):
        train_steps(pipeline, model, [0])


@distributed(world_sizes=(1, 2))
def test_masters_of_a_group_without_state_stay() -> None:
    ends = []
    for fusions in ([], [SingleFusion(), NoFusion()]):
        model = build("mlp", dtype=torch.bfloat16)
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "momentum": 0.9}, {"params": parameters[2:]}]
        pipeline = new_pipeline(model, torch.optim.SGD(groups, lr=1e-3))
        part = pipeline.parts[0]
        for step in range(6):
            train_steps(pipeline, model, [step])
            if fusions and step % 2:
                part.replan(fusions[step % 4 // 2].plan(part.tensors, dist.get_world_size()))
        pipeline.detach()
        ends.append(weights(model))
    _assert_same(*ends)


@distributed(world_sizes=(2,))
def test_state_saved_between_unfreezing_and_the_next_step_is_of_the_right_parameters() -> None:
    model = build("mlp")
    parameters = list(model.parameters())
    for parameter in parameters[:2]:
        parameter.requires_grad_(False)
    pipeline = new_pipeline(model, torch.optim.AdamW(parameters))
    train_steps(pipeline, model, [0])
    before = pipeline.parts[0].optimizer_state_dict()["state"]
    for parameter in parameters[:2]:
        parameter.requires_grad_(True)
    with pipeline.forward():
        loss_of(model, *batch("mlp", 1, dist.get_rank()))
    assert pipeline.parts[0].plan is None
    after = pipeline.parts[0].optimizer_state_dict()["state"]
    assert sorted(after) == list(range(2, len(parameters)))
    _assert_same(after, before)
