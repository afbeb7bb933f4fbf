"""The sparse all-reduces that Ok-Topk is compared with: nothing is lost, and what travels."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import (
    Fp32,
    Gaussiank,
    GTopk,
    OkTopk,
    SparseAllReduce,
    TopkA,
    TopkDSA,
)
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import (
    check_all_alike,
    check_resumed_has_the_same_bits,
    in_bucket,
    run_of,
)
from tests.training.linear import SHAPES, Run, gradients_of, unscale

BASELINES: tuple[SparseAllReduce, ...] = (
    TopkA(density=0.05, tau_prime=3),
    TopkDSA(density=0.05, tau_prime=3),
    # Filled: sums travel as they are.
    TopkDSA(density=0.4, tau_prime=3),
    GTopk(density=0.05, tau_prime=3),
    Gaussiank(density=0.05),
)
ALL = (*BASELINES, OkTopk(density=0.05, tau_prime=3))


@distributed(world_sizes=(1, 3))
def test_every_number_arrives_or_is_left_to_the_bit() -> None:
    """Of numbers that add up without rounding."""
    _check_every_number_arrives_or_is_left_to_the_bit()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_every_number_arrives_or_is_left_to_the_bit_on_other_numbers_of_ranks() -> None:
    _check_every_number_arrives_or_is_left_to_the_bit()


def _check_every_number_arrives_or_is_left_to_the_bit() -> None:
    world_size = dist.get_world_size()
    for codec in BASELINES:
        run = run_of(codec)
        expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            of_ranks = [
                [torch.randint(-64, 65, shape, generator=generator) / 8 for shape in SHAPES]
                for _ in range(world_size)
            ]
            with run.pipeline.forward():
                loss = run.model([one * world_size for one in of_ranks[dist.get_rank()]])
            with run.pipeline.backward():
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            for number, ones in enumerate(zip(*of_ranks, strict=True)):
                expected[number] += sum(ones)
            run.pipeline.complete_parameters()
            held = run.part.plans.residuals.taken().kept["worker", "residual"]
            for weight, whole in zip(run.model.weights, expected, strict=True):
                left = held[weight].double()
                dist.all_reduce(left)
                assert torch.equal(left.view(weight.shape) - weight.double(), whole), (codec, step)


@distributed(world_sizes=(1, 3))
def test_nothing_is_lost_whatever_happens_in_between() -> None:
    for codec in BASELINES:
        run = Run(ExchangeOptions("gradients", compressor=codec))
        for step in range(14):
            if step in (5, 9):
                fusion = NoFusion() if step == 5 else SingleFusion()
                run.part.replan(fusion.plan(run.part.tensors, dist.get_world_size()))
            if step in (3, 11):
                run.part.use_compressor(Fp32())
            if step in (4, 12):
                run.part.use_compressor(codec.at_density(0.2 if step == 4 else 0.05))
            if step == 7:
                # Gradients of a step that is not made.
                run.backward(step=999)
                run.optimizer.zero_grad()
            run.step(leaves_out=step % 5 == 3)
            check_all_alike(run)
        assert run.error() <= 1e-5, codec
        assert max(run.errors()) <= 1e-4, codec


@distributed(world_sizes=(3,))
def test_gradients_of_several_backwards_add_up() -> None:
    for codec in BASELINES:
        run = run_of(codec)
        for step in range(4):
            for number in range(3):
                run.backward(step=10 * step + number)
                run.count(10 * step + number)
                if number == 1:
                    run.part.mean.reduce()
            run.optimizer.step()
            run.optimizer.zero_grad()
            check_all_alike(run)
        assert run.error() <= 1e-5, codec


@distributed(world_sizes=(2,))
def test_a_loss_scale_changes_nothing() -> None:
    for codec in BASELINES:
        plain, scaled = (run_of(codec) for _ in range(2))
        for step in range(4):
            plain.step()
            scale = 2.0 ** (step + 3)
            scaled.part.plans.loss_scale = partial(torch.tensor, scale)
            scaled.step(before=partial(unscale, scaled, scale), scale=scale)
        for run in (plain, scaled):
            run.pipeline.complete_parameters()
        for one, other in zip(plain.model.weights, scaled.model.weights, strict=True):
            assert torch.equal(one, other), codec


@distributed(world_sizes=(3,))
def test_norms_hooks_and_refusals() -> None:
    for codec in BASELINES:
        run, other = run_of(codec), run_of(codec)

        def halve(run: Run = run) -> None:
            run.part.mean.expose()
            for weight in run.model.weights:
                assert weight.grad is not None
                weight.grad.mul_(0.5)

        before = [weight.detach().clone() for weight in other.model.weights]
        run.step(before=halve)
        norms: list[Tensor] = []
        other.step(before=lambda: norms.append(other.part.mean.norm()))  # noqa: B023
        for one in (run, other):
            one.pipeline.complete_parameters()
        for halved, whole in zip(run.model.weights, other.model.weights, strict=True):
            assert torch.equal(2 * halved, whole), codec
        pairs = zip(before, other.model.weights, strict=True)
        moved = torch.cat([(old - new.detach()).flatten() for old, new in pairs])
        assert norms[0] == pytest.approx(float(moved.norm()), rel=1e-5)
        run.backward(scale=float("nan") if dist.get_rank() == 0 else 1.0)
        with pytest.raises(RuntimeError, match=f"nan or inf in them.*'{codec.name}'"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()


@distributed(world_sizes=(3,))
def test_a_resumed_run_has_the_same_bits() -> None:
    for codec in BASELINES:
        run, resumed = (run_of(codec) for _ in range(2))
        for _ in range(4):
            run.step()
        check_resumed_has_the_same_bits(run, resumed)


# --- gradients that hooks are shown ---------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_hooks_are_shown_that_gradients_are_not_finite() -> None:
    """Also where regions have moved since numbers were last chosen."""
    for codec in ALL:
        run = run_of(codec)
        for number in range(3):
            run.backward(scale=float("nan") if dist.get_rank() == 0 else 1.0)
            run.part.mean.expose()
            assert all(weight.grad.isnan().all() for weight in run.model.weights), codec
            with pytest.raises(RuntimeError, match=f"nan or inf in them.*'{codec.name}'"):
                run.optimizer.step()
            run.optimizer.zero_grad()
            for _ in range(number):
                run.step()
        assert run.error() <= 1e-5, codec


@distributed(world_sizes=(3,))
def test_a_norm_leaves_what_is_shown() -> None:
    for codec in ALL:
        run = run_of(codec)
        run.step()
        run.backward()
        run.part.mean.expose()
        shown = [weight.grad.clone() for weight in run.model.weights]
        flat = torch.cat([one.flatten() for one in shown])
        assert run.part.mean.norm() == pytest.approx(float(flat.norm()), rel=1e-5)
        for weight, before in zip(run.model.weights, shown, strict=True):
            assert torch.equal(weight.grad, before), codec
        run.optimizer.step()
        check_all_alike(run)


@distributed(world_sizes=(2,))
def test_nothing_is_added_to_what_owners_have_shown() -> None:
    for codec in (OkTopk(density=0.05), TopkDSA(density=0.05)):
        run = run_of(codec)
        run.backward()
        run.part.mean.expose()
        with pytest.raises(RuntimeError, match="shown to a hook.*gradients_in_hooks=False"):
            run.backward(step=7)


@distributed(world_sizes=(2,))
def test_nothing_is_added_to_what_was_changed() -> None:
    """What owners have not chosen of it would come back with another round."""
    run = run_of(OkTopk(density=0.05))

    def change_whole() -> None:
        run.part.mean.expose()
        for weight in run.model.weights:
            weight.grad.zero_()
        run.part.mean.reduce()

    for change in (change_whole, lambda: run.part.mean.clip_by_norm(1.0)):
        run.backward()
        change()
        with pytest.raises(RuntimeError, match=r"whole_gradients\(\).*Run all backwards"):
            run.backward(step=7)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.backward()
    run.part.mean.norm()
    run.backward(step=7)
    run.optimizer.step()


# --- another one goes on --------------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_each_goes_on_from_what_another_has_kept() -> None:
    for before, after in (
        (OkTopk(density=0.05), TopkDSA(density=0.4)),
        (OkTopk(density=0.05), TopkDSA(density=0.05)),
        (TopkA(density=0.05), OkTopk(density=0.05)),
        (TopkDSA(density=0.05), OkTopk(density=0.05)),
        (OkTopk(density=0.05), GTopk(density=0.05)),
        (Gaussiank(density=0.05), TopkA(density=0.05)),
    ):
        run, other = run_of(before), run_of(after)
        for _ in range(4):
            run.step()
        state = copy.deepcopy(run.part.optimizer_state_dict())
        other.resume(run)
        other.optimizer.load_state_dict(state)
        for _ in range(3):
            other.step()
            check_all_alike(other)
        assert other.error() <= 1e-5, (before, after)


@distributed(world_sizes=(3,))
def test_what_nobody_used_at_first_is_not_lost() -> None:
    """A second backward of the same step uses it."""
    for codec in ALL:
        run = run_of(codec)
        for step in range(4):
            run.step()
            run.backward(leaves_out=True, step=100 + step)
            run.count(100 + step, leaves_out=True)
            run.part.mean.norm()
            run.backward(step=200 + step)
            run.count(200 + step)
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert max(run.errors()) <= 1e-5, codec


@distributed(world_sizes=(3,))
def test_what_nobody_uses_is_not_lost_where_sums_travel_as_they_are() -> None:
    """What was left of earlier steps is sent, and nobody steps with it."""
    run = run_of(TopkDSA(density=0.4, tau_prime=3))
    for step in range(6):
        run.step(leaves_out=step % 2 == 1)
        assert max(run.errors()) <= 1e-5, step


@distributed(world_sizes=(3,))
def test_equal_regions_have_room_for_what_is_in_them() -> None:
    run = run_of(TopkDSA(density=0.4))
    run.step()
    (one,) = run.part.plans.active.exchange.coded
    assert one.gathered.shape == (3, 1 + 2 * one.spec.padded_numel // 3)


@distributed(world_sizes=(3,))
def test_what_a_round_without_gradients_sends_is_not_lost() -> None:
    """A norm is asked for before anything has run backward; what was left is sent all the same."""
    for codec in ALL:
        run = run_of(codec)
        for step in range(4):
            run.step()
            run.part.mean.norm()
            run.backward(step=100 + step)
            run.count(100 + step)
            run.optimizer.step()
            run.optimizer.zero_grad()
            assert max(run.errors()) <= 1e-5, (codec, step)


# --- what each of them sums -----------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_sums_are_those_of_plain_formulas() -> None:
    """One step: of each rank's k largest numbers, in the order of the ranks, or up the tree."""
    _check_sums_are_those_of_plain_formulas()


