"""Plans with all-reduced buckets, beside sharded ones: the same bits, norms and state."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.checkpoint.folder import load, save
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.planning import BucketPlan, FusionPlanner, TensorSpec
from tests.checkpoint.test_distributed_checkpoint import assert_equal as assert_same
from tests.distributed.harness import distributed, run_ranks
from tests.engine import test_replan
from tests.engine.test_gradients import assert_close, assert_equal
from tests.engine.test_parity import assert_equal as assert_equal_traces
from tests.training.delays import Delays
from tests.training.models import batch, build, distance, loss_of, optimizer_for, weights
from tests.training.three_ways import (
    SMALL_BUCKETS,
    new_pipeline,
    train_ddp,
    train_dear,
    train_steps,
)

LATE = Delays(before_all_gather_s=0.01, after_reduce_scatter_s=0.005)


class Mixed:
    """Small buckets, of which every third is all-reduced, or all are."""

    def __init__(self, *, has_all: bool = False) -> None:
        self.has_all = has_all

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        plan = SMALL_BUCKETS.plan(tensors, world_size)
        chosen = plan.reduce_order[:: 1 if self.has_all else 3]
        return replace(plan, all_reduced=tuple(sorted(chosen)))


ALL, MIXED = Mixed(has_all=True), Mixed()


def assert_same_on_all_ranks(values: Sequence[Tensor]) -> None:
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.detach().flatten().view(torch.uint8).numpy().tobytes())
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    assert set(everyone) == {everyone[0]}


@distributed(world_sizes=(1, 2))
def test_two_ranks_have_the_bits_of_ddp(world_size: int) -> None:
    models = ("gpt", "conv", "channels_last") if world_size > 1 else ("mlp",)
    for model in models:
        optimizer = "sgd" if model == "conv" else "adamw"
        theirs = train_ddp(model, optimizer, 5)
        for fusion in (ALL, MIXED):
            ours = train_dear(model, optimizer, 5, fusion, delays=LATE)
            assert_equal_traces(ours, theirs)
            assert ours[1] == theirs[1]
            assert_same_on_all_ranks(ours[0][-1])


@distributed(world_sizes=(3,))
def test_three_ranks_stay_alike_and_are_as_ddp_but_for_rounding() -> None:
    for fusion in (ALL, MIXED):
        ours = train_dear("mlp", "adamw", 10, fusion)[0][-1]
        assert_same_on_all_ranks(ours)
        ours = train_dear("mlp", "adamw", 10, fusion, dtype=torch.float64)[0][-1]
        theirs = train_ddp("mlp", "adamw", 10, dtype=torch.float64)[0][-1]
        assert distance(ours, theirs) <= 1e-8


@distributed(world_sizes=(2,))
def test_a_backward_so_slow_that_reductions_arrive_in_it() -> None:
    model = build("deep_mlp")
    pipeline = new_pipeline(model, optimizer_for("adamw", model), MIXED)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.01))
    train_steps(pipeline, model, range(5), "deep_mlp")
    assert 0 < len(pipeline.parts[0].plan.all_reduced) < len(pipeline.parts[0].plan.buckets)
    pipeline.detach()
    assert_equal(weights(model), train_dear("deep_mlp", "adamw", 5)[0][-1])


@distributed(world_sizes=(2, 3))
def test_nothing_of_them_is_gathered_or_scattered(world_size: int) -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model), ALL)
    ledger = pipeline.collectives.ledger
    train_steps(pipeline, model, range(3))
    pipeline.detach()
    plan = pipeline.parts[0].plan
    sent_bytes = 4 * plan.padded_numel // world_size * (world_size - 1)
    assert ledger["reduce_scatter"] == ledger["all_gather"] == 0
    assert ledger["all_reduce"] == 3 * 2 * sent_bytes


Change = Callable[[OptimizerPipeline, nn.Module, list[Tensor]], None]
"""What is done between backward and step; notes what it sees."""


def _train(
    fusion: FusionPlanner, change: Change, num_backwards: int = 1, *, synchronize: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer, fusion)
    seen: list[Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(num_backwards):
            with pipeline.forward():
                loss = loss_of(model, *batch("mlp", 10 * step + number, dist.get_rank()))
            is_last = number == num_backwards - 1
            with pipeline.backward(synchronize=synchronize or is_last):
                loss.backward()
        change(pipeline.parts[0], model, seen)
        optimizer.step()
    pipeline.detach()
    return weights(model), seen


def _nothing(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    pass


def _norm(norm_type: float, part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    seen.append(part.mean.norm(norm_type))


def _clip(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    seen.append(part.mean.clip_by_norm(0.05))


def _clip_values(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    part.mean.clip_by_value(1e-3)


def _change_whole_gradients(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    part.mean.expose()
    seen.extend(parameter.grad.clone() for parameter in model.parameters())
    next(iter(model.parameters())).grad = None
    for parameter in list(model.parameters())[1:]:
        parameter.grad = parameter.grad.sign()


def _again(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    """Another round: one rank has another gradient for a bucket that is reduced already."""
    part.mean.reduce()
    with part.backward(synchronize=True):
        if dist.get_rank() == 1:
            (model.layers[0].weight.sum() * 0.25).backward()


def _unscale(part: OptimizerPipeline, model: nn.Module, seen: list[Tensor]) -> None:
    def unscale(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    part.mean.unscale(unscale)


CHANGES: dict[str, Change] = {
    **{f"norm {p}": partial(_norm, p) for p in (1.0, 2.0, math.inf)},
    "clip": _clip,
    "clip values": _clip_values,
    "whole gradients": _change_whole_gradients,
    "another round": _again,
    "unscale": _unscale,
}


@distributed(world_sizes=(2, 3))
def test_between_backward_and_step_it_is_as_with_shards() -> None:
    for name, change in CHANGES.items():
        print(name)
        expected, expected_seen = _train(SMALL_BUCKETS, change)
        ours, seen = _train(MIXED, change)
        assert_close(ours, expected)
        assert len(seen) == len(expected_seen)
        assert_close(seen, expected_seen)
        assert_same_on_all_ranks([*ours, *seen])


@distributed(world_sizes=(2,))
def test_accumulated_gradients_are_added() -> None:
    for synchronize in (True, False):
        expected, _ = _train(SMALL_BUCKETS, _nothing, 3, synchronize=synchronize)
        ours, _ = _train(MIXED, _nothing, 3, synchronize=synchronize)
        assert_equal(ours, expected)


@distributed(world_sizes=(2, 3))
def test_a_parameter_that_one_rank_uses() -> None:
    """And one that none does, from the second step on: it keeps its value, whatever its state."""

    def train(fusion: FusionPlanner) -> list[Tensor]:
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
        pipeline = new_pipeline(parts, optimizer, fusion)
        for step in range(4):
            with pipeline.forward():
                x = parts[0](torch.full((2, 40), 1.0 + step + dist.get_rank()))
                if step == 0 or dist.get_rank() == 1:
                    x = x + parts[1](x)
                if step == 0:
                    x = x + parts[2](x)
                loss = parts[3](x).square().mean()
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            optimizer.step()
            if step == 0:
                unused = weights(parts[2])
        pipeline.detach()
        assert_equal(weights(parts[2]), unused)
        return weights(parts)

    ours = train(MIXED)
    assert_same_on_all_ranks(ours)
    assert_close(ours, train(SMALL_BUCKETS))


@distributed(world_sizes=(1, 2))
def test_a_backward_through_values_from_before_a_step_is_refused() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model), ALL)
    train_steps(pipeline, model, range(2))
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", 2, dist.get_rank()))
    with pipeline.backward():
        loss.backward(retain_graph=True)
    pipeline.parts[0].optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    pipeline.abandon()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@distributed(world_sizes=(2,))
def test_new_plans_with_more_and_fewer_of_them_change_no_bit(dtype: torch.dtype) -> None:
    """At two ranks, where a sum has one order; masters of 16 bits are summed in fp32 either way."""
    expected = test_replan._train("adamw", SMALL_BUCKETS, {}, dtype)
    plans = {2: SMALL_BUCKETS, 3: ALL, 5: test_replan.LARGER, 6: MIXED}
    test_replan._assert_same(test_replan._train("adamw", MIXED, plans, dtype), expected)


def _train_and_save(folder: Path) -> dict:
    """Returns the whole state; checks that plain torch and any plan train on with it."""
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer, MIXED)
    train_steps(pipeline, model, range(3))
    state = copy.deepcopy(pipeline.parts[0].optimizer_state_dict())
    assert_same_on_all_ranks([one["exp_avg"] for one in state["state"].values()])
    saved = {"state_dict": model.state_dict(), "lr_schedulers": []}
    save(folder, {**saved, "optimizer_states": [pipeline.of(optimizer).sharded_state_dict()]})
    values = copy.deepcopy(model.state_dict())
    ends = []
    for fusion in (None, SMALL_BUCKETS, ALL):
        other = build("mlp", seed=1)
        other_optimizer = optimizer_for("adamw", other)
        resumed = None if fusion is None else new_pipeline(other, other_optimizer, fusion)
        other.load_state_dict(values)
        other_optimizer.load_state_dict(copy.deepcopy(state))
        for step in range(3, 5):
            if resumed is not None:
                train_steps(resumed, other, [step])
                continue
            other_optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                loss = loss_of(other, *batch("mlp", step, rank))
                (loss / dist.get_world_size()).backward()
            other_optimizer.step()
        ends.append(list(other.state_dict().values()))
        if resumed is not None:
            resumed.detach()
    for end in ends[1:]:
        (assert_equal if dist.get_world_size() == 2 else assert_close)(end, ends[0])
    return {**saved, "optimizer_states": [state]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_their_state_is_saved_whole_and_once(tmp_path: Path, world_size: int) -> None:
    whole = run_ranks(_train_and_save, world_size, tmp_path / "saved")[0]
    loaded = load(tmp_path / "saved")
    assert_same(loaded["optimizer_states"], whole["optimizer_states"])
    # Moments of all parameters, and the parameters, once each; a little is the files' own.
    numel = sum(one.numel() for one in loaded["state_dict"].values())
    size = sum(one.stat().st_size for one in (tmp_path / "saved").rglob("*") if one.is_file())
    assert 3 * 4 * numel <= size <= 3.9 * 4 * numel + 40_000
