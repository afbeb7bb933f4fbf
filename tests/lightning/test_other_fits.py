"""Fits that are no rows of the matrix: without a counterpart under DDP, or of an unusual shape."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, assert_same, dear, fit
from tests.lightning.nets import Net, copies, data


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


class _KeepingOptimizer(Net):
    """Trains with the same optimizer in every fit."""

    optimizer: Any = None

    def configure_optimizers(self) -> Any:
        self.optimizer = self.optimizer or super().configure_optimizers()
        return self.optimizer


@distributed(world_sizes=[2])
def test_a_second_fit_with_the_same_optimizer_goes_on_with_its_state() -> None:
    nets = {name: _KeepingOptimizer("mlp", "adamw") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        trainer = fit(strategy(), nets[name])
        trainer.fit_loop.max_epochs = 2
        trainer.fit(nets[name], data())
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")


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


class _Exporting(Net):
    """Exports itself to TorchScript in mid-training, at the end of an epoch and of each batch."""

    def on_train_epoch_end(self) -> None:
        torch.jit.script(self.net.layers)

    def on_train_batch_end(self, *_: Any) -> None:
        self.exported = torch.jit.script(self.net)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@distributed(world_sizes=[2])
def test_a_model_in_training_can_be_exported_to_torchscript() -> None:
    net = _Exporting("mlp")
    fit(dear(), net)
    x = torch.randn(2, 7)
    assert torch.equal(net.exported(x), net.net(x))
