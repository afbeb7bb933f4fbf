"""What encoding has left of a parameter that is frozen meanwhile: it is sent once that thaws."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.compression import DGC, Compressor, Int4, OkTopk, PowerSGD, TopK
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.masters import MASTER_KEY
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.exchange.test_coded import coded
from tests.training.linear import SOMETIMES, Run, gradients_of
from tests.training.three_ways import new_pipeline

CASES = [
    coded(Int4(block_size=64)),
    coded(TopK(density=0.05)),
    coded(PowerSGD(rank=1, min_saving=1.0)),
    coded(OkTopk(density=0.1)),
    coded(Int4(block_size=64), "parameters"),
]


def _grow(run: Run) -> None:
    """Another parameter begins to be trained, so that the next step is recorded again."""
    new = nn.Parameter(torch.zeros(3))
    run.model.register_parameter(f"new{len(run.optimizer.param_groups)}", new)
    run.optimizer.add_param_group({"params": [new]})


def _freeze(run: Run) -> None:
    run.model.weights[SOMETIMES].requires_grad_(False)
    _grow(run)


def _steps(run: Run, count: int, is_frozen: bool = False) -> None:
    for _ in range(count):
        run.step(leaves_out=is_frozen)


@contextmanager
def _nothing_dropped() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    assert not [one for one in said if "is dropped" in str(one.message)]


def _error(run: Run) -> float:
    """Of the parameter that was frozen; collective."""
    masters = None
    if not run.pipeline.options.is_of_gradients:
        state = run.part.optimizer_state_dict()["state"]
        masters = [
            state.get(number, {}).get(MASTER_KEY, weight)
            for number, weight in enumerate(run.model.weights)
        ]
    distance = run._distances(1.0, masters)[SOMETIMES]
    return distance / run.magnitudes[SOMETIMES]


@distributed(world_sizes=(2,))
def test_nothing_is_lost_of_what_is_frozen_meanwhile() -> None:
    for options in CASES:
        run = Run(options)
        _steps(run, 4)
        _freeze(run)
        with _nothing_dropped():
            _steps(run, 2, is_frozen=True)
            assert _error(run) <= 1e-4, options
            _grow(run)
            _steps(run, 2, is_frozen=True)
            run.model.weights[SOMETIMES].requires_grad_(True)
            _steps(run, 4)
        assert _error(run) <= 1e-4, options
        run.pipeline.detach()


@distributed(world_sizes=(2,))
def test_nothing_is_lost_of_what_is_frozen_in_a_checkpoint_and_after_it() -> None:
    for options in CASES:
        run, resumed = Run(options), Run(options)
        _steps(run, 4)
        _freeze(run)
        _steps(run, 1, is_frozen=True)
        run.pipeline.complete_parameters()
        state = copy.deepcopy(run.part.optimizer_state_dict())
        _assert_same_in_a_folder(run, state["residuals"])
        _freeze(resumed)
        resumed.resume(run)
        resumed.optimizer.load_state_dict(state)
        with _nothing_dropped():
            _steps(resumed, 2, is_frozen=True)
            again = resumed.part.optimizer_state_dict()["residuals"]
            for name, kept in state["residuals"]["worker"].items():
                assert torch.equal(again["worker"][name][SOMETIMES], kept[SOMETIMES])
            resumed.model.weights[SOMETIMES].requires_grad_(True)
            _steps(resumed, 4)
        assert _error(resumed) <= 1e-4, options


def _assert_same_in_a_folder(run: Run, whole: dict[str, dict]) -> None:
    sharded = run.part.sharded_state_dict()
    chunks = {id(stand_in): own for stand_in, own in sharded.chunks}
    for kind in ("worker", "owner"):
        named = sharded["residuals"][kind]
        assert {name: set(of) for name, of in named.items()} == {
            name: set(of) for name, of in whole[kind].items()
        }
        for name, of in named.items():
            expected = whole[kind][name][SOMETIMES].flatten()
            found = torch.full_like(expected, torch.nan)
            for chunk in chunks[id(of[SOMETIMES])]:
                found[chunk.start : chunk.start + chunk.values.numel()] = chunk.values
            if kind == "worker":
                numel = expected.numel() // dist.get_world_size()
                expected = expected[dist.get_rank() * numel :][:numel]
                found = found[dist.get_rank() * numel :][:numel]
            assert torch.equal(found, expected)
    assert sharded["residuals"]["rates"] == whole["rates"]
    assert set(sharded["residuals"]["factors"]) == set(whole["factors"])


@distributed(world_sizes=(2,))
def test_loading_forgets_what_is_held_of_what_is_frozen() -> None:
    run = Run(coded(Int4(block_size=64)))
    before = copy.deepcopy(run.optimizer.state_dict())
    _steps(run, 3)
    _freeze(run)
    _steps(run, 1, is_frozen=True)
    before["param_groups"] = copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    run.optimizer.load_state_dict(before)
    held = run.part.optimizer_state_dict()["residuals"]
    assert all(SOMETIMES not in kept for kept in held["worker"].values())


@distributed(world_sizes=(2,))
def test_what_no_optimizer_trains_any_more_is_left_out() -> None:
    for codec in (DGC(density=0.05), None):
        _check_left_out(codec)


def _check_left_out(codec: Compressor | None) -> None:
    run, other = Run(coded(DGC(density=0.05))), Run(ExchangeOptions("gradients", compressor=codec))
    _steps(run, 3)
    state = copy.deepcopy(run.part.optimizer_state_dict())
    for one in (run, other):
        _freeze(one)
    state["param_groups"] = copy.deepcopy(other.optimizer.state_dict()["param_groups"])
    other.optimizer.load_state_dict(state)
    _steps(other, 1, is_frozen=True)
    # Also without a compressor: another run may have one.
    held = other.part.optimizer_state_dict()["residuals"]["worker"]
    assert all(SOMETIMES in held[name] for name in ("momentum", "residual"))
    weight = other.model.weights[SOMETIMES]
    del other.optimizer.param_groups[0]["params"][SOMETIMES]
    _steps(other, 1, is_frozen=True)
    again = other.part.optimizer_state_dict()["residuals"]["worker"]
    assert bool(again) is (codec is not None)
    for kept in again.values():
        assert all(one.shape != (2, *weight.shape) for one in kept.values())


LAGGING = coded(Int4(block_size=64), "parameters")


def _whole_state(run: Run) -> dict[int, dict[str, torch.Tensor]]:
    """Of all parameters, by their numbers; collective."""
    return copy.deepcopy(run.part.optimizer_state_dict()["state"])


@distributed(world_sizes=(1, 2))
def test_what_leaves_a_plan_becomes_what_its_master_was() -> None:
    run = Run(LAGGING)
    _steps(run, 4)
    weight, master = run.model.weights[SOMETIMES], _whole_state(run)[SOMETIMES][MASTER_KEY]
    assert not torch.equal(weight.detach(), master)
    _freeze(run)
    _steps(run, 1, is_frozen=True)
    assert torch.equal(weight.detach(), master)
    assert MASTER_KEY not in _whole_state(run).get(SOMETIMES, {})
    assert_equal_on_all_ranks(([weight.detach()], []))


@distributed(world_sizes=(1, 2))
def test_what_is_written_to_a_frozen_weight_stays() -> None:
    run = Run(LAGGING)
    _steps(run, 4)
    _freeze(run)
    _steps(run, 1, is_frozen=True)
    weight = run.model.weights[SOMETIMES]
    written = weight.detach() + 5.0
    with torch.no_grad():
        weight.copy_(written)
    # In no plan, and once it is in one again.
    _grow(run)
    _steps(run, 1, is_frozen=True)
    assert torch.equal(weight.detach(), written)
    weight.requires_grad_(True)
    _steps(run, 2, is_frozen=True)
    run.pipeline.complete_parameters()
    assert torch.equal(weight.detach(), written)


@distributed(world_sizes=(1, 2))
def test_what_is_written_between_two_plans_stays() -> None:
    run = Run(LAGGING)
    _steps(run, 4)
    weight = run.model.weights[SOMETIMES]
    _grow(run)
    # The plan ends with the forward, and the next one begins with the end of backward.
    with run.pipeline.forward():
        loss = run.model(gradients_of(run.num_steps, dist.get_rank(), leaves_out=True))
    assert run.part.plan is None
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(5.0)
    with run.pipeline.backward():
        loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    assert torch.equal(weight.detach(), before + 5.0)
    # Nor is it taken back by a master of before.
    run.pipeline.parts[0].sync_replicas()
    assert torch.equal(weight.detach(), before + 5.0)


@distributed(world_sizes=(1, 2))
def test_loaded_masters_of_what_is_frozen_are_dropped_and_weights_count() -> None:
    run, resumed = Run(LAGGING), Run(LAGGING)
    _steps(run, 4)
    _grow(run)
    _steps(run, 2)
    state = copy.deepcopy(run.part.optimizer_state_dict())
    assert MASTER_KEY in state["state"][SOMETIMES]
    _freeze(resumed)
    resumed.resume(run)
    resumed.optimizer.load_state_dict(state)
    weight = resumed.model.weights[SOMETIMES]
    before = weight.detach().clone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _steps(resumed, 2, is_frozen=True)
    told = [one for one in said if "Its masters (" in str(one.message)]
    assert len(told) == (dist.get_rank() == 0)
    weight.requires_grad_(True)
    _steps(resumed, 1, is_frozen=True)
    resumed.pipeline.complete_parameters()
    assert torch.equal(weight.detach(), before)


@distributed(world_sizes=(1, 2))
def test_what_is_frozen_between_two_trainings_becomes_what_its_master_was() -> None:
    run = Run(LAGGING)
    _steps(run, 4)
    master = _whole_state(run)[SOMETIMES][MASTER_KEY]
    run.pipeline.detach()
    weight, before = run.model.weights[SOMETIMES], run.part
    weight.requires_grad_(False)
    run.pipeline = new_pipeline(run.model, run.optimizer, options=LAGGING)
    run.part = run.pipeline.parts[0]
    run.part.inherit([before])
    assert torch.equal(weight.detach(), master)
    with _nothing_dropped():
        _steps(run, 2, is_frozen=True)
    run.pipeline.complete_parameters()
    assert torch.equal(weight.detach(), master)
    assert MASTER_KEY not in _whole_state(run).get(SOMETIMES, {})


@distributed(world_sizes=(2,))
def test_a_state_that_torch_refuses_leaves_everything_as_it_was() -> None:
    run = Run(coded(Int4(block_size=64)))
    _steps(run, 3)
    state = copy.deepcopy(run.part.optimizer_state_dict())
    for has_residuals in (True, False):
        other = copy.deepcopy(state)
        other["param_groups"][0]["params"].append(99)
        if not has_residuals:
            del other["residuals"]
        with pytest.raises(ValueError, match="parameter group"):
            run.optimizer.load_state_dict(other)
        held = run.part.optimizer_state_dict()["residuals"]
        assert held["counts"] == state["residuals"]["counts"]
        for number, kept in state["residuals"]["worker"]["residual"].items():
            assert torch.equal(held["worker"]["residual"][number], kept)
