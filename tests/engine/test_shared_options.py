"""Ranks that step with other learning rates, or other options, say so in that step."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.world import World
from lightning_dear.engine.notes import SharedOptions
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, optimizer_for
from tests.training.three_ways import new_pipeline, train_steps

NO_WEIGHTS: Any = SimpleNamespace(num_batches=0)
"""Of batches: a step has none that are weighed."""


def _run(
    change: Callable[[torch.optim.Optimizer], None],
    name: str = "sgd",
) -> None:
    """Changes the options of the last rank's optimizer in front of its third step."""
    model = build("mlp")
    optimizer = optimizer_for(name, model)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.25) if name == "adamw" else group["lr"]
    pipeline = new_pipeline(model, optimizer)

    def between(step: int) -> None:
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            change(optimizer)

    try:
        train_steps(pipeline, model, range(3), between=between)
    finally:
        assert pipeline.parts[0].num_steps == 2


def _set(group: int, key: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[group][key] = value

    return change


def _scale_in_place(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"].mul_(0.1)


CHANGES = {
    "lr": ("sgd", _set(1, "lr", 0.1), "SGD 0, parameter group 1: lr is 0.03 on rank 0 and 0.1 on"),
    "nesterov": ("sgd", _set(0, "nesterov", True), "nesterov is False on rank 0 and True on rank"),
    "momentum": ("sgd", _set(0, "momentum", 0.5), "SGD 0, parameter group 0: momentum is 0.9 on"),
    "decay": ("adamw", _set(0, "weight_decay", 0.5), "group 0: weight_decay is 0.05 on rank 0"),
    "betas": ("adamw", _set(1, "betas", (0.5, 0.9)), "group 1: betas is (0.9, 0.999) on rank 0"),
    "tensor": ("adamw", _scale_in_place, "AdamW 0, parameter group 1: lr is 0.25 on rank 0"),
}


@pytest.mark.parametrize("name", CHANGES)
@distributed(world_sizes=(2, 3))
def test_all_ranks_refuse_the_step(name: str) -> None:
    optimizer, change, message = CHANGES[name]
    with pytest.raises(ValueError, match="^Ranks step with different options: ") as raised:
        _run(change, optimizer)
    assert message in str(raised.value)


@distributed(world_sizes=(2,))
def test_also_if_all_is_sent_at_the_step() -> None:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    _set(0, "lr", 0.01 * (1 + dist.get_rank()))(optimizer)
    for step in range(2):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        with pipeline.backward(synchronize=False):
            loss.backward()
    with pytest.raises(ValueError, match="group 0: lr is 0.01 on rank 0 and 0.02 on rank 1"):
        optimizer.step()


@distributed(world_sizes=(2,))
def test_one_step_later_where_reading_flags_costs_a_wait() -> None:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    pipeline = new_pipeline(model, optimizer)
    pipeline.collectives.wait_blocks_host = False  # as on NCCL
    train_steps(pipeline, model, [0])
    _set(1, "lr", 0.01 * (1 + dist.get_rank()))(optimizer)
    train_steps(pipeline, model, [1])
    # Whatever they are by then.
    _set(1, "lr", 0.01)(optimizer)
    with pytest.raises(ValueError, match="group 1: lr is 0.01 on rank 0 and 0.02 on rank 1"):
        train_steps(pipeline, model, [2])


@distributed(world_sizes=(1, 2))
def test_what_changes_on_all_ranks_alike_is_nothing_to_say() -> None:
    model = build("mlp")
    optimizer = optimizer_for("sgd", model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=9)
    pipeline = new_pipeline(model, optimizer)
    train_steps(pipeline, model, range(4), between=lambda _: schedule.step())
    pipeline.detach()


def _said(*options: tuple[str, Any]) -> bytes:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    optimizer.param_groups[0].clear()
    optimizer.param_groups[0].update(options)
    stepper: Any = SimpleNamespace(optimizer=optimizer, written="")
    collectives: Any = SimpleNamespace(world=World(0, 2))
    return SharedOptions(collectives, stepper, 0, NO_WEIGHTS).say()


@pytest.mark.parametrize("whole", [0, 0.0, -0.0, False, np.float64(0), torch.tensor(0)])
def test_what_is_equal_has_equal_digests(whole: Any) -> None:
    """Otherwise `check_options` would gather in every step, and find no difference."""
    decay = ("weight_decay", np.float64(0.1))
    said = _said(("momentum", whole), ("betas", (whole, 0.9)), decay)
    assert said == _said(("weight_decay", 0.1), ("betas", (0, 0.9)), ("momentum", 0))
    assert said == _said(("momentum", whole), ("betas", (whole, 0.9)), decay, ("x", None))


@pytest.mark.parametrize("pair", [(-1, -2), (2**53, 2**53 + 1), (0, None), (math.inf, 0), ("", 0)])
def test_what_differs_has_other_digests(pair: tuple[Any, Any]) -> None:
    one, other = (_said(("momentum", value)) for value in pair)
    assert one != other
    one, other = (_said(("betas", (0.9, value))) for value in pair)
    assert one != other


def test_a_number_in_a_tuple_is_seen_to_change_in_place() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    beta = torch.tensor(0.5)
    optimizer.param_groups[0]["betas"] = (beta, 0.9)
    collectives: Any = SimpleNamespace(world=World(0, 2))
    stepper: Any = SimpleNamespace(optimizer=optimizer, written="")
    shared = SharedOptions(collectives, stepper, 0, NO_WEIGHTS)
    before = shared.say()
    assert shared.say() == before
    beta.mul_(0.5)
    assert shared.say() != before
