"""Fits that are no rows of the matrix: without a counterpart under DDP, or of an unusual shape."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_dear.collectives import new_collectives
from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, TIMEOUT, assert_same, dear, fit
from tests.lightning.nets import Net, copies


@distributed(world_sizes=[1])
def test_one_rank_trains_what_no_strategy_trains() -> None:
    nets = {}
    for name, strategy in (("dear", dear()), ("auto", "auto")):
        nets[name] = Net("conv", "adamw")
        fit(strategy, nets[name], model="conv", use_distributed_sampler=False)
    assert_same(copies(nets["dear"]), copies(nets["auto"]), "weights")


@distributed(world_sizes=[2])
def test_a_module_trains_on_under_another_strategy() -> None:
    nets = {name: Net("mlp", "sgd") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name])
        fit(STRATEGIES["ddp"](), nets[name])
        fit(strategy(), nets[name])
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")


class _Loader(Callback):
    """Loads halved weights between steps, in place or by assignment."""

    def __init__(self, assign: bool) -> None:
        self.assign = assign

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = {key: value * 0.5 for key, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(state, assign=self.assign)


@distributed(world_sizes=[1, 2])
def test_assigned_weights_are_trained_on() -> None:
    """`assign=True` puts other parameters in place; DDP's optimizer would keep the old ones."""
    nets = {assign: Net("mlp") for assign in (False, True)}
    for assign, net in nets.items():
        fit(dear(), net, _Loader(assign))
    assert_same(nets[True].losses, nets[False].losses, "loss")
    assert_same(copies(nets[True]), copies(nets[False]), "weights after fit")


class _Interrupt(Callback):
    """Ctrl-C on all ranks, as a terminal sends it."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["interrupted", "no step", "no batch"])
@distributed(world_sizes=[2])
def test_fits_that_end_early_end_as_under_ddp(end: str) -> None:
    options = {"no step": {"max_steps": 0}, "no batch": {"limit_train_batches": 0}}.get(end, {})
    callbacks = [_Interrupt()] if end == "interrupted" else []
    nets = {name: Net("gpt", "adamw") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        with suppress(KeyboardInterrupt, SystemExit):
            fit(strategy(), nets[name], *callbacks, model="gpt", **options)
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")


@distributed(world_sizes=(2,))
def test_many_fits_open_no_more_sockets_than_one() -> None:
    descriptors = []
    for _ in range(4):
        fit(dear(), Net("mlp"))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[3] == descriptors[0]


@distributed(world_sizes=(2,))
def test_a_fit_after_a_failure_on_one_rank_starts_with_fresh_groups() -> None:
    fit(dear(), Net("mlp"))
    collectives = new_collectives(torch.device("cpu"), TIMEOUT)
    if dist.get_rank() == 0:
        collectives.discard()
    fit(dear(), Net("mlp"))