@pytest.mark.slow
@distributed(world_sizes=(2, 4))
def test_sums_are_those_of_plain_formulas_on_other_numbers_of_ranks() -> None:
    _check_sums_are_those_of_plain_formulas()


def _check_sums_are_those_of_plain_formulas() -> None:
    world_size = dist.get_world_size()
    for codec in (TopkA(density=0.05), TopkDSA(density=0.05), GTopk(density=0.05)):
        run = run_of(codec)
        run.step()
        run.pipeline.complete_parameters()
        of_ranks = [in_bucket(run, gradients_of(0, rank)) for rank in range(world_size)]
        k = codec.entries(sum(weight.numel() for weight in run.model.weights))
        largest = [_largest(own * (1.0 / world_size), k) for own in of_ranks]
        expected = _up_the_tree(largest, k) if isinstance(codec, GTopk) else _added(largest)
        assert torch.equal(in_bucket(run, list(run.model.weights)), -expected), codec


def _largest(numbers: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(numbers)
    places = numbers.abs().topk(k).indices
    kept[places] = numbers[places]
    return kept


def _added(of_ranks: list[Tensor]) -> Tensor:
    total = torch.zeros_like(of_ranks[0])
    for own in of_ranks:
        total += own
    return total


def _up_the_tree(of_ranks: list[Tensor], k: int) -> Tensor:
    """Pairs of neighbours, then pairs of pairs; who has no partner waits for the next round."""
    while len(of_ranks) > 1:
        pairs = [of_ranks[at : at + 2] for at in range(0, len(of_ranks), 2)]
        of_ranks = [_largest(_added(pair), k) if len(pair) == 2 else pair[0] for pair in pairs]
    return of_ranks[0]
