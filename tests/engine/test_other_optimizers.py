"""Parameters that no optimizer of the training holds, and optimizers that it does not know."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.engine import training as engine
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.engine.test_launch_order import log_launches
from tests.training import three_ways as three
from tests.training.models import MayLeaveOut, build, optimizer_for, weights
from tests.training.three_ways import new_native, new_pipeline, train_steps

GATHERS = pytest.mark.parametrize("gather", ["parameters", "gradients"])


class _Spare(nn.Module):
    """A layer that the training's optimizer holds, and two parameters that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.a, self.b = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def used(self, *, a: bool, b: bool) -> Tensor:
        """A loss with a gradient of `rank + 1` for each parameter that is used."""
        scale = dist.get_rank() + 1.0
        value = self.layer(torch.ones(1, 2)).sum()
        return value + scale * sum((one.sum() for one, on in ((self.a, a), (self.b, b)) if on), 0.0)


def _mean() -> float:
    return sum(rank + 1 for rank in range(dist.get_world_size())) / dist.get_world_size()


def _spare(gather: str = "parameters") -> tuple[_Spare, torch.optim.Optimizer, Pipeline]:
    torch.manual_seed(0)
    model = _Spare()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    return model, optimizer, new_pipeline(model, optimizer, options=ExchangeOptions(gather))


def _backward(
    pipeline: Pipeline, model: _Spare, *, a: bool, b: bool, synchronize: bool | None = True
) -> None:
    with pipeline.forward():
        loss = model.used(a=a, b=b)
    with pipeline.backward(synchronize=synchronize):
        loss.backward()


@distributed(world_sizes=(1, 2))
def test_parameters_that_no_optimizer_holds_are_named_with_their_bytes() -> None:
    model = build("mlp")
    model.spare = nn.Parameter(torch.ones(2), requires_grad=False)
    pipeline = new_pipeline(model, torch.optim.SGD(model.layers[0].parameters(), lr=0.1))
    if dist.get_world_size() == 1:
        assert pipeline.remark is None
    else:
        sent = sum(one.nbytes for layer in model.layers[1:] for one in layer.parameters())
        assert "'layers.2.weight' (4 such parameters)" in str(pipeline.remark)
        assert f"{sent:,} bytes a step" in str(pipeline.remark)
    train_steps(pipeline, model, range(2))
    pipeline.detach()


def _train(*, apart: bool, gather: str) -> list[Tensor]:
    """All layers under the training's optimizer, or the last ones under another one."""
    model = build("mlp")
    held = model.layers[:3] if apart else model
    pipeline = new_pipeline(model, optimizer_for("sgd", held), options=ExchangeOptions(gather))
    other = optimizer_for("sgd", model.layers[3:])

    def step(_: int) -> None:
        if apart:
            other.step()
            other.zero_grad()

    train_steps(pipeline, model, range(4), between=step)
    pipeline.detach()
    return weights(model)


@GATHERS
@distributed(world_sizes=(1, 2, 3))
def test_an_optimizer_of_its_own_steps_the_mean(gather: str) -> None:
    ours, theirs = _train(apart=False, gather=gather), _train(apart=True, gather=gather)
    for one, other in zip(ours, theirs, strict=True):
        if dist.get_world_size() < 3:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


@GATHERS
@distributed(world_sizes=(2, 3))
def test_a_gradient_of_some_ranks_is_averaged_and_one_of_none_stays_none(gather: str) -> None:
    model, optimizer, pipeline = _spare(gather)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        _backward(pipeline, model, a=rank == 1, b=False)
        assert model.b.grad is None
        assert model.a.grad is not None
        torch.testing.assert_close(model.a.grad, torch.full((3,), 2.0 / size))
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
    pipeline.detach()


@pytest.mark.parametrize("last", [True, None])
@distributed(world_sizes=(2,))
def test_sums_are_averaged_at_the_end_of_each_backward_that_is_not_blocked(
    last: bool | None,
) -> None:
    model, optimizer, pipeline = _spare()
    for _ in range(2):
        _backward(pipeline, model, a=True, b=True, synchronize=False)
        assert model.a.grad is not None
        assert torch.equal(model.a.grad, torch.full((3,), dist.get_rank() + 1.0))
        _backward(pipeline, model, a=True, b=False, synchronize=last)
        assert model.b.grad is not None
        assert torch.equal(model.a.grad, torch.full((3,), 2 * _mean()))
        assert torch.equal(model.b.grad, torch.full((3,), _mean()))
        _backward(pipeline, model, a=True, b=False, synchronize=last)
        assert torch.equal(model.a.grad, torch.full((3,), 3 * _mean()))
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
    pipeline.detach()


