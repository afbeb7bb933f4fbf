"""gather="parameters" with encoded differences: replicas follow their masters, at a distance."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.compression import (
    CODECS,
    Bf16,
    Codec,
    Fp16,
    Int4,
    Int8,
    LoCo,
    SignSGD,
)
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.training.lagging import LaggingEFSignSGD, LaggingTopK
from tests.training.models import build, distance, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_dear, train_steps

LARGEST_LAG = {Fp16(): 1e-3, Bf16(): 1e-3, Int8(): 1e-3, Int4(): 1e-2, LoCo(): 1e-2}


def masters_of(part: OptimizerPipeline) -> list[Tensor]:
    """What owners step, in the order of the optimizer's parameters. Collective."""
    state = part.optimizer_state_dict()["state"]
    return [state[number]["master_weight"] for number in sorted(state)]


def _in_groups(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def _norm(tensors: list[Tensor]) -> float:
    return sum(float(one.double().square().sum()) for one in tensors) ** 0.5


def _start(
    codec: Codec, name: str = "sgd", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer, Pipeline]:
    model = build("mlp", dtype=dtype)
    optimizer = optimizer_for(name, model)
    return (
        model,
        optimizer,
        new_pipeline(model, optimizer, options=ExchangeOptions(compressor=codec)),
    )


@pytest.mark.parametrize("optimizer_name", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
@distributed(world_sizes=(1, 3))
def test_replicas_are_close_behind(optimizer_name: str) -> None:
    _check_lag(optimizer_name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@distributed(world_sizes=(1, 2, 3, 4))
def test_replicas_are_close_behind_for_fifty_steps(optimizer_name: str) -> None:
    _check_lag(optimizer_name, 50)


def _check_lag(optimizer_name: str, num_steps: int) -> None:
    for codec, largest in LARGEST_LAG.items():
        model, optimizer, pipeline = _start(codec, optimizer_name)
        for step in range(num_steps):
            train_steps(pipeline, model, [step])
            masters = masters_of(pipeline.parts[0])
            replicas = _in_groups(optimizer)
            lag = _norm([a - b for a, b in zip(masters, replicas, strict=True)])
            assert lag <= largest * _norm(masters), (codec, step)
            assert lag > 0, codec
        pipeline.detach()


@distributed(world_sizes=(3,))
def test_all_ranks_have_the_same_bits_at_every_step() -> None:
    _check_bits(5)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=240)
def test_all_ranks_have_the_same_bits_at_each_of_fifty_steps() -> None:
    _check_bits(50)


def _check_bits(num_steps: int) -> None:
    for codec in (*LARGEST_LAG, LaggingEFSignSGD(), LaggingTopK(density=0.1)):
        trace = train_dear("mlp", "adamw", num_steps, options=ExchangeOptions(compressor=codec))
        assert_equal_on_all_ranks(trace)
        again = train_dear("mlp", "adamw", num_steps, options=ExchangeOptions(compressor=codec))
        for one, other in zip(trace[0][-1], again[0][-1], strict=True):
            assert torch.equal(one, other), codec


@distributed(world_sizes=(1, 2))
def test_half_precision_parameters_follow_too() -> None:
    model, optimizer, pipeline = _start(Int8(), dtype=torch.bfloat16)
    train_steps(pipeline, model, range(10))
    masters = masters_of(pipeline.parts[0])
    assert all(master.dtype == torch.float32 for master in masters)
    lag = _norm([a - b for a, b in zip(masters, _in_groups(optimizer), strict=True)])
    # What bf16 rounds, and what int8 leaves.
    assert lag <= 5e-3 * _norm(masters)


@distributed(world_sizes=(2,))
def test_what_is_written_between_steps_counts() -> None:
    model, optimizer, pipeline = _start(Int4())
    train_steps(pipeline, model, range(3))
    before = masters_of(pipeline.parts[0])
    with torch.no_grad():
        first = next(iter(model.parameters()))
        written = first.detach().clone()
        first.mul_(2.0)
        first[0, 0] = 7.0
    after = masters_of(pipeline.parts[0])
    number = [id(p) for p in _parameters(optimizer)].index(id(first))
    torch.testing.assert_close(after[number][0, 0], first.detach()[0, 0], rtol=0, atol=0.05)
    moved = first.detach() - written
    torch.testing.assert_close(after[number] - before[number], moved)
    for place, (one, other) in enumerate(zip(before, after, strict=True)):
        if place != number:
            assert torch.equal(one, other)
    train_steps(pipeline, model, [3])
    pipeline.complete_parameters()
    assert abs(float(first.detach()[0, 0]) - 7.0) < 0.5


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@distributed(world_sizes=(2,))
def test_another_plan_leaves_masters_and_replicas_alone() -> None:
    model, optimizer, pipeline = _start(Int4())
    train_steps(pipeline, model, range(3))
    pipeline.complete_parameters()
    before = copy.deepcopy((masters_of(pipeline.parts[0]), weights(model)))
    part = pipeline.parts[0]
    part.replan(SingleFusion().plan(part.tensors, dist.get_world_size()))
    after = masters_of(pipeline.parts[0]), weights(model)
    for one, other in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"compressor": CODECS[name]()}, f"with {name} ranks would fall far behind")
            for name in (
                "topk",
                "efsignsgd",
                "onebit",
                "randomk",
                "qsgd",
                "terngrad",
                "natural",
                "signsgd",
                "signum",
                "dgc",
            )
        ),
        ({"gather": "gradients", "compressor": Int8(), "decouple": False}, "decouple=False"),
    ],
)
def test_codecs_that_cannot_send_differences_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangeOptions(**options)


