"""Ok-Topk goes on as before: from a checkpoint, and with another plan of the same buckets."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.compression import OkTopk, TopkDSA
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.exchange.sparse_runs import (
    BOTH_MODES,
    buckets_of,
    check_all_alike,
    check_resumed_has_the_same_bits,
    run_of,
)
from tests.training.linear import Run


@distributed(world_sizes=(3,))
def test_a_resumed_run_has_the_same_bits() -> None:
    """Between two exact thresholds, with regions that have moved."""
    for codec in BOTH_MODES:
        _check_a_resumed_run_has_the_same_bits(codec)


def _check_a_resumed_run_has_the_same_bits(codec: OkTopk) -> None:
    for steps_before in (1, 6):
        run, resumed = (run_of(codec) for _ in range(2))
        for _ in range(steps_before):
            run.step()
        check_resumed_has_the_same_bits(run, resumed)
        assert resumed.error() <= 1e-5


@distributed(world_sizes=(3,))
def test_a_resumed_run_has_the_same_bits_with_buckets_that_are_sparse_since_other_steps() -> None:
    """Each bucket counts its own sparse steps, by which thresholds are exact."""
    for codec in BOTH_MODES:
        run, resumed = (
            Run(ExchangeOptions("gradients", compressor=codec), NoFusion()) for _ in range(2)
        )
        run.step()
        run.part.use_compressor(replace(codec, density=0.01))
        for _ in range(4):
            run.step()
        run.part.use_compressor(codec)
        for _ in range(3):
            run.step()
        counts = [one.counts["reduce"] for one in buckets_of(run) if one.is_sparse]
        assert len(set(counts)) > 1
        check_resumed_has_the_same_bits(run, resumed)


@distributed(world_sizes=(3,))
def test_a_run_resumed_with_another_density_keeps_k() -> None:
    """Owners' shares in a checkpoint are of the k that was wanted then, and of its cap."""
    before = OkTopk(density=0.1)
    for changes in ({"density": 0.05}, {"density": 0.09}, {"density": 0.2}, {"owner_cap": 1.0}):
        run, resumed = run_of(before), run_of(replace(before, **changes))
        for _ in range(3):
            run.step()
        state = copy.deepcopy(run.part.optimizer_state_dict())
        resumed.resume(run)
        resumed.optimizer.load_state_dict(state)
        for step in range(3):
            resumed.step()
            check_all_alike(resumed)
            (one,) = buckets_of(resumed)
            assert one.selection.k / 2 <= one.tally.num_kept <= one.selection.k, (changes, step)
        assert resumed.error() <= 1e-5


@distributed(world_sizes=(3,))
def test_a_load_leaves_what_is_under_way_alone() -> None:
    """What backward sent is summed and selected as it was meant; what is loaded counts next."""
    codec = OkTopk(density=0.05, tau_prime=1)
    run, other = (run_of(codec) for _ in range(2))
    run.step()
    other.step()
    early = copy.deepcopy(run.part.optimizer_state_dict())
    for _ in range(4):
        run.step()
        other.step()
    for one in (run, other):
        one.backward()
    run.optimizer.load_state_dict(early)
    for one in (run, other):
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.pipeline.complete_parameters()
    pairs = zip(run.model.weights, other.model.weights, strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)
    run.step()
    check_all_alike(run)


@distributed(world_sizes=(2,))
def test_regions_that_followed_nobody_are_made_anew() -> None:
    """Those of another compressor are equal ones."""
    run, other = run_of(TopkDSA(density=0.05)), run_of(OkTopk(density=0.05))
    for one in (run, other):
        one.step()
        one.step()
    assert buckets_of(other)[0].has_regions
    other.optimizer.load_state_dict(copy.deepcopy(run.part.optimizer_state_dict()))
    assert not buckets_of(other)[0].has_regions


@distributed(world_sizes=(3,))
def test_a_plan_with_the_same_bucket_goes_on_as_before() -> None:
    for codec in BOTH_MODES:
        _check_a_plan_with_the_same_bucket_goes_on_as_before(codec)


def _check_a_plan_with_the_same_bucket_goes_on_as_before(codec: OkTopk) -> None:
    run, other = (run_of(codec) for _ in range(2))
    for _ in range(6):
        run.step()
        other.step()
    # Regions and shares follow from what owners send to all.
    run.pipeline.complete_parameters()
    before = buckets_of(run)[0].steering
    run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    assert torch.equal(buckets_of(run)[0].steering, before)
    for _ in range(3):
        run.step()
        other.step()
    for one in (run, other):
        one.pipeline.complete_parameters()
    pairs = zip(run.model.weights, other.model.weights, strict=True)
    assert all(torch.equal(one, another) for one, another in pairs)


OWNED = (*BOTH_MODES, TopkDSA(density=0.05))


class _Interrupt(Exception):
    """Raised in the midst of a step."""


def _step_that_breaks_off(run: Run) -> None:
    """Backward, and a step that raises when its gathers are launched."""

    def interrupt(*_: object) -> None:
        raise _Interrupt

    run.backward()
    hook = run.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(_Interrupt):
        run.optimizer.step()
    hook.remove()


@pytest.mark.parametrize("codec", OWNED, ids=["exact", "static", "topkdsa"])
@distributed(world_sizes=(2,))
def test_a_step_that_breaks_off_and_is_dropped_changes_nothing_that_is_kept(codec: Any) -> None:
    run = run_of(codec)
    for _ in range(3):
        run.step()
    before = copy.deepcopy(run.part.optimizer_state_dict()["residuals"]["worker"])
    _step_that_breaks_off(run)
    run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    after = run.part.optimizer_state_dict()["residuals"]["worker"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("codec", [OWNED[0], OWNED[2]], ids=["exact", "topkdsa"])
@distributed(world_sizes=(2,))
def test_a_step_that_breaks_off_and_is_made_again_loses_nothing(codec: Any) -> None:
    run = run_of(codec)
    for _ in range(3):
        run.step()
    _step_that_breaks_off(run)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.count(run.num_steps)
    run.pipeline.complete_parameters()
    assert run.error() <= 1e-5
