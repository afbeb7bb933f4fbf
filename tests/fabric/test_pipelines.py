"""What reaches the pipeline, and when."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dear.collectives.gloo import PairwiseCollectives
from tests.distributed.harness import distributed
from tests.fabric.running import dear, new_fabric
from tests.lightning.fitting import assert_ranks_agree, poison_until_waited
from tests.lightning.nets import copies
from tests.training.models import batch, build, loss_of, optimizer_for


@distributed([2])
def test_training_starts_from_rank_0_and_buffers_follow_it() -> None:
    fabric = new_fabric(dear())
    raw = build("conv", seed=fabric.global_rank)
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    assert_ranks_agree([copies(raw)])
    for step in range(3):
        fabric.backward(loss_of(model, *batch("conv", step, fabric.global_rank)))
        optimizer.step()
        optimizer.zero_grad()
        assert_ranks_agree([[buffer.clone() for buffer in raw.buffers()]])


@distributed([2])
def test_gradients_leave_during_backward() -> None:
    fabric = new_fabric(dear())
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("sgd", raw))
    for step in range(3):
        for is_last in (False, True):
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(loss_of(model, *batch("mlp", step, fabric.global_rank)))
            assert all((p.grad is None) == is_last for p in raw.parameters())
        assert model._forward_module.has_run
        optimizer.step()
        assert not model._forward_module.has_run


@distributed([2])
def test_messages_of_two_models_are_told_apart() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy
    kept = []
    for _ in range(2):
        raw = build("mlp")
        kept.append(fabric.setup(raw, optimizer_for("sgd", raw)))
    numbers = {part.plans.number for one in kept for part in strategy.pipeline_of(one[1]).parts}
    assert len(numbers) == 2


@distributed([2])
def test_numbers_that_a_living_model_has_on_some_rank_are_not_given_again() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy

    def numbers(num_optimizers: int) -> tuple[Any, list[int]]:
        raw = build("mlp")
        halves = [list(raw.parameters())[half::num_optimizers] for half in range(num_optimizers)]
        kept = fabric.setup(raw, *[torch.optim.SGD(half, lr=0.1) for half in halves])
        return kept, [part.plans.number for part in strategy.pipeline_of(kept[1]).parts]

    first, taken = numbers(1)
    if fabric.global_rank == 1:
        first = None
        gc.collect()
    # As if as many had been set up.
    strategy._num_optimizers = 127
    kept, next_ones = numbers(2)
    assert (taken, next_ones) == ([0], [1, 2])
    strategy._num_optimizers = 126
    assert numbers(2)[1] == [126, 127]
    with pytest.raises(ValueError, match="At most 128 optimizers"):
        strategy._next_number(126, {0, 1, 2})
    del first, kept


@distributed([2])
def test_whether_buckets_may_be_all_reduced_depends_on_others_not_on_the_number() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy
    raw, other = build("mlp"), build("mlp")
    for _ in range(2):
        kept = fabric.setup(raw, optimizer_for("sgd", raw))
        assert strategy.pipeline_of(kept[1]).training.all_reduce_refusal is None
    # The others' number counts as little.
    strategy._num_optimizers = 128
    both = fabric.setup(other, optimizer_for("sgd", other))
    refusal = strategy.pipeline_of(both[1]).training.all_reduce_refusal
    assert refusal is not None
    assert "another order" in refusal


@distributed([2])
def test_two_models_hold_their_gradients_back_where_collectives_must_keep_one_order() -> None:
    fabric = new_fabric(dear())
    strategy: Any = fabric.strategy
    kept = []
    with mock.patch.object(PairwiseCollectives, "matches_by_tag", False):  # as on NCCL
        for expected in ([False], [True] * 2):
            raw = build("mlp")
            kept.append(fabric.setup(raw, optimizer_for("sgd", raw)))
            # Set up again it is still the same training.
            kept[-1] = fabric.setup(raw, optimizer_for("sgd", raw))
            parts = [strategy.pipeline_of(one[1]).parts[0] for one in kept]
            assert [part.is_held_back for part in parts] == expected


class _Holding(nn.Module):
    """In evaluation reads its weight through a list, past the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 300)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if torch.is_grad_enabled() else F.linear(x, self.held[0])


@distributed([2])
def test_evaluation_waits_for_what_no_gate_sees() -> None:
    fabric = new_fabric(dear())
    raw = _Holding()
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    with poison_until_waited():
        for step in range(2):
            inputs, _ = batch("mlp", step, fabric.global_rank)
            fabric.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert model(inputs).isfinite().all()
