"""Around a step of Ok-Topk: hooks, checkpoints, periods, what is refused and what it tells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import OkTopk
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.exchange.sparse.regions import equal_regions
from lightning_dear.planning import SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import (
    BOTH_MODES,
    buckets_of,
    check_all_alike,
    run_of,
)
from tests.training.linear import Run

# --- what hooks and norms see -------------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_norms_and_clipping_are_of_what_is_stepped() -> None:
    for codec in BOTH_MODES:
        _check_norms_and_clipping_are_of_what_is_stepped(codec)


def _check_norms_and_clipping_are_of_what_is_stepped(codec: OkTopk) -> None:
    run = run_of(codec)
    for _ in range(3):
        before = [weight.detach().clone() for weight in run.model.weights]
        run.backward()
        norm = run.part.mean.clip_by_norm(1e-3)
        assert run.part.mean.norm() == pytest.approx(1e-3, rel=1e-3)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.num_steps += 1
        run.pipeline.complete_parameters()
        pairs = zip(before, run.model.weights, strict=True)
        moved = torch.cat([(old - new.detach()).flatten() for old, new in pairs])
        assert norm > 1.0
        assert moved.norm() == pytest.approx(1e-3, rel=1e-3)
        check_all_alike(run)


@distributed(world_sizes=(3,))
def test_hooks_see_what_is_stepped_and_may_scale_it() -> None:
    for codec in BOTH_MODES:
        _check_hooks_see_what_is_stepped_and_may_scale_it(codec)


def _check_hooks_see_what_is_stepped_and_may_scale_it(codec: OkTopk) -> None:
    run, other = (run_of(codec) for _ in range(2))

    def halve() -> None:
        run.part.mean.expose()
        for weight in run.model.weights:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

    for _ in range(4):
        run.step(before=halve)
        other.step()
    for one in (run, other):
        one.pipeline.complete_parameters()
    for halved, whole in zip(run.model.weights, other.model.weights, strict=True):
        assert torch.equal(2 * halved, whole)


@distributed(world_sizes=(2,))
def test_what_a_hook_makes_zero_has_arrived_all_the_same() -> None:
    """What it does to one tensor changes neither others nor what is left to be sent."""
    for codec in BOTH_MODES:
        run, other = (run_of(codec) for _ in range(2))
        largest = len(run.model.weights) - 1

        def freeze(run: Run = run, largest: int = largest) -> None:
            run.part.mean.expose()
            gradient = run.model.weights[largest].grad
            assert gradient is not None
            gradient.zero_()

        for _ in range(8):
            run.step(before=freeze)
            other.step()
        for one in (run, other):
            one.pipeline.complete_parameters()
        left, without = (
            one.part.plans.residuals.taken().kept["worker", "residual"] for one in (run, other)
        )
        for number, pair in enumerate(zip(run.model.weights, other.model.weights, strict=True)):
            own, usual = pair
            assert torch.equal(own, torch.zeros_like(own) if number == largest else usual)
            assert torch.equal(left[own], without[usual])


@distributed(world_sizes=(2,))
def test_hooks_may_not_make_it_dense() -> None:
    for codec in BOTH_MODES:
        _check_hooks_may_not_make_it_dense(codec)


def _check_hooks_may_not_make_it_dense(codec: OkTopk) -> None:
    run = run_of(codec)

    def add() -> None:
        run.part.mean.expose()
        for weight in run.model.weights:
            assert weight.grad is not None
            weight.grad.add_(1.0)

    with pytest.raises(RuntimeError, match="elements of the mean gradient that were 0.*'oktopk'"):
        run.step(before=add)


@distributed(world_sizes=(2,))
def test_gradients_that_are_not_finite_are_refused_and_leave_no_trace() -> None:
    for codec in BOTH_MODES:
        _check_gradients_that_are_not_finite_are_refused_and_leave_no_trace(codec)


def _check_gradients_that_are_not_finite_are_refused_and_leave_no_trace(codec: OkTopk) -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        run, other = (run_of(codec) for _ in range(2))
        for step in range(6):
            run.backward(scale=wrong if dist.get_rank() == 0 else 1.0, step=100 + step)
            with pytest.raises(RuntimeError, match="nan or inf in them.*'oktopk'"):
                run.optimizer.step()
            run.optimizer.zero_grad()
            run.step()
            other.step()
        assert run.error() <= 1e-5
        assert other.error() <= 1e-5


# --- when what is due is done -----------------------------------------------------------------


@distributed(world_sizes=(3,))
def test_periods_are_of_steps() -> None:
    """However many backwards they have, and whether or not they are made."""
    run = run_of(OkTopk(density=0.05))
    for step in range(4):
        run.backward(step=100 + step)
        run.part.mean.reduce()
        run.backward(step=200 + step)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.backward(step=300 + step)
        run.optimizer.zero_grad()
        (one,) = buckets_of(run)
        assert one.counts["reduce"] == step + 1


@distributed(world_sizes=(3,))
def test_a_threshold_is_known_where_caps_leave_fewer_than_k() -> None:
    run = run_of(OkTopk(density=0.05, owner_cap=1.0))
    for _ in range(3):
        run.step()
        run.pipeline.complete_parameters()
        (one,) = buckets_of(run)
        assert one.tally.num_kept < one.selection.k
        assert one.shares.threshold > 0


@distributed(world_sizes=(3,))
def test_a_new_plan_has_regions_after_its_first_step() -> None:
    """However many steps have been made."""
    run = Run(ExchangeOptions("gradients", compressor=OkTopk(density=0.1)))
    run.step()
    for one in buckets_of(run):
        one.counts["reduce"] = 100
    run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    assert not buckets_of(run)[0].has_regions
    run.step()
    run.pipeline.complete_parameters()
    (one,) = buckets_of(run)
    assert one.has_regions
    assert one.regions != equal_regions(one.spec.padded_numel, dist.get_world_size())


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, r"density of oktopk must be in \(0, 1\]"),
        ({"tau": 0}, "tau of oktopk must be an integer >= 1"),
        ({"tau_prime": 1.5}, "tau_prime of oktopk must be an integer >= 1"),
        ({"tau_prime": True}, "tau_prime of oktopk must be an integer >= 1"),
        ({"message_cap": 0.9}, "message_cap of oktopk must be at least 1"),
        ({"owner_cap": math.nan}, "owner_cap of oktopk must be at least 1"),
        ({"owner_cap": None}, "owner_cap of oktopk must be a number"),
        ({"momentum": 1.0}, r"momentum of oktopk must be in \[0, 1\)"),
        (
            {"momentum": 0.9, "error_feedback": False},
            "momentum of oktopk does not fit error_feedback=False",
        ),
        ({"mode": "dynamic"}, "Unknown mode 'dynamic' of oktopk; valid names: exact, static"),
        (
            {"mode": "static", "tau_prime": 8},
            "tau_prime and owner_cap of oktopk have no effect with mode='static'",
        ),
        ({"mode": "static", "owner_cap": 2.0}, "owner_cap of oktopk have no effect"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OkTopk(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gather": "parameters"}, "'parameters' does not fit oktopk: set gather='gradients'"),
        ({"gather": "gradients", "decouple": False}, "Leave out one of them"),
    ],
)
def test_exchanges_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExchangeOptions(compressor=OkTopk(), **options)


@distributed(world_sizes=(2,))
def test_messages_may_be_shorter_than_the_memory_that_waits_for_them() -> None:
    """What gloo is relied on for, with receives that come before a send, and after it."""
    collectives = new_collectives(torch.device("cpu"))
    for number, length in enumerate((1, 7, 50_000)):
        for lane in ("reduce_scatter", "all_gather"):
            incoming = torch.full((2, 100_000), -1, dtype=torch.int32)
            if collectives.world.rank:
                collectives.expect_messages(lane, incoming, number)
            message = torch.arange(length, dtype=torch.int32) + collectives.world.rank
            messages = {0: message, 1: message}
            work = collectives.launch_messages(lane, messages, (0, 1), incoming, number)
            work.wait()
            other = 1 - collectives.world.rank
            assert torch.equal(incoming[other, :length], torch.arange(length) + other)
            assert (incoming[other, length:] == -1).all()
            assert (incoming[collectives.world.rank] == -1).all()
    assert collectives.ledger["metadata"] == 4 * 6
    assert collectives.ledger["reduce_scatter"] == 4 * (6 + 49_999)
    assert collectives.ledger["all_gather"] == 4 * (6 + 49_999)
