"""Ok-Topk against its own words: what arrives, what is left, and that ranks stay the same."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import Fp32, OkTopk
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.sparse_reference import Reference
from tests.exchange.sparse_runs import (
    BOTH_MODES,
    NO_CAPS,
    STATIC,
    buckets_of,
    check_all_alike,
    in_bucket,
    run_of,
)
from tests.training.linear import SHAPES, SOMETIMES, Known, Run, gradients_of, unscale
from tests.training.three_ways import new_pipeline

# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        OkTopk(density=0.05, tau_prime=1, **NO_CAPS),
        OkTopk(density=0.05, tau_prime=1),
        OkTopk(density=0.05, tau_prime=4, tau=3),
        replace(STATIC, tau=3, message_cap=1.0),
    ],
    ids=["no caps", "exact", "reused", "static"],
)
@distributed(world_sizes=(3,))
def test_bits_are_those_of_the_reference(codec: OkTopk) -> None:
    _check_reference(codec, 12)


@pytest.mark.slow
@distributed(world_sizes=(2, 3, 4), timeout_s=240)
def test_bits_are_those_of_the_reference_over_many_steps() -> None:
    for codec in (
        OkTopk(density=0.05, tau_prime=1, **NO_CAPS),
        OkTopk(density=0.05, tau_prime=1),
        OkTopk(density=0.05, tau_prime=8),
        OkTopk(density=0.02, tau_prime=100, **NO_CAPS),
        OkTopk(density=0.3, tau_prime=5, message_cap=1.0, owner_cap=1.0),
        replace(STATIC, message_cap=math.inf),
        STATIC,
    ):
        _check_reference(codec, 80)


def _check_reference(codec: OkTopk, num_steps: int) -> None:
    run, world_size = run_of(codec), dist.get_world_size()
    reference: Reference | None = None
    for step in range(num_steps):
        before = [weight.detach().clone() for weight in run.model.weights]
        run.step()
        run.pipeline.complete_parameters()
        if reference is None:
            (one,) = buckets_of(run)
            reference = Reference(one.numel, one.spec.padded_numel, world_size, codec)
        gradients = [in_bucket(run, gradients_of(step, rank)) for rank in range(world_size)]
        u = reference.step(torch.stack(gradients) * (1.0 / world_size))
        weights = in_bucket(run, list(run.model.weights))
        assert torch.equal(weights, in_bucket(run, list(before)) - u), step
        residual = buckets_of(run)[0].worker.kept["residual"]
        assert torch.equal(residual, reference.residuals[dist.get_rank()]), step
        check_all_alike(run)


@distributed(world_sizes=(1, 3))
def test_a_density_of_one_is_dense() -> None:
    """Nothing is left to select: buckets travel as they are, with the same sums."""
    _check_a_density_of_one_is_dense()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_a_density_of_one_is_dense_on_other_numbers_of_ranks() -> None:
    _check_a_density_of_one_is_dense()


def _check_a_density_of_one_is_dense() -> None:
    all_of_it = OkTopk(density=1.0, tau_prime=1)
    sparse, dense = run_of(replace(all_of_it, **NO_CAPS)), run_of(all_of_it)
    plain = Run(ExchangeOptions("gradients"), SingleFusion())
    for _ in range(4):
        for run in (sparse, dense, plain):
            run.step()
    for run in (sparse, dense):
        run.pipeline.complete_parameters()
    plain.pipeline.complete_parameters()
    for one, other, expected in zip(
        sparse.model.weights, dense.model.weights, plain.model.weights, strict=True
    ):
        assert torch.equal(one, expected)
        assert torch.equal(other, expected)
    assert not buckets_of(sparse)[0].is_sparse


# --- nothing is lost ------------------------------------------------------------------------------


@distributed(world_sizes=(1, 3))
def test_every_number_arrives_or_is_left_to_the_bit() -> None:
    """Of numbers that add up without rounding, whatever is due in a step and whatever binds."""
    _check_every_number_arrives_or_is_left_to_the_bit()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_every_number_arrives_or_is_left_to_the_bit_on_other_numbers_of_ranks() -> None:
    _check_every_number_arrives_or_is_left_to_the_bit()


def _check_every_number_arrives_or_is_left_to_the_bit() -> None:
    world_size = dist.get_world_size()
    exact = OkTopk(density=0.05, tau_prime=3, tau=5)
    capped = replace(exact, message_cap=1.0, owner_cap=1.0)
    static = replace(STATIC, tau=5, message_cap=1.0)
    for codec in (exact, replace(exact, **NO_CAPS), capped, static):
        run = run_of(codec)
        before = [weight.detach().clone() for weight in run.model.weights]
        expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(15):
            generator = torch.Generator().manual_seed(step)
            of_ranks = [
                [torch.randint(-64, 65, shape, generator=generator) / 8 for shape in SHAPES]
                for _ in range(world_size)
            ]
            if not step:
                # Most regions have nothing.
                of_ranks = [[own[0], *(0 * one for one in own[1:])] for own in of_ranks]
            with run.pipeline.forward():
                # A multiple of the number of ranks, of which 1/P is exact.
                own = [one * world_size for one in of_ranks[dist.get_rank()]]
                loss = run.model(own)
            with run.pipeline.backward():
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            for number, ones in enumerate(zip(*of_ranks, strict=True)):
                expected[number] += sum(ones)
            run.pipeline.complete_parameters()
            pairs = zip(before, run.model.weights, strict=True)
            moved = sum(int((old != new).sum()) for old, new in pairs)
            before = [weight.detach().clone() for weight in run.model.weights]
            (one,) = buckets_of(run)
            # Of numbers of which many are equal.
            assert not one.is_sparse or moved <= one.selection.k
            held = run.part.plans.residuals.taken().kept["worker", "residual"]
            for weight, whole in zip(run.model.weights, expected, strict=True):
                left = held[weight].double()
                dist.all_reduce(left)
                assert torch.equal(left.view(weight.shape) - weight.double(), whole), step


@distributed(world_sizes=(1, 3))
def test_nothing_is_lost_whatever_happens_in_between() -> None:
    """Unused parameters, other plans, dense steps, another density, a step that is not made."""
    _check_nothing_is_lost_whatever_happens_in_between()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_nothing_is_lost_whatever_happens_in_between_on_other_numbers_of_ranks() -> None:
    _check_nothing_is_lost_whatever_happens_in_between()


def _check_nothing_is_lost_whatever_happens_in_between() -> None:
    for codec in (OkTopk(density=0.1, tau_prime=4), replace(STATIC, density=0.1)):
        _check_nothing_is_lost(codec)


def _check_nothing_is_lost(codec: OkTopk) -> None:
    run = Run(ExchangeOptions("gradients", compressor=codec))
    for step in range(24):
        if step in (6, 12):
            fusion = NoFusion() if step == 6 else SingleFusion()
            run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
        if step in (3, 15):
            run.part.use_compressor(Fp32())
        if step in (5, 17):
            run.part.use_compressor(codec.at_density(0.2 if step == 5 else 0.05))
        if step == 9:
            # Gradients of a step that is not made.
            run.backward(step=999)
            run.optimizer.zero_grad()
        run.step(leaves_out=step % 5 == 3)
        check_all_alike(run)
    assert run.error() <= 1e-5
    assert max(run.errors()) <= 1e-4


@distributed(world_sizes=(2,))
def test_a_loss_scale_changes_nothing() -> None:
    for codec in BOTH_MODES:
        _check_a_loss_scale_changes_nothing(codec)


def _check_a_loss_scale_changes_nothing(codec: OkTopk) -> None:
    plain, scaled = (run_of(codec) for _ in range(2))
    for step in range(8):
        plain.step()
        scale = 2.0 ** (step + 3)
        scaled.part.plans.loss_scale = partial(torch.tensor, scale)
        scaled.step(before=partial(unscale, scaled, scale), scale=scale)
    for run in (plain, scaled):
        run.pipeline.complete_parameters()
    for one, other in zip(plain.model.weights, scaled.model.weights, strict=True):
        assert torch.equal(one, other)


@distributed(world_sizes=(3,))
def test_gradients_of_several_backwards_add_up() -> None:
    """Some of them after the first were sent: another round, in which nothing is sent twice."""
    for codec in BOTH_MODES:
        _check_gradients_of_several_backwards_add_up(codec)


def _check_gradients_of_several_backwards_add_up(codec: OkTopk) -> None:
    run = run_of(codec)
    for step in range(8):
        for number in range(3):
            run.backward(step=10 * step + number)
            run.count(10 * step + number)
            if number == 1:
                run.part.mean.reduce()
        run.optimizer.step()
        run.optimizer.zero_grad()
        check_all_alike(run)
    assert run.error() <= 1e-5
    assert max(run.errors()) <= 1e-4


@distributed(world_sizes=(3,))
def test_momentum_is_kept_until_it_arrives() -> None:
    """u = m u + g, acc = u + residual: nothing of acc is lost, and u is 0 where acc has arrived."""
    for codec in BOTH_MODES:
        _check_momentum_is_kept_until_it_arrives(codec)


def _check_momentum_is_kept_until_it_arrives(codec: OkTopk) -> None:
    run, world_size = run_of(replace(codec, momentum=0.9)), dist.get_world_size()
    run.step()
    for step in range(1, 8):
        (one,) = buckets_of(run)
        run.pipeline.complete_parameters()
        before = {name: kept.clone() for name, kept in one.worker.kept.items()}
        weights = in_bucket(run, list(run.model.weights))
        run.step()
        run.pipeline.complete_parameters()
        gradient = in_bucket(run, gradients_of(step, dist.get_rank())) * (1.0 / world_size)
        velocity = before["momentum"] * 0.9 + gradient
        waiting = (before["residual"] + velocity).double()
        after, arrived = one.worker.kept, (after_zero(one.worker.kept["residual"], waiting))
        assert torch.equal(after["momentum"] == 0, arrived | (velocity == 0))
        torch.testing.assert_close(after["momentum"][~arrived], velocity[~arrived])
        moved = (weights - in_bucket(run, list(run.model.weights))).double()
        left = after["residual"].double()
        for total in (waiting, left):
            dist.all_reduce(total)
        assert (waiting - left - moved).norm() <= 1e-5 * waiting.norm()
        check_all_alike(run)


@distributed(world_sizes=(3,))
def test_momentum_of_what_nobody_uses_waits() -> None:
    """As SGD's does, and nothing of it is sent, in a dense step either."""
    for codec in BOTH_MODES:
        run = run_of(replace(codec, momentum=0.9))
        for _ in range(3):
            run.step()
        run.pipeline.complete_parameters()
        (one,) = buckets_of(run)
        nobody_uses = run.model.weights[SOMETIMES]
        (part,) = (
            slice(piece.offset, piece.offset + piece.numel)
            for piece in one.spec.slices
            if run.part.parameters[piece.tensor] is nobody_uses
        )
        for other in (replace(codec, momentum=0.9), Fp32()):
            run.part.use_compressor(other)
            before = {name: kept[part].clone() for name, kept in one.worker.kept.items()}
            weights = nobody_uses.detach().clone()
            run.step(leaves_out=True)
            run.pipeline.complete_parameters()
            assert torch.equal(nobody_uses, weights)
            assert before["residual"].any()
            for name, kept in one.worker.kept.items():
                assert torch.equal(kept[part], before[name]), name


