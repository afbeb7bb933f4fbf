"""Encoded exchanges: nothing is lost for good, all ranks have the same bits, in every mode."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.compression import (
    CODECS,
    DGC,
    Bf16,
    Codec,
    Compressor,
    EFSignSGD,
    Fp16,
    Int4,
    Int8,
    LoCo,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
)
from lightning_dear.exchange_options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from lightning_dear.planning.plan import aligned
from tests.distributed.harness import distributed
from tests.engine.linear import SHAPES, Run, gradients_of, unscale
from tests.engine.models import batch, build, loss_of, optimizer_for, weights
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.engine.training import new_pipeline, train_dear

CONTRACTIVE = (
    Fp16(),
    Bf16(),
    Int8(block_size=64),
    Int4(block_size=64),
    LoCo(block_size=64),
    OneBit(block_size=64),
    EFSignSGD(block_size=64),
    TopK(density=0.05),
    TopK(density=0.05, selector="sampled"),
    RandomK(density=0.1),
)
ALL = (*(codec() for codec in CODECS.values()), PowerSGD(rank=1, min_saving=1.0))
ALMOST_EXACT = (Fp16(), Bf16(), Int8())


def _coded(
    codec: Compressor, gather: str = "gradients", halves: str = "both", **options: Any
) -> ExchangeOptions:
    if halves != "both":
        assert isinstance(codec, Codec)
        codec = replace(codec, halves=halves)
    return ExchangeOptions(gather, codec=codec, **options)


# --- the feedback law -----------------------------------------------------------------------------


@distributed(world_sizes=(1, 3))
def test_what_is_lost_arrives_later() -> None:
    """sum of what arrives + residuals = sum of the mean gradients, whatever happens in between."""
    _check_law(10)


@pytest.mark.slow
@distributed(world_sizes=(1, 2, 3, 4))
def test_what_is_lost_arrives_later_over_fifty_steps() -> None:
    _check_law(50)


def _check_law(num_steps: int) -> None:
    for codec in CONTRACTIVE:
        run = Run(_coded(codec))
        for step in range(num_steps):
            run.step(leaves_out=step % 5 == 3)
        rate = codec.rate if isinstance(codec, LoCo) else 1.0
        assert run.error(rate) <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_residuals_of_8_bits_lose_little() -> None:
    run = Run(_coded(LoCo(block_size=64, residual_bits=8)))
    for step in range(10):
        run.step(leaves_out=step % 5 == 3)
        if step == 4:
            run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    assert 1e-6 < run.error(0.2) <= 1e-2


@distributed(world_sizes=(1, 3))
def test_the_same_where_one_half_is_encoded() -> None:
    for half, gather in (
        ("reduce", "gradients"),
        ("gather", "gradients"),
        ("reduce", "parameters"),
    ):
        for codec in (Int4(block_size=64, halves=half), TopK(density=0.05, halves=half)):
            run = Run(_coded(codec, gather))
            for step in range(10):
                run.step(leaves_out=step % 5 == 3)
            assert run.error() <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_the_same_with_another_plan_in_mid_run() -> None:
    for codec in (Int4(block_size=64), TopK(density=0.05)):
        run = Run(_coded(codec))
        for fusion in (NoFusion(), SingleFusion(), None):
            for _ in range(7):
                run.step()
            if fusion is not None:
                run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
        assert run.error() <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_the_same_with_a_limit_on_gathers() -> None:
    run = Run(_coded(TopK(density=0.05), depth=1))
    for _ in range(10):
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_the_same_with_several_backwards_a_step() -> None:
    run = Run(_coded(Int4(block_size=64)))
    run.step()
    for _ in range(5):
        # Both are sent: the second comes after the buckets of the first have been launched.
        run.backward(step=100 + run.num_steps)
        run.count(100 + run.num_steps)
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_gradients_that_are_dropped_leave_residuals_alone() -> None:
    run = Run(_coded(TopK(density=0.05)))
    for step in range(10):
        if step % 3 == 2:
            run.backward(step=200 + step)
            run.optimizer.zero_grad()
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_a_loss_scale_that_changes_changes_nothing() -> None:
    """Powers of two: the same bits."""
    for codec in (Int8(block_size=64), TopK(density=0.05), EFSignSGD(block_size=64), SignSGD()):
        plain, scaled = Run(_coded(codec)), Run(_coded(codec))
        for step in range(8):
            scale = 2.0 ** (step % 4)
            scaled.part.loss_scale = lambda scale=scale: torch.full((1,), scale)

            plain.step()
            scaled.step(before=partial(unscale, scaled, scale), scale=scale)
        for one, other in zip(weights(plain.model), weights(scaled.model), strict=True):
            assert torch.equal(one, other), codec


# --- the same bits on all ranks, and after a resume -----------------------------------------------


@distributed(world_sizes=(1, 3))
def test_every_codec_leaves_the_same_bits_on_all_ranks() -> None:
    for codec in ALL:
        trace = train_dear("mlp", "maximize", 4, options=_coded(codec))
        assert_equal_on_all_ranks(trace)
        again = train_dear("mlp", "maximize", 4, options=_coded(codec))
        for one, other in zip(trace[0][-1], again[0][-1], strict=True):
            assert torch.equal(one, other), codec
    build("mlp")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    run = Run(_coded(CODECS["qsgd"]()))
    run.step()
    assert torch.equal(torch.random.get_rng_state(), state)


def _steps(model: nn.Module, optimizer: Any, pipeline: Any, steps: range) -> None:
    for step in steps:
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(1, 2))
def test_a_resumed_run_has_the_same_bits(gather: str) -> None:
    for codec in (Int4(), Bf16()) if gather == "parameters" else ALL:
        options = _coded(codec, gather)
        model = build("mlp")
        # DGC and signum bring momentum.
        kind = "adagrad" if codec.brings_momentum else "adamw"
        optimizer = optimizer_for(kind, model)
        pipeline = new_pipeline(model, optimizer, options=options)
        _steps(model, optimizer, pipeline, range(4))
        pipeline.complete_parameters()
        saved = copy.deepcopy(pipeline.parts[0].optimizer_state_dict()), model.state_dict()
        saved = copy.deepcopy(saved)
        _steps(model, optimizer, pipeline, range(4, 8))
        pipeline.detach()
        other = build("mlp", seed=3)
        other_optimizer = optimizer_for(kind, other)
        other.load_state_dict(saved[1])
        resumed = new_pipeline(other, other_optimizer, options=options)
        other_optimizer.load_state_dict(saved[0])
        _steps(other, other_optimizer, resumed, range(4, 8))
        resumed.detach()
        for left, right in zip(weights(model), weights(other), strict=True):
            assert torch.equal(left, right), codec


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(2,))
def test_loading_in_mid_run_brings_its_residuals(gather: str) -> None:
    model = build("mlp")
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer, options=_coded(Int4(), gather))
    _steps(model, optimizer, pipeline, range(4))
    pipeline.complete_parameters()
    saved = pipeline.parts[0].optimizer_state_dict(), model.state_dict()
    saved = copy.deepcopy(saved)
    ends = []
    for _ in range(2):
        _steps(model, optimizer, pipeline, range(4, 8))
        ends.append(weights(model))
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[0])
    for left, right in zip(*ends, strict=True):
        assert torch.equal(left, right)


@distributed(world_sizes=(1, 2))
def test_residuals_that_were_loaded_can_be_saved_before_a_step() -> None:
    first = Run(_coded(Int4(block_size=64)))
    for _ in range(3):
        first.step()
    saved = copy.deepcopy(first.part.optimizer_state_dict())
    second = Run(_coded(Int4(block_size=64)))
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


# --- scale ----------------------------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_equal_gradients_arrive_as_they_are() -> None:
    for codec in ALMOST_EXACT:
        run = Run(_coded(codec), NoFusion())
        with run.pipeline.forward():
            gradients = gradients_of(0, 0)
            loss = run.model(gradients)
        with run.pipeline.backward():
            loss.backward()
        run.optimizer.step()
        run.pipeline.complete_parameters()
        for weight, gradient in zip(run.model.weights, gradients, strict=True):
            assert gradient is not None
            torch.testing.assert_close(
                -weight, gradient, rtol=0.01, atol=0.02 * float(gradient.abs().max())
            )


@distributed(world_sizes=(1, 3))
def test_a_vote_is_that_of_the_majority() -> None:
    for halves in ("both", "reduce"):
        run = Run(_coded(SignSGD(halves=halves)))
        run.step()
        run.pipeline.complete_parameters()
        ranks = range(dist.get_world_size())
        all_gradients = [gradients_of(0, rank) for rank in ranks]
        for number, weight in enumerate(run.model.weights):
            votes = torch.stack([torch.where(own[number] < 0, -1.0, 1.0) for own in all_gradients])
            mean = votes.mean(0)
            expected = mean if halves == "reduce" else torch.where(mean < 0, -1.0, 1.0)
            torch.testing.assert_close(-weight.detach(), expected)


@distributed(world_sizes=(1,))
def test_one_rank_does_what_local_error_feedback_does() -> None:
    codec = Int4(block_size=64, halves="reduce")
    run = Run(_coded(codec), NoFusion())
    residuals = [torch.zeros(_padded(shape)) for shape in SHAPES]
    applied = [torch.zeros(shape) for shape in SHAPES]
    for step in range(5):
        run.step()
        for gradient, residual, total in zip(
            gradients_of(step, 0), residuals, applied, strict=True
        ):
            assert gradient is not None
            row = residual.clone()
            row[: gradient.numel()] += gradient.flatten()
            wire = torch.empty((1, codec.wire_bytes(row.numel())), dtype=torch.uint8)
            codec.encode(row[None], wire)
            decoded = torch.empty_like(row)
            codec.decode(wire, decoded[None])
            residual.copy_(row - decoded)
            total += decoded[: gradient.numel()].view(total.shape)
    run.pipeline.complete_parameters()
    for weight, total in zip(run.model.weights, applied, strict=True):
        torch.testing.assert_close(-weight.detach(), total)


def _padded(shape: tuple[int, ...]) -> int:
    numel = torch.Size(shape).numel()
    return aligned(numel)


@distributed(world_sizes=(3,))
def test_dgc_clips_each_tensor_of_each_rank() -> None:
    for scale in (1.0, 8.0):
        codec = DGC(density=1.0, selector="exact", momentum=0.0, clip_norm=0.5)
        run = Run(_coded(codec, halves="reduce"))
        run.part.loss_scale = lambda scale=scale: torch.full((1,), scale)
        run.step(before=partial(unscale, run, scale), scale=scale)
        run.pipeline.complete_parameters()
        ranks = range(dist.get_world_size())
        for number, weight in enumerate(run.model.weights):
            own = [gradients_of(0, rank)[number] for rank in ranks]
            clipped = [one * min(1.0, 0.5 / float(one.norm())) for one in own if one is not None]
            expected = torch.stack(clipped).mean(0)
            torch.testing.assert_close(-weight.detach(), expected, rtol=1e-4, atol=1e-7)
