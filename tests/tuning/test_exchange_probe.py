"""What exchanges cost by size: by hand, and between real ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.planning import LinkCost
from lightning_dear.studies.probes.ddp import gradient_copies_s, module_buffers_s
from lightning_dear.studies.probes.sharding import (
    alike,
    first_of,
    probe_gather,
    probe_reduce_scatter,
    sharded_tensor_s,
)
from lightning_dear.studies.probes.sharding_host import sharding_s
from lightning_dear.studies.probes.sizes import line, measure_sizes
from tests.distributed.harness import distributed

CPU = torch.device("cpu")


def test_a_line_through_two_exchanges() -> None:
    assert line(10.0, 4.0, 30.0, 8.0) == LinkCost(2.0, 0.2)


def test_noise_never_makes_a_cost_negative() -> None:
    assert line(10.0, 5.0, 30.0, 4.0) == LinkCost(5.0, 0.0)
    assert line(10.0, 1.0, 30.0, 30.0).alpha_s == 0


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.slow)))
def test_sizes_are_measured_alike_on_all_ranks(world_size: int) -> None:
    collectives = new_collectives(CPU)
    sent_before = collectives.ledger.total_bytes
    halves, all_reduce = measure_sizes(collectives, CPU, 1 << 20)
    for spread in (halves, all_reduce):
        for cost in (spread.least, spread.middle, spread.most):
            assert 0 <= cost.alpha_s < 1
            assert 0 <= cost.beta_s < 1e-4
            assert math.isfinite(cost.beta_s)
    assert all_reduce.least.alpha_s <= all_reduce.middle.alpha_s <= all_reduce.most.alpha_s
    assert all_reduce.least.beta_s <= all_reduce.middle.beta_s <= all_reduce.most.beta_s
    waited_s = [*probe_gather(collectives, CPU, 1 << 16)]
    waited_s += probe_reduce_scatter(collectives, CPU, 1 << 16)
    assert all(0 < one < 1 for one in waited_s)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    tensor_s = sharded_tensor_s(collectives, CPU, optimizer)
    assert 0 <= tensor_s[0] <= tensor_s[-1] < 1e-2
    assert tensor_s[-1] > 0
    # A unit takes its time, and bytes take theirs.
    few_s, units_s, large_s = (
        sharding_s(collectives, CPU, units, optimizer)
        for units in ([[64] * 4], [[64] * 4] * 24, [[1 << 22] * 4])
    )
    assert few_s is not None
    assert units_s is not None
    assert large_s is not None
    assert few_s < min(units_s, large_s)
    assert sharding_s(collectives, CPU, [], optimizer) == 0
    # Long enough for their sending not to be lost in noise.
    norm = torch.nn.BatchNorm1d(1 << 20)
    buffers_s = module_buffers_s(collectives, CPU, norm)
    assert 0 < buffers_s < 1
    assert norm.num_batches_tracked == 0
    assert module_buffers_s(collectives, CPU, torch.nn.Linear(1, 1)) == 0
    large = torch.nn.BatchNorm1d(1 << 22)
    copies_s = gradient_copies_s(collectives, CPU, large)
    assert 0 < copies_s < 1
    assert large.weight.grad is None
    assert gradient_copies_s(collectives, CPU, norm.requires_grad_(False)) == 0
    everyone = collectives.all_gather_object(
        (halves, all_reduce, waited_s, tensor_s, few_s, units_s, large_s, buffers_s, copies_s)
    )
    assert everyone == [everyone[0]] * world_size
    # Training's bytes stay training's.
    assert collectives.ledger.total_bytes == sent_before


def test_of_a_large_model_the_first_units_are_sharded() -> None:
    assert first_of([[3, 4], [5], [6, 7]], 10) == ([[3, 4], [3]], 10 / 25)
    assert first_of([[3, 4], [5]], 100) == ([[3, 4], [5]], 1)
    assert first_of([], 100) == ([], 0)


class _Picky(torch.optim.SGD):
    def __init__(self, params: Any, needed: object) -> None:
        super().__init__(params)


def test_an_optimizer_is_built_again_from_its_options(caplog: pytest.LogCaptureFixture) -> None:
    unit = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(unit.parameters(), lr=0.5)
    again = alike(adam, unit)
    assert type(again) is torch.optim.AdamW
    assert again.defaults["lr"] == 0.5
    assert not caplog.records
    assert type(alike(_Picky(unit.parameters(), 1), unit)) is torch.optim.SGD
    assert "measured with SGD, as another _Picky cannot be made" in caplog.text
