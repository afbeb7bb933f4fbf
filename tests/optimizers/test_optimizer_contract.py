"""What users do to an optimizer between steps means the same as on a plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed
from tests.optimizers.strangers import Sharpness
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, weights
from tests.training.three_ways import new_pipeline, train_steps

LATE = Delays(before_all_gather_s=0.03)
Between = Callable[[nn.Module, Optimizer, int], None]


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _ours(num_steps: int, between: Between) -> list[Tensor]:
    model = build("mlp")
    optimizer = _sgd(model)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    for step in range(num_steps):
        between(model, optimizer, step)
        train_steps(pipeline, model, [step])
    pipeline.detach()
    return weights(model)


def _plain(num_steps: int, between: Between) -> list[Tensor]:
    model = build("mlp")
    optimizer = _sgd(model)
    for step in range(num_steps):
        between(model, optimizer, step)
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (loss_of(model, *batch("mlp", step, rank)) / dist.get_world_size()).backward()
        optimizer.step()
    return weights(model)


def _forget_momentum(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        fresh = _sgd(model).state_dict()
        optimizer.load_state_dict(fresh)


def _forget_some_momentum(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        momentum = {"momentum_buffer": torch.ones_like(next(model.parameters()))}
        optimizer.load_state_dict({**_sgd(model).state_dict(), "state": {0: momentum}})


def _freeze_and_unfreeze(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        model.layers[0].requires_grad_(False)
        optimizer.add_param_group({"params": [], "lr": 0.1})
    if step == 4:
        model.layers[0].requires_grad_(True)


def _load_then_replan(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        first = next(model.parameters())
        momentum = {"momentum_buffer": torch.ones_like(first)}
        optimizer.load_state_dict({**_sgd(model).state_dict(), "state": {0: momentum}})
        optimizer.add_param_group({"params": [], "lr": 0.1})


def _add_frozen_group(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        optimizer.add_param_group({"params": [frozen]})


def _change_learning_rate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)


def _drop_a_backward(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step in (0, 2):
        loss_of(model, *batch("mlp", 50 + step, dist.get_rank())).backward()


BETWEEN: dict[str, Between] = {
    name.removeprefix("_"): function
    for name, function in globals().items()
    if name.startswith(("_forget", "_freeze", "_load", "_add", "_change", "_drop"))
}


@pytest.mark.parametrize("between", sorted(BETWEEN))
@distributed(world_sizes=(1, 2, 3))
def test_changes_between_steps(between: str) -> None:
    ours, plain = _ours(6, BETWEEN[between]), _plain(6, BETWEEN[between])
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(2, 3))
def test_a_dropped_backward_may_leave_other_buckets_on_other_ranks() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, _sgd(model))
    for step in range(4):
        if step == 2:
            # Rank 0 reduces all buckets, the others only the last layer's.
            part = model.layers if dist.get_rank() == 0 else model.layers[4:]
            inputs = torch.randn(5, 7 if dist.get_rank() == 0 else 61)
            with pipeline.backward():
                part(inputs).sum().backward()
        train_steps(pipeline, model, [step])
    for a, b in zip(weights(model), _plain(4, lambda *_: None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(1, 2))
def test_post_hooks_see_the_users_groups_and_the_new_values() -> None:
    model = build("mlp")
    held = list(model.parameters())
    optimizer = _sgd(model)
    seen: list[list[Tensor]] = []
    groups: list[int] = []

    def look(optimizer: Optimizer, args: object, kwargs: object) -> None:
        groups.append(id(optimizer.param_groups[0]["params"][0]))
        seen.append([parameter.detach().clone() for parameter in held])

    optimizer.register_step_post_hook(look)
    pipeline = new_pipeline(model, optimizer, delays=LATE)
    for step in range(3):
        train_steps(pipeline, model, [step])
        assert all(torch.equal(a, b) for a, b in zip(seen[-1], weights(model), strict=True))
    assert groups == [id(held[0])] * 3


@distributed(world_sizes=(1, 2))
def test_a_step_that_was_interrupted_leaves_no_pieces_in_the_groups() -> None:
    model = build("mlp")
    optimizer = _sgd(model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    parameters = optimizer.param_groups[0]["params"]
    pipeline.parts[0]._begin_step()
    assert optimizer.param_groups[0]["params"] is not parameters
    state = pipeline.parts[0].optimizer_state_dict()
    assert optimizer.param_groups[0]["params"] is parameters
    assert sorted(state["state"]) == list(range(6))


@distributed(world_sizes=(2,))
def test_the_guard_stands_in_backwards_that_do_not_synchronize() -> None:
    model = build("mlp")
    held = model.layers[0].bias
    pipeline = new_pipeline(model, _sgd(model), delays=LATE)
    train_steps(pipeline, model, [0])
    with (
        pytest.raises(RuntimeError, match="still being gathered"),
        pipeline.backward(synchronize=False),
    ):
        held.sum().backward()
    pipeline.complete_parameters()


@distributed(world_sizes=(1, 2))
def test_state_survives_a_second_pipeline_over_the_same_optimizer() -> None:
    model = build("mlp")
    optimizer = _sgd(model)
    first = new_pipeline(model, optimizer)
    train_steps(first, model, range(3))
    first.detach()
    optimizer.load_state_dict(copy.deepcopy(first.parts[0].optimizer_state_dict()))
    second = new_pipeline(model, optimizer)
    train_steps(second, model, range(3, 6))
    for a, b in zip(weights(model), _plain(6, lambda *_: None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(1, 2))
def test_parameters_that_are_new_at_the_step_are_refused() -> None:
    model = build("mlp")
    frozen = model.layers[0].weight.requires_grad_(False)
    optimizer = _sgd(model)
    pipeline = new_pipeline(model, optimizer)
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", 0, dist.get_rank()))
    frozen.requires_grad_(True)
    loss.backward()
    with pytest.raises(RuntimeError, match="began to require gradients"):
        optimizer.step()


class _ClosureFree(torch.optim.SGD):
    """Takes a closure and never calls it."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        super().step()


