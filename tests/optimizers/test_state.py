"""Optimizer state: 1/P of it per rank, whole in a checkpoint, kept when the plan changes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed, run_ranks
from tests.training.models import (
    OPTIMIZERS,
    batch,
    build,
    loss_of,
    optimizer_for,
    two_groups,
    weights,
)
from tests.training.three_ways import new_pipeline, train_steps


def _state_bytes(sharded: object) -> int:
    return sum(
        value.nbytes
        for piece in sharded.pieces
        for key, value in sharded.state_of(piece).items()
        if isinstance(value, Tensor) and key != "step"
    )


@distributed(world_sizes=(1, 2, 4))
def test_a_rank_holds_its_share_of_the_state(world_size: int) -> None:
    model = build("wide_mlp")
    pipeline = new_pipeline(model, torch.optim.AdamW(model.parameters()))
    train_steps(pipeline, model, range(2))
    whole_bytes = sum(2 * parameter.nbytes for parameter in model.parameters())
    own_bytes = torch.tensor(_state_bytes(pipeline.parts[0].stepper), dtype=torch.float64)
    assert abs(float(own_bytes) * world_size / whole_bytes - 1) < 0.02
    dist.all_reduce(own_bytes)
    assert int(own_bytes) == whole_bytes


@distributed(world_sizes=(1, 2))
def test_who_asks_the_optimizer_for_its_state_is_warned_once() -> None:
    model = build("mlp")
    optimizer = torch.optim.AdamW(model.parameters())
    pipeline = new_pipeline(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not optimizer.state_dict()["state"]
        train_steps(pipeline, model, range(2))
        assert pipeline.parts[0].optimizer_state_dict()["state"]
    pipeline.detach()
    with pytest.warns(
        UserWarning, match=r"without its state.*strategy\.optimizer_state\(optimizer"
    ):
        assert not optimizer.state_dict()["state"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


@distributed(world_sizes=(1, 2))
def test_who_asks_where_nothing_is_missing_is_not_warned() -> None:
    for kind, gather in ((torch.optim.SGD, "parameters"), (torch.optim.AdamW, "gradients")):
        model = build("mlp")
        optimizer = kind(model.parameters(), lr=0.1)
        pipeline = new_pipeline(model, optimizer, options=ExchangeOptions(gather))
        train_steps(pipeline, model, range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.state_dict()
        pipeline.detach()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@distributed(world_sizes=(2,))
def test_consolidated_state_is_what_the_plain_optimizer_has(name: str) -> None:
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for(name, model))
    train_steps(pipeline, model, range(3))
    ours = pipeline.parts[0].optimizer_state_dict()

    plain = build("mlp")
    plain_optimizer = optimizer_for(name, plain)
    for step in range(3):
        plain_optimizer.zero_grad()
        for rank in range(2):
            (loss_of(plain, *batch("mlp", step, rank)) * 0.5).backward()
        plain_optimizer.step()
    theirs = plain_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        assert ours["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            own = ours["state"][index][key]
            if isinstance(value, Tensor):
                assert own.shape == value.shape
                torch.testing.assert_close(own, value)
            else:
                assert own == value


def _train_and_save(num_steps: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    model = build("gpt")
    pipeline = new_pipeline(model, optimizer_for("adamw", model))
    train_steps(pipeline, model, range(num_steps), "gpt")
    state = copy.deepcopy(pipeline.parts[0].optimizer_state_dict())
    return {key: value.clone() for key, value in model.state_dict().items()}, state


def _resume(
    saved: tuple[dict[str, Tensor], dict[str, object]], steps: range, in_midst: bool
) -> list[Tensor]:
    model = build("gpt", seed=1)
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    if in_midst:
        train_steps(pipeline, model, range(90, 92), "gpt")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train_steps(pipeline, model, steps, "gpt")
    return weights(model)


@pytest.mark.parametrize("in_midst", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resuming_gives_the_bits_of_the_uninterrupted_run(world_size: int, in_midst: bool) -> None:
    saved = run_ranks(_train_and_save, world_size, 2)[0]
    uninterrupted = run_ranks(_train_and_save, world_size, 4)[0][0]
    resumed = run_ranks(_resume, world_size, saved, range(2, 4), in_midst)
    named = [value for name, value in uninterrupted.items() if name != "head.weight"]
    for rank in resumed:
        assert all(torch.equal(a, b) for a, b in zip(rank, named, strict=True))


def _same_state_everywhere() -> None:
    _, state = _train_and_save(2)
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, state)
    for other in everyone:
        for index, entries in state["state"].items():
            for key, value in entries.items():
                assert torch.equal(other["state"][index][key], value)


def test_every_rank_consolidates_the_same_state() -> None:
    run_ranks(_same_state_everywhere, 3)


@distributed(world_sizes=(1, 2, 3))
def test_unfreezing_in_mid_training_rebuilds_the_plan_and_keeps_state(world_size: int) -> None:
    def unfreeze(model: nn.Module, optimizer: Optimizer) -> None:
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters()), "lr": 0.002})

    def start() -> tuple[nn.Module, Optimizer]:
        model = build("mlp")
        model.layers[0].requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    model, optimizer = start()
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(3))
    unfreeze(model, optimizer)
    train_steps(pipeline, model, range(3, 6))

    plain, plain_optimizer = start()
    for step in range(6):
        if step == 3:
            unfreeze(plain, plain_optimizer)
        plain_optimizer.zero_grad()
        for rank in range(world_size):
            (loss_of(plain, *batch("mlp", step, rank)) / world_size).backward()
        plain_optimizer.step()
    for a, b in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a, b)


class _Branches(nn.Module):
    """Uses one of two branches, by step and rank, and sometimes none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 20)
        self.left = nn.Linear(20, 3)
        self.right = nn.Linear(20, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(torch.tanh(self.trunk(x)))


@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
@distributed(world_sizes=(1, 2))
def test_parameters_unused_by_all_or_by_some_are_stepped_as_ddp_steps_them(
    optimizer_name: str, world_size: int
) -> None:
    def train(is_ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = _Branches()
        optimizer = OPTIMIZERS[optimizer_name](two_groups(model))
        rank = dist.get_rank()
        pipeline = new_pipeline(model, optimizer) if is_ours else None
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for step in range(8):
            branch = "left" if step < 3 or (step % 2 and rank == 0) else "right"
            inputs, targets = batch("mlp", step, rank)
            optimizer.zero_grad()
            if pipeline is None:
                nn.functional.cross_entropy(wrapped(inputs, branch), targets).backward()
            else:
                with pipeline.forward():
                    loss = nn.functional.cross_entropy(model(inputs, branch), targets)
                loss.backward()
            optimizer.step()
        return weights(model)

    theirs = train(is_ours=False)
    ours = train(is_ours=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@distributed(world_sizes=(1, 2))
def test_accumulated_gradients_are_those_of_ddp(world_size: int) -> None:
    model, plain = build("mlp"), build("mlp")
    optimizer, plain_optimizer = optimizer_for("sgd", model), optimizer_for("sgd", plain)
    pipeline = new_pipeline(model, optimizer)
    wrapped = nn.parallel.DistributedDataParallel(plain)
    for step in range(4):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for part in range(3):
            data = batch("mlp", 10 * step + part, dist.get_rank())
            with pipeline.forward():
                loss = loss_of(model, *data)
            with pipeline.backward(synchronize=part == 2):
                loss.backward()
            if part == 2:
                loss_of(wrapped, *data).backward()
            else:
                with wrapped.no_sync():
                    loss_of(wrapped, *data).backward()
        sent_before = pipeline.collectives.ledger["reduce_scatter"]
        optimizer.step()
        plain_optimizer.step()
        assert pipeline.collectives.ledger["reduce_scatter"] == sent_before or step == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(plain), strict=True))


@distributed(world_sizes=(1, 2))
def test_module_buffers_follow_rank_0() -> None:
    model = build("conv")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    train_steps(pipeline, model, range(3), "conv")
    for buffer in model.buffers():
        first = buffer.clone()
        dist.broadcast(first, 0)
        assert torch.equal(buffer, first)


@distributed(world_sizes=(2,))
def test_gradients_that_come_in_parts_are_sent_once() -> None:
    """Reentrant checkpointing accumulates a parameter's gradient more than once in a backward."""
    model = build("reentrant")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))
    for step in range(3):
        before = pipeline.collectives.ledger["reduce_scatter"]
        train_steps(pipeline, model, [step], "reentrant")
        plan = pipeline.parts[0].plan
        assert plan is not None
        sent = pipeline.collectives.ledger["reduce_scatter"] - before
        assert sent == plan.padded_numel * 4 // 2
    pipeline.detach()
