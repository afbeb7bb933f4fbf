"""Another plan in mid-training changes when things are sent, and not a bit of what is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.planning import FusionPlanner, NoFusion, SingleFusion, ThresholdFusion
from tests.distributed.harness import distributed
from tests.engine.models import batch, build, loss_of, optimizer_for, weights
from tests.engine.training import SMALL_BUCKETS, new_pipeline

LARGER = ThresholdFusion(bucket_cap_mb=0.05, first_bucket_cap_mb=0.02)
NUM_STEPS = 7


def _train(
    optimizer_name: str, first: FusionPlanner, then: dict[int, FusionPlanner], dtype: torch.dtype
) -> tuple[list[Tensor], dict]:
    model = build("wide_mlp", dtype=dtype)
    optimizer = optimizer_for(optimizer_name, model)
    pipeline = new_pipeline(model, optimizer, first)
    part = pipeline.parts[0]
    for step in range(NUM_STEPS):
        if step in then:
            part.replan(then[step].plan(part.tensors, dist.get_world_size()))
            assert not optimizer.state
        with pipeline.forward():
            loss = loss_of(model, *batch("wide_mlp", step, dist.get_rank(), dtype))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    state = part.optimizer_state_dict()
    pipeline.detach()
    return weights(model), state


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
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    part = pipeline.parts[0]
    with pytest.raises(RuntimeError, match="from the first step on"):
        part.replan(SingleFusion().plan([], 2))
    for step in range(2):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        if step == 1:
            with pytest.raises(RuntimeError, match="no step has used yet"):
                part.replan(SingleFusion().plan(part.tensors, 2))
        optimizer.step()
    plan, tensors = part.plan, part.tensors
    with pytest.raises(ValueError, match="for 3 ranks, and there are 2"):
        part.replan(SingleFusion().plan(tensors, 3))
    with pytest.raises(ValueError, match="for another model"):
        part.replan(SingleFusion().plan(tensors[1:], 2))
    own = SingleFusion() if dist.get_rank() else NoFusion()
    with pytest.raises(ValueError, match="Ranks were given other plans"):
        part.replan(own.plan(tensors, 2))
    assert part.plan is plan
    part.replan(replace(plan, name="renamed"))
    assert part.plan.name == "renamed"
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_measured_step_tells_when_parameters_are_read_and_gradients_ready() -> None:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    part = pipeline.parts[0]
    for step in range(4):
        if step == 2:
            pipeline.measure_next_step()
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        assert (part.times is None) == (step <= 2)
        optimizer.step()
    times, tensors = part.times, part.tensors
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