# Once torch has seen an SGD, each of its steps calls hooks, also from a subclass's step.
@distributed(world_sizes=(1, 2), keeps_ranks=False)
def test_a_step_that_never_calls_its_closure_is_refused() -> None:
    model = build("mlp")
    optimizer = _ClosureFree(model.parameters(), lr=0.1)
    new_pipeline(model, optimizer)
    with pytest.raises(RuntimeError, match="did not call its closure"):
        optimizer.step(lambda: torch.zeros(()))


@distributed(world_sizes=(1, 2), keeps_ranks=False)
def test_a_step_that_calls_its_closure_twice_is_refused() -> None:
    model = build("mlp")
    optimizer = Sharpness(model.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer)

    def closure() -> Tensor:
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", 0, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="Sharpness calls its closure more than once"):
        optimizer.step(closure)


@distributed(world_sizes=(1, 2))
def test_a_step_after_an_interrupted_one_finds_the_users_groups() -> None:
    model = build("mlp")
    optimizer = _sgd(model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    parameters = optimizer.param_groups[0]["params"]
    pipeline.parts[0]._begin_step()
    pipeline.complete_parameters()
    optimizer.step()
    assert optimizer.param_groups[0]["params"] is parameters
    pipeline.detach()


class _Failing(torch.optim.SGD):
    """Raises in the step after `fails` is set, once it has the gradients."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            assert closure is not None
            with torch.enable_grad():
                closure()
            raise ArithmeticError("not this time")
        return super().step(closure)


def _fail_in_a_step(model: nn.Module, optimizer: _Failing) -> Pipeline:
    """Trains, with an error in the second step, which the caller catches."""
    # One bucket: those that are stepped before the error keep their new values.
    pipeline = new_pipeline(model, optimizer, ThresholdFusion())
    train_steps(pipeline, model, [0])
    optimizer.zero_grad()
    optimizer.fails = True
    with pytest.raises(ArithmeticError, match="not this time"):
        optimizer.step(lambda: _backward(pipeline, model))
    optimizer.zero_grad()
    return pipeline


def _backward(pipeline: Pipeline, model: nn.Module) -> None:
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", 1, dist.get_rank()))
    with pipeline.backward():
        loss.backward()


@distributed(world_sizes=(1, 2))
def test_training_goes_on_after_a_step_whose_error_was_caught(world_size: int) -> None:
    model, plain = build("mlp"), build("mlp")
    pipeline = _fail_in_a_step(model, _Failing(model.parameters(), lr=0.05))
    train_steps(pipeline, model, [2, 3])
    pipeline.detach()
    other = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in (0, 2, 3):
        other.zero_grad()
        for rank in range(world_size):
            (loss_of(plain, *batch("mlp", step, rank)) / world_size).backward()
        other.step()
    for a, b in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(2,), timeout_s=30)
def test_a_training_that_ends_with_a_step_whose_error_was_caught_may_be_followed() -> None:
    model = build("mlp")
    _fail_in_a_step(model, _Failing(model.parameters(), lr=0.05)).detach()
    pipeline = new_pipeline(model, _sgd(model))
    train_steps(pipeline, model, [2, 3])
    pipeline.detach()


@pytest.mark.filterwarnings("ignore:No optimizer of the training holds")
@distributed(world_sizes=(1, 2))
def test_a_group_may_be_added_after_a_step_whose_error_was_caught(world_size: int) -> None:
    model = build("mlp")
    optimizer, spare = _Failing(model.layers[1:].parameters(), lr=0.05), model.layers[0]
    pipeline, before = _fail_in_a_step(model, optimizer), spare.weight.detach().clone()
    optimizer.add_param_group({"params": [*spare.parameters()]})
    # Other ranks' shards are still expected in the buffers of the plan that ends now.
    refused = pytest.raises(RuntimeError, match="begin another fit")
    with refused if world_size > 1 else nullcontext():
        train_steps(pipeline, model, [2, 3])
    if world_size == 1:
        assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
        assert not torch.equal(spare.weight, before)


@distributed(world_sizes=(1,))
def test_state_is_gathered_where_it_was_trained_wherever_parameters_are_moved() -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, _sgd(model))
    train_steps(pipeline, model, [0])
    pipeline.detach()
    # As Lightning does after a fit on an accelerator, whose groups know no other device.
    model.to("meta")
    assert pipeline.parts[0].stepper.device == torch.device("cpu")