@distributed(world_sizes=(1, 2))
def test_other_precisions_at_any_world_size() -> None:
    for dtype, largest in ((torch.float64, 1e-3), (torch.bfloat16, 0.02)):
        dense = train_dear("mlp", "sgd", 4, dtype=dtype)
        for codec in (Int8(), Int8(halves="reduce")):
            ours = train_dear(
                "mlp", "sgd", 4, dtype=dtype, options=ExchangeOptions(compressor=codec)
            )
            if dtype is torch.float64:
                assert_equal_on_all_ranks(ours)
            assert 0 < distance(ours[0][-1], dense[0][-1]) < largest, (dtype, codec)
    gradients = ExchangeOptions("gradients", compressor=SignSGD())
    signs = train_dear("mlp", "maximize", 1, dtype=torch.float64, options=gradients)
    steps = (signs[0][-1][0] - build("mlp", dtype=torch.float64).layers[0].weight).abs()
    assert float(steps.max()) < 0.011


@distributed(world_sizes=(2,))
def test_masters_that_others_have_not_stepped_are_forgotten() -> None:
    """int8 of parameters, then of gradients, then of parameters again."""
    model, optimizer, pipeline = _start(Int8(), "adamw")
    train_steps(pipeline, model, range(3))
    pipeline.detach()
    state = pipeline.parts[0].optimizer_state_dict()
    assert "master_weight" in state["state"][0]
    other_optimizer = optimizer_for("adamw", model)
    options = ExchangeOptions("gradients", compressor=Int8())
    other = new_pipeline(model, other_optimizer, options=options)
    other_optimizer.load_state_dict(state)
    train_steps(other, model, [3])
    assert "master_weight" not in other.parts[0].optimizer_state_dict()["state"][0]


@distributed(world_sizes=(1, 3))
def test_replicas_can_be_made_equal_to_masters() -> None:
    model, optimizer, pipeline = _start(Int4(), "adamw")
    train_steps(pipeline, model, range(4))
    pipeline.parts[0].sync_replicas()
    for master, replica in zip(masters_of(pipeline.parts[0]), _in_groups(optimizer), strict=True):
        assert torch.equal(master, replica)
    assert_equal_on_all_ranks(([weights(model)], []))
    train_steps(pipeline, model, [4])
    masters = masters_of(pipeline.parts[0])
    lag = _norm([a - b for a, b in zip(masters, _in_groups(optimizer), strict=True)])
    assert 0 < lag <= 1e-2 * _norm(masters)


@distributed(world_sizes=(2,))
def test_what_was_written_or_loaded_is_made_equal_too() -> None:
    model, optimizer, pipeline = _start(Int4(), "adamw")
    train_steps(pipeline, model, range(3))
    saved = copy.deepcopy(pipeline.parts[0].optimizer_state_dict())
    masters = masters_of(pipeline.parts[0])
    first, second = _in_groups(optimizer)[:2]
    with torch.no_grad():
        first.mul_(2.0)
    written = next(p for p in model.parameters() if p.data_ptr() == second.data_ptr())
    written.data = second + 5.0
    pipeline.parts[0].sync_replicas()
    synced = _in_groups(optimizer)
    torch.testing.assert_close(synced[0], masters[0] + first / 2, rtol=0, atol=0.05)
    torch.testing.assert_close(synced[1], masters[1] + 5.0)
    for replica, master in zip(synced, masters_of(pipeline.parts[0]), strict=True):
        assert torch.equal(replica, master)
    optimizer.load_state_dict(saved)
    pipeline.parts[0].sync_replicas()
    for replica, master in zip(_in_groups(optimizer), masters, strict=True):
        assert torch.equal(replica, master)


@distributed(world_sizes=(2,))
def test_the_lag_is_known_in_any_precision() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model, optimizer, pipeline = _start(Int8(), dtype=dtype)
        train_steps(pipeline, model, range(3))
        pipeline.complete_parameters()
        assert 0 < float(pipeline.parts[0].encoding_figures()["lag"]) <= 5e-3
        pipeline.detach()