@GATHERS
@distributed(world_sizes=(2,))
def test_ranks_stop_asking_and_hear_of_a_late_gradient_in_the_next_round(gather: str) -> None:
    with mock.patch.object(engine, "PATIENCE", 2):
        model, optimizer, pipeline = _spare(gather)
    rank, ledger = dist.get_rank(), pipeline.collectives.ledger
    other = torch.optim.SGD([model.a], lr=0.1)
    for number in range(4):
        before = ledger["other"] + ledger["all_reduce"]
        _backward(pipeline, model, a=False, b=False)
        with_question = ledger["other"] + ledger["all_reduce"] - before
        # The first backward also ends the recorded round.
        assert (with_question > 0) == (number < 2)
        optimizer.step()
        optimizer.zero_grad()
    assert ledger["all_reduce"] == 0
    _backward(pipeline, model, a=rank == 1, b=False)
    if rank == 1:
        with pytest.raises(RuntimeError, match="steps 'a', whose first"):
            other.step()
    optimizer.step()
    for _ in range(2):
        assert model.a.grad is not None
        assert torch.equal(model.a.grad, torch.ones(3))
        other.step()
        other.zero_grad()
        optimizer.zero_grad()
        _backward(pipeline, model, a=rank == 1, b=False)
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_frozen_ones_cost_nothing_and_are_averaged_once_they_train() -> None:
    torch.manual_seed(0)
    model = _Spare()
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer)
    assert pipeline.remark is None
    launched = log_launches(pipeline.collectives)
    _backward(pipeline, model, a=True, b=True)
    optimizer.step()
    optimizer.zero_grad()
    # One of flags, at the end of the round.
    assert [name for name, _ in launched].count("launch_max") == 1
    model.b.requires_grad_(True)
    for _ in range(2):
        _backward(pipeline, model, a=True, b=True)
        optimizer.step()
        assert model.a.grad is None
        assert model.b.grad is not None
        assert torch.equal(model.b.grad, torch.full((3,), _mean()))
        model.zero_grad()
        optimizer.zero_grad()
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_all_ranks_launch_in_one_order_where_one_lacks_a_gradient() -> None:
    torch.manual_seed(0)
    model = MayLeaveOut(width=40)
    model.spare = nn.Parameter(torch.ones(2))
    held = [one for one in model.parameters() if one is not model.spare]
    with mock.patch.object(three, "new_collectives", new_native):
        pipeline = new_pipeline(model, torch.optim.SGD(held, lr=0.1), NoFusion())
    log = log_launches(pipeline.collectives)
    for step in range(3):
        uses_extra = step == 0 or dist.get_rank() == 1
        with pipeline.forward():
            loss = model(torch.randn(5, 7), uses_extra).square().mean() + model.spare.sum()
        with pipeline.backward():
            loss.backward()
        pipeline.optimizers[0].step()
        pipeline.optimizers[0].zero_grad()
    mine, theirs = pipeline.collectives.all_gather_object(log)
    assert mine == theirs
    assert [name for name, _ in log].count("launch_all_reduce") == 3
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_ranks_that_freeze_others_are_refused() -> None:
    model = _Spare()
    model.b.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError, match="rank 0 has 'b' .in no optimizer., rank 1 has"):
        new_pipeline(model, torch.optim.SGD(model.layer.parameters(), lr=0.1))


@distributed(world_sizes=(2,))
def test_a_sparse_gradient_of_no_optimizer_is_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Embedding(4, 1, sparse=True)})
    pipeline = new_pipeline(model, torch.optim.SGD(model["a"].parameters(), lr=0.1))
    with pipeline.forward():
        loss = model["a"](model["b"](torch.tensor([1]))).sum()
    with pytest.raises(RuntimeError, match="'b.weight' has a sparse"), pipeline.backward():
        loss.backward()
    pipeline.abandon()


@pytest.mark.parametrize("other", ["complex64", "bfloat16", "channels_last"])
@distributed(world_sizes=(2,))
def test_gradients_of_all_kinds_are_averaged(other: str) -> None:
    model: Any = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spare = torch.arange(16.0).reshape(2, 2, 2, 2)
    if other == "channels_last":
        spare = spare.to(memory_format=torch.channels_last)
    model.spare = nn.Parameter(
        spare if other == "channels_last" else spare.to(getattr(torch, other))
    )
    pipeline = new_pipeline(model, optimizer)
    for _ in range(2):
        with pipeline.forward():
            loss = model(torch.ones(1, 2)).sum()
            factor = (dist.get_rank() + 1) * torch.arange(16.0).reshape(2, 2, 2, 2)
            loss = loss + (model.spare * factor).real.float().sum()
        with pipeline.backward():
            loss.backward()
        expected = 1.5 * torch.arange(16.0).reshape(2, 2, 2, 2)
        assert torch.equal(model.spare.grad, expected.to(model.spare.dtype))
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
    pipeline.detach()


def _train_with_stranger(layer: int = 0) -> Pipeline:
    """The training's optimizer has the first layers, another one `layer`."""
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model.layers[:3]))
    stranger = torch.optim.SGD(model.layers[layer].parameters(), lr=0.1)
    train_steps(pipeline, model, [0], between=lambda _: stranger.step())
    return pipeline


@distributed(world_sizes=(2,))
def test_an_optimizer_from_elsewhere_may_not_step_what_the_training_steps() -> None:
    with pytest.raises(RuntimeError, match="A SGD that the training does not know"):
        _train_with_stranger()
    _train_with_stranger(layer=4).detach()


class _Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@GATHERS
@distributed(world_sizes=(2,))
def test_what_a_step_calls_is_not_from_elsewhere(gather: str) -> None:
    model = build("mlp")
    # With the first object of a class torch wraps its step, which calls all hooks then.
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = _Derived(model.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer, options=ExchangeOptions(gather))
    train_steps(pipeline, model, range(3))
    pipeline.detach()


@distributed(world_sizes=(1,))
def test_on_one_rank_it_may() -> None:
    _train_with_stranger().detach()
