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
from tests.exchange.test_coded import coded
from tests.training.linear import SOMETIMES, Run

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
    if not run.part._options.is_of_gradients:
        state = run.part.optimizer_state_dict()["state"]
        masters = [
            state[number][MASTER_KEY] if number in state else weight
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
    run, other = Run(coded(DGC(density=0.05))), Run(ExchangeOptions("gradients", codec=codec))
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


def _lagging_and_frozen() -> Run:
    run = Run(LAGGING)
    _steps(run, 4)
    _freeze(run)
    _steps(run, 1, is_frozen=True)
    return run


def _master(run: Run) -> torch.Tensor:
    """Of the parameter that is frozen; collective."""
    return run.part.optimizer_state_dict()["state"][SOMETIMES][MASTER_KEY].clone()


@distributed(world_sizes=(1, 2))
def test_what_is_written_to_a_frozen_weight_stays_and_moves_its_master() -> None:
    run = _lagging_and_frozen()
    weight = run.model.weights[SOMETIMES]
    lag = _master(run) - weight.detach()
    assert lag.norm() > 0 or dist.get_world_size() == 1
    written = weight.detach() + 5.0
    with torch.no_grad():
        weight.copy_(written)
    # In a checkpoint, while it is in no plan, and once it is in one again.
    torch.testing.assert_close(_master(run), written + lag)
    run.pipeline.complete_parameters()
    _grow(run)
    _steps(run, 1, is_frozen=True)
    weight.requires_grad_(True)
    _steps(run, 1, is_frozen=True)
    run.pipeline.complete_parameters()
    torch.testing.assert_close(_master(run), written + lag)
    # What is left is less than it was, of a weight of about 5.
    assert (weight.detach() - written - lag).norm() <= lag.norm()


@distributed(world_sizes=(1, 2))
def test_what_is_written_between_two_plans_stays() -> None:
    run = Run(LAGGING)
    _steps(run, 4)
    weight = run.model.weights[SOMETIMES]
    _grow(run)
    # The plan ends with the forward, and the next one begins with the end of backward.
    run.backward(leaves_out=True)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(5.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.pipeline.complete_parameters()
    assert (weight.detach() - before).mean() == pytest.approx(5.0, rel=0.2)
    assert (_master(run) - before).mean() == pytest.approx(5.0, rel=0.2)


@distributed(world_sizes=(2,))
def test_masters_that_are_loaded_do_not_follow_what_was_written_before() -> None:
    run = _lagging_and_frozen()
    run.pipeline.complete_parameters()
    weights = copy.deepcopy(run.model.state_dict())
    state = copy.deepcopy(run.part.optimizer_state_dict())
    weight = run.model.weights[SOMETIMES]
    with torch.no_grad():
        weight.add_(5.0)
    moved = _master(run)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(state)
    loaded = state["state"][SOMETIMES][MASTER_KEY]
    assert torch.equal(_master(run), loaded)
    assert not torch.allclose(moved, loaded)


@distributed(world_sizes=(1, 2))
def test_what_is_written_to_a_frozen_weight_after_a_load_stays() -> None:
    run, resumed = _lagging_and_frozen(), Run(LAGGING)
    run.pipeline.complete_parameters()
    state = copy.deepcopy(run.part.optimizer_state_dict())
    _freeze(resumed)
    resumed.resume(run)
    resumed.optimizer.load_state_dict(state)
    _steps(resumed, 1, is_frozen=True)
    weight = resumed.model.weights[SOMETIMES]
    lag = _master(resumed) - weight.detach()
    written = weight.detach() + 5.0
    with torch.no_grad():
        weight.copy_(written)
    weight.requires_grad_(True)
    _steps(resumed, 1, is_frozen=True)
    resumed.pipeline.complete_parameters()
    torch.testing.assert_close(_master(resumed), written + lag)
    assert (weight.detach() - written - lag).norm() <= lag.norm()


@distributed(world_sizes=(1, 2))
def test_replicas_of_frozen_weights_are_made_equal_to_their_masters() -> None:
    run = _lagging_and_frozen()
    # The second time after a write.
    for _ in range(2):
        _steps(run, 1, is_frozen=True)
        run.part.sync_replicas()
        weight, master = run.model.weights[SOMETIMES], _master(run)
        assert torch.equal(weight.detach(), master)
        with torch.no_grad():
            weight.mul_(1.01)


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