def after_zero(residual: Tensor, waiting: Tensor) -> Tensor:
    """Where something waited and nothing is left."""
    return (residual == 0) & (waiting != 0)


@distributed(world_sizes=(3,))
def test_two_optimizers_are_those_of_one() -> None:
    for codec in BOTH_MODES:
        _check_two_optimizers_are_those_of_one(codec)


def _check_two_optimizers_are_those_of_one(codec: OkTopk) -> None:
    options = ExchangeOptions("gradients", compressor=replace(codec, density=0.1))
    model, own = Known(), slice(0, 1)
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in (model.weights[own], model.weights[1:])]
    pipeline = new_pipeline(
        model, optimizers[0], SingleFusion(), more=optimizers[1:], options=options
    )
    total = torch.zeros(SHAPES[0], dtype=torch.float64)
    for step in range(6):
        with pipeline.forward():
            loss = model(gradients_of(step, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            first = gradients_of(step, rank)[0]
            assert first is not None
            total += first.double() / dist.get_world_size()
    pipeline.complete_parameters()
    kept = pipeline.parts[0].plans.residuals.taken().kept
    left = kept["worker", "residual"][model.weights[0]].double()
    dist.all_reduce(left)
    arrived = left.view(SHAPES[0]) - model.weights[0].detach().double()
    assert (arrived - total).norm() <= 1e-5 * total.norm()
    for weight in model.weights:
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, weight.detach().numpy().tobytes())
        assert len(set(digests)) == 1
