"""Steps under DDP, timed by hooks: computing and waiting are told apart."""

from __future__ import annotations

import pickle
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

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
    watch = StepWatch(wrapped, model, optimizer)
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
    watch = StepWatch(model, model, optimizer)
    assert watch.end() is None
    for part in model.modules():
        assert not part._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with mock.patch.object(watch, "_mark") as mark:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    mark.assert_not_called()


def _fitted(model: nn.Module, wrapper: nn.Module, num_steps: int = 4) -> StepTimes | None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(wrapper, model, optimizer)
    for _ in range(num_steps):
        for _ in range(2):
            loss = wrapper(torch.ones(2, 8, requires_grad=True)).sum()
            watch.backward_begins()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch.end()


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self._is_reentrant = nn.ModuleList([_Layer(), _Layer()]), reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = checkpoint(layer, inputs, use_reentrant=self._is_reentrant)
        return inputs


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_that_run_again_in_backward_are_part_of_it(reentrant: bool) -> None:
    model = _Checkpointed(reentrant=reentrant)
    found = _fitted(model, model)
    assert found is not None
    assert found.num_batches == 2
    # Forward runs again in backward, in the other kind only up to the last tensor that it needs.
    assert found.times.backward_s > 2 * BACKWARD_S + (2 * FORWARD_S if reentrant else 0)


def test_compiled_modules_are_timed_without_a_new_graph() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = torch.compile(inner, backend=backend, fullgraph=True)
    outer = nn.Sequential()
    outer.add_module("compiled", compiled)
    found = _fitted(inner, outer)
    assert found is not None
    assert found.num_batches == 2


def test_a_model_can_be_pickled_while_it_is_watched() -> None:
    model = nn.Sequential(_Layer())
    watch = StepWatch(model, model, torch.optim.SGD(model.parameters(), lr=0.1))
    copied = pickle.loads(pickle.dumps(model))
    copied(torch.ones(2, 8))
    assert watch.end() is None


def test_validation_is_no_forward_and_short_steps_do_not_count() -> None:
    model = nn.Sequential(_Layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepWatch(model, model, optimizer)
    for num_batches in (1, 2, 2, 1, 2, 2):
        model.eval()
        for _ in range(3):
            model(torch.ones(2, 8))
        model.train()
        for _ in range(num_batches):
            loss = model(torch.ones(2, 8)).sum()
            watch.backward_begins()
            loss.backward()
        optimizer.step()
    found = watch.end()
    assert found is not None
    assert found.num_batches == 2
    assert found.times.forward_s < 2 * FORWARD_S
