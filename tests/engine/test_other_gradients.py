"""Gradients that no optimizer of the training holds are averaged, too, as DDP averages them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step_state import StepState
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import build, optimizer_for
from tests.training.three_ways import new_pipeline, train_steps

NUM_STEPS = 4


class _Net(nn.Module):
    """A layer under the training's optimizer, one under another, and something of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 5)
        self.own = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.spare = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, *, uses_own: bool) -> Tensor:
        x = self.first(x)
        loss = x.square().mean()
        return loss + (self.own(x).square().mean() * self.scale if uses_own else 0)

    def others(self) -> list[nn.Parameter]:
        return [*self.own.parameters(), self.scale, self.spare, self.frozen]


def _uses_own(step: int) -> bool:
    """Nobody in step 1, one rank in step 2."""
    return step not in (1, 2) or (step == 2 and dist.get_rank() == 1)


def _step(model: _Net, step: int, synchronizes: bool) -> Tensor:
    seed = 100 * step + 10 * synchronizes + dist.get_rank()
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    return model(x, uses_own=_uses_own(step))


def _train(strategy: str, *, zeroes: bool, as_on_nccl: bool = False) -> list[Tensor | None]:
    """Two backwards a step; returns the others' gradients and weights after every step."""
    model = _Net()
    trained = torch.optim.SGD(model.first.parameters(), lr=0.1)
    own = torch.optim.SGD([one for one in model.others() if one.requires_grad], lr=0.1)
    seen: list[Tensor | None] = []
    ddp = pipeline = None
    if strategy == "ddp":
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        pipeline = new_pipeline(model, trained)
        pipeline.collectives.reads_flags_freely = not as_on_nccl
    for step in range(NUM_STEPS):
        trained.zero_grad()
        if zeroes:
            own.zero_grad()
        for synchronizes in (False, True):
            if pipeline is not None:
                with pipeline.forward():
                    loss = _step(model, step, synchronizes)
                with pipeline.backward(synchronize=synchronizes, averages_others=synchronizes):
                    loss.backward()
                if as_on_nccl and synchronizes:
                    assert pipeline.parts[0].state is StepState.REDUCED
            else:
                with nullcontext() if synchronizes else ddp.no_sync():
                    _step(ddp, step, synchronizes).backward()
        seen += [None if one.grad is None else one.grad.clone() for one in model.others()]
        trained.step()
        own.step()
        seen += [one.detach().clone() for one in model.others()]
    if pipeline is not None:
        pipeline.detach()
    return seen


@pytest.mark.parametrize("zeroes", [True, False])
@distributed(world_sizes=(1, 2, 3))
def test_they_end_in_grad_as_under_ddp(zeroes: bool) -> None:
    """Also those that were accumulated without being sent, or that some ranks do not use."""
    _compare(_train("dear", zeroes=zeroes), _train("ddp", zeroes=zeroes))


def _compare(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    is_exact = dist.get_world_size() < 3
    for left, right in zip(ours, theirs, strict=True):
        assert (left is None) == (right is None)
        if left is not None and is_exact:
            assert torch.equal(left, right)
        elif left is not None:
            torch.testing.assert_close(left, right)


@distributed(world_sizes=(2,))
def test_buckets_go_first_where_collectives_must_keep_one_order() -> None:
    ours = _train("dear", zeroes=True, as_on_nccl=True)
    _compare(ours, _train("ddp", zeroes=True))


@distributed(world_sizes=(2,))
def test_a_sparse_gradient_of_one_rank_is_refused_on_all() -> None:
    model = build("mlp")
    model.table = nn.Embedding(5, 7, sparse=True)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer)
    with pipeline.forward():
        x = torch.ones(2, 7)
        if dist.get_rank() == 1:
            x = model.table(torch.tensor([1, 2]))
        loss = model(x).sum()
    with pytest.raises(RuntimeError, match=r"'table.weight' has a sparse"), pipeline.backward():
        loss.backward()


@distributed(world_sizes=(1, 2))
def test_what_is_thawed_under_no_optimizer_is_averaged_from_then_on() -> None:
    model = build("mlp").requires_grad_(False)
    model.layers[0].requires_grad_(True)
    pipeline = new_pipeline(model, torch.optim.SGD(model.layers[0].parameters(), lr=0.1))
    train_steps(pipeline, model, [0])
    weight = model.layers[2].weight.requires_grad_(True)
    train_steps(pipeline, model, [1])
    assert weight.grad is not None
    gradients = pipeline.collectives.all_gather_object(weight.grad)
    assert all(torch.equal(one, weight.grad) for one in gradients)
    pipeline.detach()


def _train_with_stranger() -> Pipeline:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    stranger = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    train_steps(pipeline, model, [0], between=lambda _: stranger.step())
    return pipeline


@distributed(world_sizes=(2,))
def test_an_optimizer_from_elsewhere_may_not_step_what_is_trained() -> None:
    with pytest.raises(RuntimeError, match="A SGD that the training does not know"):
        _train_with_stranger()


class _Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
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
