"""Encoded exchanges: the same bits on all ranks, after a resume, and for other ranks that go on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_dear.compression import (
    CODECS,
    Bf16,
    Codec,
    Fp16,
    Int4,
    Int8,
    LoCo,
)
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.exchange.test_coded import ALL, coded
from tests.training.lagging import LaggingEFSignSGD, LaggingTopK
from tests.training.linear import Run
from tests.training.models import build, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_dear, train_steps

LAGGING: tuple[Codec, ...] = (
    Fp16(),
    Bf16(),
    Int8(),
    Int4(),
    LoCo(),
    LaggingEFSignSGD(),
    LaggingTopK(density=0.1),
)
"""Those that can send differences of parameters."""


@distributed(world_sizes=(1, 3))
def test_every_codec_leaves_the_same_bits_on_all_ranks() -> None:
    _check_bits(4)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=400)
def test_every_codec_leaves_the_same_bits_for_fifty_steps() -> None:
    _check_bits(50)


def _check_bits(num_steps: int) -> None:
    for codec in ALL:
        optimizer = "maximize" if codec.takes_weight_decay else "rprop"
        trace = train_dear("mlp", optimizer, num_steps, options=coded(codec))
        assert_equal_on_all_ranks(trace)
        again = train_dear("mlp", optimizer, num_steps, options=coded(codec))
        for one, other in zip(trace[0][-1], again[0][-1], strict=True):
            assert torch.equal(one, other), codec


@distributed(world_sizes=(2,))
def test_no_codec_uses_the_random_numbers_of_the_user() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    of_parameters = [coded(codec, "parameters") for codec in LAGGING]
    for options in (*map(coded, ALL), *of_parameters):
        run = Run(options)
        run.step()
        run.pipeline.complete_parameters()
        assert torch.equal(torch.random.get_rng_state(), state), options.compressor


@distributed(world_sizes=(2,))
def test_two_optimizers_draw_other_random_numbers() -> None:
    """Else what one loses would go the same way as what the other does."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
    for layer in model:
        nn.init.zeros_(layer.weight)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]
    first, second = optimizers
    options = coded(CODECS["terngrad"]())
    pipeline = new_pipeline(model, first, more=[second], options=options)
    gradient = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    with pipeline.forward():
        loss = sum((layer.weight * gradient).sum() for layer in model)
    with pipeline.backward():
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    pipeline.complete_parameters()
    one, other = weights(model)
    assert not torch.equal(one, other)
    # Means of 4096 numbers, 0 or 1 each before ranks are averaged: 0.02 apart is usual.
    torch.testing.assert_close(one.mean(), other.mean(), rtol=0.15, atol=0)


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(1, 2))
def test_a_resumed_run_has_the_same_bits(gather: str) -> None:
    _check_resume(gather, 4)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(1, 2, 3, 4), timeout_s=240)
def test_a_resumed_run_has_the_same_bits_for_fifty_steps(gather: str) -> None:
    _check_resume(gather, 25)


def _check_resume(gather: str, num_steps: int) -> None:
    first, second = range(num_steps), range(num_steps, 2 * num_steps)
    for codec in LAGGING if gather == "parameters" else ALL:
        options = coded(codec, gather)
        model = build("mlp")
        # DGC and signum bring momentum, into which weight decay belongs.
        kind = "rprop" if codec.brings_momentum else "adamw"
        optimizer = optimizer_for(kind, model)
        pipeline = new_pipeline(model, optimizer, options=options)
        train_steps(pipeline, model, first)
        pipeline.complete_parameters()
        saved = copy.deepcopy(pipeline.parts[0].optimizer_state_dict()), model.state_dict()
        saved = copy.deepcopy(saved)
        train_steps(pipeline, model, second)
        pipeline.detach()
        other = build("mlp", seed=3)
        other_optimizer = optimizer_for(kind, other)
        other.load_state_dict(saved[1])
        resumed = new_pipeline(other, other_optimizer, options=options)
        other_optimizer.load_state_dict(saved[0])
        train_steps(resumed, other, second)
        resumed.detach()
        for left, right in zip(weights(model), weights(other), strict=True):
            assert torch.equal(left, right), codec


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(2,))
def test_loading_in_mid_run_brings_its_residuals(gather: str) -> None:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer, options=coded(Int4(), gather))
    train_steps(pipeline, model, range(4))
    pipeline.complete_parameters()
    saved = pipeline.parts[0].optimizer_state_dict(), model.state_dict()
    saved = copy.deepcopy(saved)
    ends = []
    for _ in range(2):
        train_steps(pipeline, model, range(4, 8))
        ends.append(weights(model))
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
    for left, right in zip(*ends, strict=True):
        assert torch.equal(left, right)


@distributed(world_sizes=(1, 2))
def test_residuals_that_were_loaded_can_be_saved_before_a_step() -> None:
    first = Run(coded(Int4(block_size=64)))
    for _ in range(3):
        first.step()
    saved = copy.deepcopy(first.part.optimizer_state_dict())
    second = Run(coded(Int4(block_size=64)))
    second.optimizer.load_state_dict(saved)
    again = second.part.optimizer_state_dict()
    for kind in ("worker", "owner"):
        for number, numbers in saved["residuals"][kind]["residual"].items():
            assert torch.equal(numbers, again["residuals"][kind]["residual"][number])
    assert all(
        one.any() for one in saved["residuals"]["worker"]["residual"].values() if one.numel() > 9
    )
    first.pipeline.detach()
    first.pipeline.detach()
    assert first.part.optimizer_state_dict()["residuals"]["counts"] == {"reduce": 3, "gather": 3}
