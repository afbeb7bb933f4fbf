"""What an optimizer holds may be exchanged between a step and the next forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, weights
from tests.training.three_ways import new_pipeline, train_steps

NUM_STEPS = 6
StateOf = Callable[[int], dict[str, Any]]
Change = Callable[[nn.Module, Optimizer, int, StateOf], None]
"""Takes the model, the optimizer, the step and state by number of a parameter; before a step."""


def _by_hand(model: nn.Module, optimizer: Optimizer, change: Change) -> list[Tensor]:
    """Averages every gradient itself and steps what plain torch steps."""
    seen = []
    for step in range(NUM_STEPS):
        states = optimizer.state_dict if step else dict
        change(model, optimizer, step, lambda n, s=states: s()["state"][n])
        model.zero_grad()
        loss_of(model, *batch("mlp", step, dist.get_rank())).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / dist.get_world_size())
                dist.all_reduce(parameter.grad)
        optimizer.step()
        seen += weights(model)
    return seen


def _ours(
    model: nn.Module,
    optimizer: Optimizer,
    change: Change,
    options: ExchangeOptions | None = None,
) -> list[Tensor]:
    pipeline = new_pipeline(model, optimizer, options=options)
    seen = []
    for step in range(NUM_STEPS):
        part = pipeline.parts[0]
        change(model, part.optimizer, step, lambda n, p=part: _state_of(p)[n])
        model.zero_grad()
        train_steps(pipeline, model, [step])
        pipeline.complete_parameters()
        seen += weights(model)
    pipeline.detach()
    return seen


def _state_of(part: Any) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = part.optimizer_state_dict()["state"]
    return state


def _adam(module: nn.Module) -> Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def _assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(left, right), number


def _exchange_block(model: nn.Module, optimizer: Optimizer, step: int, _: StateOf) -> None:
    """As many other parameters as before, and those of before again."""
    block = list(model.layers[2 * (step // 2 % 2)].parameters())
    optimizer.param_groups[0]["params"] = block


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@distributed(world_sizes=(1, 2))
def test_other_parameters_in_a_group_are_trained(gather: str) -> None:
    ours, theirs = (build("mlp") for _ in range(2))
    options = ExchangeOptions(gather)
    seen = _ours(ours, _adam(ours.layers[0]), _exchange_block, options)
    _assert_same(seen, _by_hand(theirs, _adam(theirs.layers[0]), _exchange_block))


class _Points(nn.Module):
    """Of which there may be more as training goes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.points = nn.Parameter(torch.randn(9, 7))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.points.T @ self.points))


def _densify(model: nn.Module, optimizer: Optimizer, step: int, state_of: StateOf) -> None:
    if step not in (2, 4):
        return
    old, more = model.points, model.points.detach()[:2]
    state = state_of(0) if step == 4 else {}
    model.points = nn.Parameter(torch.cat([old.detach(), more]))
    optimizer.param_groups[0]["params"][0] = model.points
    optimizer.state.pop(old, None)
    if state:
        optimizer.state[model.points] = {
            key: torch.cat([value, torch.zeros_like(more)]) if value.ndim else value.clone()
            for key, value in state.items()
        }


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@distributed(world_sizes=(1, 2))
def test_a_longer_parameter_in_module_and_group_is_trained(gather: str) -> None:
    """With new state, or with what is put into `optimizer.state`."""
    ours, theirs = _Points(), _Points()
    seen = _ours(ours, _adam(ours), _densify, ExchangeOptions(gather))
    _assert_same(seen, _by_hand(theirs, _adam(theirs), _densify))
    assert len(ours.points) == 13


@distributed(world_sizes=(2,))
def test_nothing_of_parameters_that_are_gone_is_kept() -> None:
    model = _Points()
    optimizer = _adam(model)
    old = model.points
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    _densify(model, optimizer, 2, lambda _: {})
    train_steps(pipeline, model, [1])
    assert old not in optimizer.state
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_longer_parameter_that_no_group_holds_is_refused_with_a_remedy_that_works() -> None:
    model = _Points()
    optimizer = _adam(model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    model.points = nn.Parameter(torch.cat([model.points.detach()] * 2))
    with pytest.raises(ValueError, match="Put the new one into the optimizer's parameter group"):
        train_steps(pipeline, model, [1])
    optimizer.param_groups[0]["params"][0] = model.points
    train_steps(pipeline, model, [1])
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_parameters_of_another_module_are_refused() -> None:
    model = build("mlp")
    optimizer = _adam(model)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="holds 1 parameter.s. that are not the module's"):
        train_steps(pipeline, model, [1])


@pytest.mark.parametrize("is_reduced", [False, True])
@distributed(world_sizes=(1, 2))
def test_an_exchange_between_forward_and_step_is_refused(is_reduced: bool) -> None:
    model = build("mlp")
    optimizer = _adam(model.layers[0])
    pipeline = new_pipeline(model, optimizer)

    def exchange(step: int) -> None:
        if is_reduced:
            pipeline.parts[0].mean.norm()
        _exchange_block(model, optimizer, 2 * step, lambda _: {})

    with pytest.raises(RuntimeError, match="since the forward of this step"):
        train_steps(pipeline, model, range(2), between=exchange)
    assert pipeline.parts[0].num_steps == 1


@pytest.mark.parametrize("is_reduced", [False, True])
@distributed(world_sizes=(2,))
def test_nor_may_it_come_while_gradients_wait_for_a_step(is_reduced: bool) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, [0])
    optimizer.zero_grad()
    _backward(pipeline, model, 1)
    if is_reduced:
        pipeline.parts[0].mean.norm()
    optimizer.add_param_group({"params": list(model.layers[2].parameters())})
    with pytest.raises(RuntimeError, match="after a backward whose gradients no step has used"):
        _backward(pipeline, model, 2)


def _backward(pipeline: Pipeline, model: nn.Module, step: int) -> None:
    with pipeline.forward():
        loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
    with pipeline.backward():
        loss.backward()
