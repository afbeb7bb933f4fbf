"""Encoded exchanges: nothing is lost for good, in every mode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import (
    CODECS,
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
    Signum,
    TopK,
)
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from lightning_dear.planning.plan import aligned
from tests.distributed.harness import distributed
from tests.training.linear import SHAPES, Run, gradients_of, unscale
from tests.training.models import weights

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
    RandomK(density=0.1, decay=1.0),
)
ALL = (*(codec() for codec in CODECS.values()), PowerSGD(rank=1, min_saving=1.0))
ALMOST_EXACT = (Fp16(), Bf16(), Int8())

WORKERS, OWNERS = ("worker", "residual"), ("owner", "residual")


def coded(
    codec: Compressor, gather: str = "gradients", halves: str = "both", **options: Any
) -> ExchangeOptions:
    if halves != "both":
        assert isinstance(codec, Codec)
        codec = replace(codec, halves=halves)
    return ExchangeOptions(gather, compressor=codec, **options)


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
        run = Run(coded(codec))
        for step in range(num_steps):
            run.step(leaves_out=step % 5 == 3)
        rate = codec.rate if isinstance(codec, LoCo) else 1.0
        assert run.error(rate) <= 1e-5, codec
        # Of each tensor, too: the largest one outweighs the others a thousand times.
        assert max(run.errors(rate)) <= 1e-4, codec


@distributed(world_sizes=(3,))
def test_the_same_of_weighted_sums() -> None:
    for codec in (Int8(block_size=64), Int4(block_size=64), TopK(density=0.05)):
        run = Run(coded(codec), weighs=lambda step, rank: (3 * step + 5 * rank) % 7)
        for step in range(10):
            run.step(leaves_out=step % 5 == 3)
        assert run.error() <= 1e-5, codec
        assert max(run.errors()) <= 1e-4, codec


@distributed(world_sizes=(1, 3))
def test_the_same_where_one_half_is_encoded() -> None:
    for gather in ("gradients", "parameters"):
        for codec in (Int4(block_size=64, halves="reduce"), TopK(density=0.05, halves="reduce")):
            run = Run(coded(codec, gather))
            for step in range(10):
                run.step(leaves_out=step % 5 == 3)
            assert run.error() <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_the_same_with_another_plan_in_mid_run() -> None:
    _check_plans(5)


@pytest.mark.slow
@distributed(world_sizes=(1, 3, 4), timeout_s=240)
def test_the_same_with_other_plans_in_fifty_steps() -> None:
    _check_plans(17)


def _check_plans(num_steps: int) -> None:
    for codec in CONTRACTIVE:
        run = Run(coded(codec))
        for fusion in (NoFusion(), SingleFusion(), None):
            for step in range(num_steps):
                run.step(leaves_out=step % 5 == 3)
            if fusion is not None:
                run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
        rate = codec.rate if isinstance(codec, LoCo) else 1.0
        assert run.error(rate) <= 1e-5, codec
        assert max(run.errors(rate)) <= 1e-4, codec


@distributed(world_sizes=(2,))
def test_the_same_with_several_backwards_a_step() -> None:
    run = Run(coded(Int4(block_size=64)))
    run.step()
    for _ in range(5):
        # Both are sent: the second comes after the buckets of the first have been launched.
        run.backward(step=100 + run.num_steps)
        run.count(100 + run.num_steps)
        run.step()
    assert run.error() <= 1e-5


@distributed(world_sizes=(2,))
def test_clipping_changes_what_owners_have_and_not_what_workers_keep() -> None:
    """Owners keep what was not sent of what was to be stepped; a power of two changes no digit."""
    for codec in (Int4(block_size=64), TopK(density=0.05)):
        plain, clipped = Run(coded(codec)), Run(coded(codec))
        for _ in range(5):
            plain.step()
            clipped.step(before=partial(unscale, clipped, 4.0))
        for run in (plain, clipped):
            run.pipeline.complete_parameters()
        one, other = (run.part.plans.residuals.taken() for run in (plain, clipped))
        for ours, theirs in zip(plain.model.weights, clipped.model.weights, strict=True):
            assert torch.equal(ours / 4, theirs)
            assert torch.equal(one.kept[WORKERS][ours], other.kept[WORKERS][theirs])
            assert torch.equal(one.kept[OWNERS][ours] / 4, other.kept[OWNERS][theirs])


@distributed(world_sizes=(2,))
def test_gradients_that_are_dropped_leave_residuals_alone() -> None:
    run = Run(coded(TopK(density=0.05)))
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
        plain, scaled = Run(coded(codec)), Run(coded(codec))
        for step in range(8):
            scale = 2.0 ** (step % 4)
            scaled.part.plans.loss_scale = lambda scale=scale: torch.full((1,), scale)

            plain.step()
            scaled.step(before=partial(unscale, scaled, scale), scale=scale)
        for one, other in zip(weights(plain.model), weights(scaled.model), strict=True):
            assert torch.equal(one, other), codec


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", ["gradients", "parameters"])
@distributed(world_sizes=(2, 3))
def test_each_half_sends_what_the_codec_says(gather: str) -> None:
    for codec in (make() for make in CODECS.values()):
        if gather == "parameters" and codec.lag != "small":
            continue
        run = Run(coded(codec, gather), SingleFusion())
        sent = []
        for _ in range(2):
            run.step()
            run.pipeline.complete_parameters()
            ledger = run.pipeline.collectives.ledger
            sent.append((ledger["reduce_scatter"], ledger["all_gather"]))
        assert run.part.plan is not None
        (bucket,) = run.part.plan.buckets
        world_size = dist.get_world_size()
        row_bytes = codec.wire_bytes(bucket.padded_numel // world_size)
        halves = [last - first for first, last in zip(*sent, strict=True)]
        assert halves == [(world_size - 1) * row_bytes] * 2, codec


# --- scale ----------------------------------------------------------------------------------------


@distributed(world_sizes=(1, 2, 3, 4))
def test_equal_gradients_arrive_as_they_are() -> None:
    for codec in ALMOST_EXACT:
        run = Run(coded(codec), NoFusion())
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


@distributed(world_sizes=(1, 2, 3, 4))
def test_a_vote_is_that_of_the_majority() -> None:
    """A tie counts as +1, as zeros do; where votes are only added up, it is the 0 that they are."""
    for codec in (SignSGD(), Signum()):
        for halves, tie in (("both", 1.0), ("reduce", 0.0)):
            run = Run(coded(codec, halves=halves))
            run.step()
            run.pipeline.complete_parameters()
            ranks = range(dist.get_world_size())
            all_gradients = [gradients_of(0, rank) for rank in ranks]
            num_ties = 0
            for number, weight in enumerate(run.model.weights):
                votes = torch.stack([_signs(own[number]) for own in all_gradients])
                mean = votes.mean(0)
                expected = mean if halves == "reduce" else mean.sign()
                expected[mean == 0] = tie
                num_ties += int((mean == 0).sum())
                torch.testing.assert_close(-weight.detach(), expected)
            assert (num_ties > 100) is (len(ranks) % 2 == 0)


def _signs(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return torch.where(gradient < 0, -1.0, 1.0)


@distributed(world_sizes=(1,))
def test_one_rank_does_what_local_error_feedback_does() -> None:
    codec = Int4(block_size=64, halves="reduce")
    run = Run(coded(codec), NoFusion())
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
