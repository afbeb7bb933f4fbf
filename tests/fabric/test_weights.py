"""`weights="samples"` under Fabric: weights are those of one process on all ranks' samples."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.harness import distributed
from tests.fabric.running import dear, new_fabric
from tests.lightning.fitting import assert_ranks_agree
from tests.lightning.test_weights import (
    NUM_BATCHES,
    Case,
    build,
    expected_of,
    loss_of,
    none_on_last,
    optimizer_for,
    other_each_step,
    samples,
    spoilt,
)
from tests.training.models import distance


def _train(case: Case, *, clears: bool = True, **options: Any) -> list[Tensor]:
    fabric = new_fabric(dear(weights="samples", **options))
    raw = build()
    model, optimizer = fabric.setup(raw, optimizer_for(case.optimizer, raw))
    strategy: Any = fabric.strategy
    for number in range(NUM_BATCHES):
        batch = samples(number, fabric.global_rank, case.sizes)
        is_last = (number + 1) % case.accumulates == 0
        strategy.weigh(len(batch))
        with nullcontext() if is_last else fabric.no_backward_sync(model):
            loss = loss_of(model, batch) if len(batch) else spoilt(model)
            fabric.backward(loss / case.accumulates)
        if is_last:
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    strategy.complete_parameters()
    return [one.detach().clone() for one in raw.parameters()]


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@pytest.mark.parametrize("accumulates", [1, 3])
@distributed(world_sizes=[1, 3])
def test_end_weights_are_those_of_one_process(
    gather: str, accumulates: int, world_size: int
) -> None:
    case = Case(none_on_last, "sgd", accumulates=accumulates)
    found = _train(case, gather=gather)
    assert distance(found, expected_of(case, world_size)) < 1e-12
    assert_ranks_agree([found])


@distributed(world_sizes=[3])
def test_a_step_ends_its_weights() -> None:
    """Also without `zero_grad`, which rank 0 warns of: here no gradient is left over."""
    case = Case(none_on_last, "sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _train(case, clears=False)
    assert distance(found, expected_of(case, 3)) < 1e-12


@distributed(world_sizes=[1, 2])
def test_a_weight_is_used_once() -> None:
    fabric = new_fabric(dear(weights="samples"))
    raw = build()
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    strategy: Any = fabric.strategy
    batch = samples(0, fabric.global_rank, other_each_step)
    strategy.weigh(len(batch))
    fabric.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="no weight. Call strategy.weigh"):
        fabric.backward(loss_of(model, batch))


def _train_two(weights: str | None) -> list[Tensor]:
    """Two models by turns, each with a step for each batch."""
    fabric = new_fabric(dear(weights=weights))
    raws = build(), build()
    pairs = [fabric.setup(raw, optimizer_for("sgd", raw)) for raw in raws]
    strategy: Any = fabric.strategy
    for number in range(6):
        batch = samples(number, fabric.global_rank, lambda *_: 4)
        if weights is not None:
            strategy.weigh(len(batch))
        for model, optimizer in pairs:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch), model=model)
            optimizer.step()
    strategy.complete_parameters()
    return [one.detach().clone() for raw in raws for one in raw.parameters()]


@distributed(world_sizes=[2])
def test_two_models_have_a_weighed_batch_each() -> None:
    assert all(map(torch.equal, _train_two("samples"), _train_two(None)))


@distributed(world_sizes=[1, 2])
def test_two_models_may_not_accumulate() -> None:
    fabric = new_fabric(dear(weights="samples"))
    raws = build(), build()
    (model, _), _ = [fabric.setup(raw, optimizer_for("sgd", raw)) for raw in raws]
    strategy: Any = fabric.strategy

    def accumulate(number: int) -> None:
        batch = samples(number, fabric.global_rank, other_each_step)
        strategy.weigh(len(batch))
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model, batch), model=model)

    accumulate(0)
    with pytest.raises(RuntimeError, match="With several optimizers"):
        accumulate(1)


class Headed(nn.Module):
    """Has a layer that no optimizer of the training holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.head = build(), nn.Linear(1, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.net(x))
        return head


@distributed(world_sizes=[3])
def test_gradients_that_no_optimizer_holds_are_weighed_too() -> None:
    fabric = new_fabric(dear(weights="samples"))
    raw, alone = Headed(), Headed()
    model, _ = fabric.setup(raw, optimizer_for("sgd", raw.net))
    strategy: Any = fabric.strategy
    batch = samples(0, fabric.global_rank, none_on_last)
    strategy.weigh(len(batch))
    fabric.backward(loss_of(model, batch) if len(batch) else spoilt(model))
    batches = [one for rank in range(3) if len(one := samples(0, rank, none_on_last))]
    for one in batches:
        (loss_of(alone, one) * len(one) / sum(map(len, batches))).backward()
    found = [one.grad for one in raw.head.parameters()]
    expected = [one.grad for one in alone.head.parameters()]
    assert distance(found, expected) < 1e-12  # type: ignore[arg-type]
