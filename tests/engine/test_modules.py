"""Modules that cannot have a gate, and modules that are exchanged between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.lightning.matrix.models import HoldsAnothers
from tests.training.captured import capture
from tests.training.delays import Delays
from tests.training.models import build, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_reference, train_steps

LATE = Delays(before_all_gather_s=0.05)
GATHERS = ("parameters", "gradients")


def _is_idle(pipeline: Pipeline) -> bool:
    active = pipeline.parts[0].plans.active
    assert active is not None
    return active.gatherer.is_idle


@pytest.mark.parametrize("gather", GATHERS)
@distributed(world_sizes=(1, 2))
def test_what_torchscript_reads_is_complete_when_the_step_returns(
    gather: str, world_size: int
) -> None:
    """Also for those who hold it; what other modules have is still under way then."""
    model, expected = build("mlp"), train_reference("mlp", "sgd", 3, world_size)[0]
    model.layers[2] = torch.jit.script(model.layers[2])
    held = list(model.layers[2].parameters())
    options = ExchangeOptions(gather)
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE, options=options)
    for step in range(3):
        train_steps(pipeline, model, [step])
        assert all(map(torch.equal, held, expected[step][2:4]))
        assert _is_idle(pipeline) == (world_size == 1)
    pipeline.detach()
    assert all(map(torch.equal, weights(model), expected[2]))


def _assert_assigned_are_taken_over(pipeline: Pipeline, model: nn.Module) -> None:
    state = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pipeline.forward():
        pass
    trained = {id(parameter) for parameter in pipeline.parts[0].parameters}
    assert all(id(p) in trained and bool((p == 0.25).all()) for p in model.parameters())
    pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_parameters_assigned_in_torchscript_are_taken_over(world_size: int) -> None:
    model = build("mlp")
    model.layers[0] = torch.jit.script(model.layers[0])
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0])
    _assert_assigned_are_taken_over(pipeline, model)


class _Holding(HoldsAnothers):
    """Reads what it holds elsewhere, where no gate can see it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.held = [self.weight, self.bias]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.held)


def _exchange(model: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> None:
    for number in (0, 2, 4):
        model.layers[number] = kind(model.layers[number])


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("kind", [HoldsAnothers, _Holding, torch.jit.script])
@distributed(world_sizes=(1, 2, 3))
def test_exchanged_modules_wait_where_they_read(
    kind: Callable[[nn.Linear], nn.Module], gather: str, world_size: int
) -> None:
    """On one rank a step earlier than on the others, too: nothing is agreed on."""
    model, expected = build("mlp"), train_reference("mlp", "sgd", 6, world_size)[0]
    options = ExchangeOptions(gather)
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE, options=options)
    for step in range(6):
        if step == (2 if dist.get_rank() == 0 else 3):
            _exchange(model, kind)
        train_steps(pipeline, model, [step])
    if kind is not torch.jit.script:
        assert _is_idle(pipeline) == (world_size == 1)
    pipeline.detach()
    close = torch.equal if world_size < 3 else torch.allclose
    assert all(map(close, weights(model), expected[5]))


@distributed(world_sizes=(2,))
def test_reads_in_an_exchanged_module_between_steps_wait() -> None:
    model, expected = build("mlp"), train_reference("mlp", "sgd", 4, 2)[0]
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    for step in range(4):
        if step == 1:
            _exchange(model, HoldsAnothers)
        train_steps(pipeline, model, [step])
        assert torch.equal(model.layers[2].weight, expected[step][2])
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_exchanged_modules_are_waited_for_in_a_new_plan_too() -> None:
    model, expected = build("mlp"), train_reference("mlp", "sgd", 5, 2)[0]
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    train_steps(pipeline, model, [0])
    _exchange(model, _Holding)
    train_steps(pipeline, model, [1, 2])
    plan = pipeline.parts[0].plan
    assert plan is not None
    pipeline.parts[0].replan(plan)
    train_steps(pipeline, model, [3, 4])
    pipeline.detach()
    assert all(map(torch.equal, weights(model), expected[4]))


@distributed(world_sizes=(1, 2))
def test_parameters_assigned_in_an_exchanged_module_are_taken_over(world_size: int) -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0])
    _exchange(model, HoldsAnothers)
    train_steps(pipeline, model, [1])
    _assert_assigned_are_taken_over(pipeline, model)


@distributed(world_sizes=(2,))
def test_lent_tensors_are_not_taken_for_new_parameters() -> None:
    """Of `functional_call` around what runs the forward, as under Fabric."""
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, [0])
    before = weights(model)
    fast = {name: parameter * 2 for name, parameter in model.named_parameters()}
    frozen = {name: nn.Parameter(fast[name].detach(), requires_grad=False) for name in fast}
    for lent in (fast, frozen):
        with torch.nn.utils.stateless._reparametrize_module(model, lent), pipeline.forward():
            pass
        assert all(map(torch.equal, weights(model), before))
    train_steps(pipeline, model, [1, 2])
    expected = train_reference("mlp", "sgd", 3, 2)[0]
    pipeline.detach()
    assert all(map(torch.equal, weights(model), expected[2]))


@pytest.mark.parametrize("is_bound", [False, True])
@distributed(world_sizes=(1, 2))
def test_what_a_captured_graph_reads_is_waited_for(is_bound: bool, world_size: int) -> None:
    model, expected = build("mlp"), train_reference("mlp", "sgd", 5, world_size)[0]
    pipeline = new_pipeline(model, optimizer_for("sgd", model), delays=LATE)
    train_steps(pipeline, model, [0])
    is_seen = pytest.warns(UserWarning, match="A compiled module, a CUDA graph or a forward")
    warns = world_size > 1 and dist.get_rank() == 0
    with is_seen if warns else nullcontext():
        pipeline.parts[0].plans.complete_parameters("capture")
        capture(model.layers, build("mlp").layers)
        if is_bound:
            replay = model.layers.forward
            model.layers.forward = MethodType(lambda _, x: replay(x), model.layers)
        train_steps(pipeline, model, [1])
    for step in (2, 3):
        train_steps(pipeline, model, [step])
        assert pipeline.training.has_compiled_region
    # The bound method of the class, as after a redirected call in Fabric, reads through the gate.
    model.layers.forward = MethodType(nn.Sequential.forward, model.layers)
    train_steps(pipeline, model, [4])
    assert not pipeline.training.has_compiled_region
    pipeline.detach()
    assert all(map(torch.equal, weights(model), expected[4]))
