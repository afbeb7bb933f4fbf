"""Steps under DDP, timed by hooks: computing and waiting are told apart."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.doctor.step_watch import StepTimes, StepWatch
from tests.distributed.harness import distributed

FORWARD_S, BACKWARD_S, WAIT_S = 0.02, 0.03, 0.08


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradients


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(self.linear(inputs))


def _watched(num_batches: int, num_steps: int = 4) -> tuple[StepTimes | None, StepWatch]:
    """Trains two layers under DDP. The last backward of a step begins late on rank 1."""
    model = nn.Sequential(_Layer(), _Layer())
    wrapped = DistributedDataParallel(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(model, optimizer)
    for _ in range(num_steps):
        for number in range(num_batches):
            is_last = number == num_batches - 1
            wrapped.require_backward_grad_sync = is_last
            loss = wrapped(torch.ones(2, 8)).sum()
            watch.backward_begins()
            if is_last and dist.get_rank() == 1:
                # The other rank waits for this one's all-reduce.
                time.sleep(WAIT_S)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch.end(), watch


@pytest.mark.alone
@distributed((2,))
def test_computing_and_waiting_are_told_apart(world_size: int) -> None:
    for num_batches in (1, 2):
        found, watch = _watched(num_batches)
        assert found is not None
        times, late_s = found.times, WAIT_S if dist.get_rank() else 0.0
        assert found.num_batches == num_batches
        assert times.forward_s == pytest.approx(2 * FORWARD_S, abs=0.01)
        assert times.backward_s == pytest.approx(2 * BACKWARD_S + late_s / num_batches, abs=0.01)
        assert found.computing_s >= num_batches * (times.forward_s + times.backward_s)
        assert found.exposed_s == pytest.approx(WAIT_S - late_s, abs=0.02)
        assert found.step_s == pytest.approx(found.computing_s + found.exposed_s, abs=0.03)
        names = {index: one.name for index, one in enumerate(watch.tensors(times))}
        assert names[0] == "0.linear.weight"
        order = sorted(range(4), key=lambda index: times.ready_s[index])
        assert {names[index][0] for index in order[:2]} == {"1"}
        assert times.first_use_s[0] < FORWARD_S <= times.first_use_s[2]


def test_hooks_are_gone_and_no_step_is_no_time() -> None:
    model = nn.Sequential(_Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(model, optimizer)
    assert watch.end() is None
    for part in model.modules():
        assert not part._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with mock.patch.object(watch, "_mark") as mark:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    mark.assert_not_called()
