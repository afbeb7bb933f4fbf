"""16-bit parameters are stepped as fp32 masters, which no write, save or re-plan loses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.optimizers.masters import MASTER_KEY
from tests.distributed.harness import distributed
from tests.engine.test_gradients import assert_equal
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_pipeline, train_steps

LATE = Delays(before_all_gather_s=0.02)
DTYPES = [torch.bfloat16, torch.float16]


def _loss(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return loss_of(model, *batch("mlp", step, rank, dtype))


class _Reference:
    """One process, fp32 copies beside the 16-bit model, ranks' gradients added in fp32."""

    def __init__(self, optimizer: str, dtype: torch.dtype) -> None:
        self.model, self.dtype = build("mlp", dtype=dtype), dtype
        self.masters = copy.deepcopy(self.model).float()
        self.optimizer = optimizer_for(optimizer, self.masters)

    def step(self, number: int) -> list[Tensor]:
        scale = 1.0 / dist.get_world_size()
        self.optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            loss = _loss(self.model, number, rank, self.dtype)
            own = torch.autograd.grad(loss, list(self.model.parameters()))
            for master, gradient in zip(self.masters.parameters(), own, strict=True):
                scaled = (gradient * scale).float()
                master.grad = scaled if master.grad is None else master.grad + scaled
        self.optimizer.step()
        return self.publish()

    @torch.no_grad()
    def publish(self) -> list[Tensor]:
        pairs = zip(self.model.parameters(), self.masters.parameters(), strict=True)
        for parameter, master in pairs:
            parameter.copy_(master)
        return weights(self.model)


class _Ours:
    def __init__(self, optimizer: str, dtype: torch.dtype) -> None:
        self.model, self.dtype = build("mlp", dtype=dtype), dtype
        self.optimizer = optimizer_for(optimizer, self.model)
        self.start()

    def start(self) -> None:
        self.pipeline = new_pipeline(self.model, self.optimizer, delays=LATE)

    def step(self, number: int) -> list[Tensor]:
        train_steps(self.pipeline, self.model, [number])
        return weights(self.model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world_sizes=(1, 2, 3))
def test_parameters_are_the_masters_rounded(optimizer: str, dtype: torch.dtype) -> None:
    ours, theirs = _Ours(optimizer, dtype), _Reference(optimizer, dtype)
    for number in range(6):
        assert_equal(ours.step(number), theirs.step(number))
    ours.pipeline.detach()


@distributed(world_sizes=(1, 2, 3))
def test_writes_from_outside_reach_the_masters() -> None:
    ours, theirs = _Ours("sgd", torch.bfloat16), _Reference("sgd", torch.bfloat16)
    for number in range(4):
        assert_equal(ours.step(number), theirs.step(number))
        with torch.no_grad():
            index = number % 2
            list(ours.model.parameters())[index].data[:1] *= 0.5
            list(theirs.model.parameters())[index].data[:1] *= 0.5
            changed = list(theirs.model.parameters())[index].data[:1]
            list(theirs.masters.parameters())[index].data[:1] = changed
    ours.pipeline.detach()


def _reload(ours: _Ours) -> Optimizer:
    """Model and optimizer as a job would have them that resumes from ours' state."""
    saved = copy.deepcopy(ours.pipeline.of(ours.optimizer).optimizer_state_dict())
    values = copy.deepcopy(ours.model.state_dict())
    ours.pipeline.detach()
    ours.model = build("mlp", dtype=ours.dtype)
    ours.model.load_state_dict(values)
    ours.optimizer = optimizer_for(ours.name, ours.model)
    ours.start()
    ours.optimizer.load_state_dict(saved)
    return ours.optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "plain sgd"])
@distributed(world_sizes=(1, 2, 3))
def test_masters_survive_saving_and_loading(optimizer: str) -> None:
    ours, theirs = _Ours("sgd", torch.bfloat16), _Ours("sgd", torch.bfloat16)
    for one in (ours, theirs):
        one.pipeline.detach()
        one.name = "sgd" if optimizer == "plain sgd" else optimizer
        one.optimizer = optimizer_for(one.name, one.model)
        if optimizer == "plain sgd":
            for group in one.optimizer.param_groups:
                group["momentum"] = 0.0
        one.start()
    for number in range(6):
        if number == 3:
            _reload(ours)
        assert_equal(ours.step(number), theirs.step(number))
    for one in (ours, theirs):
        one.pipeline.detach()


@distributed(world_sizes=(1, 2, 3))
def test_what_is_written_after_loading_reaches_the_masters() -> None:
    ours, theirs = _Ours("adamw", torch.bfloat16), _Reference("adamw", torch.bfloat16)
    ours.name = "adamw"
    for number in range(6):
        if number == 3:
            _reload(ours)
            with torch.no_grad():
                for model in (ours.model, theirs.model):
                    next(model.parameters()).data[:1] *= 0.5
                next(theirs.masters.parameters()).data[:1] = next(theirs.model.parameters())[:1]
        assert_equal(ours.step(number), theirs.step(number))
    ours.pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_masters_survive_a_new_plan() -> None:
    ours, theirs = _Ours("adamw", torch.bfloat16), _Ours("adamw", torch.bfloat16)
    for number in range(6):
        if number == 3:
            ours.pipeline.parts[0].plans.dissolve()
        assert_equal(ours.step(number), theirs.step(number))
    for one in (ours, theirs):
        one.pipeline.detach()


@distributed(world_sizes=(1, 2))
def test_a_plain_optimizer_loads_the_state() -> None:
    ours = _Ours("adamw", torch.bfloat16)
    for number in range(3):
        ours.step(number)
    saved = ours.pipeline.parts[0].optimizer_state_dict()
    masters = [entry[MASTER_KEY] for entry in saved["state"].values()]
    assert all(master.dtype == torch.float32 for master in masters)
    in_groups = [p for group in ours.optimizer.param_groups for p in group["params"]]
    assert_equal([master.bfloat16() for master in masters], in_groups)
    model = build("mlp", dtype=torch.bfloat16)
    plain = optimizer_for("adamw", model)
    plain.load_state_dict(saved)
    _loss(model, 0, 0, torch.bfloat16).backward()
    plain.step()
    ours.pipeline.detach()
