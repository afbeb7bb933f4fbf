"""Whoever looks at the weights between two steps sees what DDP would show at the same point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    STRATEGIES,
    HeldListRecorder,
    WeightRecorder,
    assert_differ,
    assert_ranks_agree,
    assert_same,
    dear,
    fit,
)
from tests.lightning.nets import Net, copies


class _NetWithHook(Net):
    """Reads its weights in its own hook, through a list that it made before; no callback does."""

    def __init__(self) -> None:
        super().__init__("gpt", "adamw")
        self.seen: list[list[Tensor]] = []

    def on_fit_start(self) -> None:
        self.held = list(self.parameters())

    def read(self, *_: Any) -> None:
        self.seen.append([parameter.detach().clone() for parameter in self.held])


class _NetWithEndHook(_NetWithHook):
    on_train_batch_end = _NetWithHook.read


class _NetWithStartHook(_NetWithHook):
    on_train_batch_start = _NetWithHook.read


class _NetWithValidation(_NetWithHook):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.read()


@pytest.mark.parametrize("kind", [_NetWithEndHook, _NetWithStartHook, _NetWithValidation])
@distributed(world_sizes=[2])
def test_hooks_of_the_module(kind: type[_NetWithHook]) -> None:
    nets = {name: kind() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        options = {"validates": kind is _NetWithValidation, "val_check_interval": 2}
        fit(strategy(), nets[name], model="gpt", **options, limit_val_batches=2)
    assert len(nets["dear"].seen) == 6
    assert_same(nets["dear"].seen, nets["ddp"].seen, "weights")


@distributed(world_sizes=[2, 3])
def test_a_list_of_parameters_kept_since_fit_start() -> None:
    recorders = {name: HeldListRecorder() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), Net("gpt"), recorders[name], model="gpt")
    assert_ranks_agree(recorders["dear"].seen)
    if torch.distributed.get_world_size() == 2:
        assert_same(recorders["dear"].seen, recorders["ddp"].seen, "weights")


@distributed(world_sizes=[2])
def test_validation_in_mid_epoch_sees_the_last_step() -> None:
    """Without any callback, so that nothing but the strategy completes the weights."""
    nets = {name: Net("conv", "adamw") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
        fit(strategy(), nets[name], model="conv", validates=True, **options)
    assert len(nets["dear"].validated) == 4
    assert_differ(nets["dear"].validated[0], nets["dear"].validated[1])
    assert_same(nets["dear"].validated, nets["ddp"].validated, "weights")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@distributed(world_sizes=[2])
def test_evaluation_after_fit_sees_the_last_step(stage: str) -> None:
    seen = {}
    for name, strategy in STRATEGIES.items():
        net = _NetWithEvaluation()
        trainer = fit(strategy(), net)
        net.validated.clear()
        getattr(trainer, stage)(net, torch.utils.data.DataLoader(torch.zeros(2, 7), 1))
        seen[name] = net.validated
        assert_same([copies(net)], [net.validated[0]], "weights after fit")
    assert seen["dear"]
    assert_same(seen["dear"], seen["ddp"], "weights")


class _NetWithEvaluation(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(copies(self))

    test_step = validation_step
    predict_step = validation_step


@distributed(world_sizes=[2])
def test_checkpoints_in_mid_epoch(tmp_path: Path) -> None:
    """ModelCheckpoint is not waited for, since it reads through `state_dict()`, which waits."""
    saved = {}
    for name, strategy in STRATEGIES.items():
        folder = tmp_path / name
        callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        fit(strategy(), Net("gpt", "adamw"), callback, model="gpt", enable_checkpointing=True)
        saved[name] = {path.name: torch.load(path) for path in sorted(folder.iterdir())}
    assert list(saved["dear"]) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for file, theirs in saved["ddp"].items():
        ours = saved["dear"][file]
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        assert_same(ours["state_dict"].values(), theirs["state_dict"].values(), file)
        assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0])


def assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for number, entries in theirs["state"].items():
        assert list(ours["state"][number]) == list(entries)
        assert_same(ours["state"][number].values(), entries.values(), f"state {number}")


def _averaging(kind: str) -> Callback:
    if kind == "swa":
        return StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
    return lightning_callbacks.EMAWeightAveraging(decay=0.5, use_buffers=True)


needs_ema = pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"),
    reason="this Lightning has no EMAWeightAveraging",
)


class _NetWithoutLeftovers(Net):
    """SWA's extra epoch for BatchNorm ends in a step without a backward.

    DDP applies the gradient that the epoch before left behind; ours leaves none (Lightning means
    the step to do nothing).
    """

    def on_train_epoch_start(self) -> None:
        self.optimizers().zero_grad()


@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("kind", [pytest.param("ema", marks=needs_ema), "swa"])
@distributed(world_sizes=[2])
def test_averaging_callbacks(kind: str, validates: bool, model: str) -> None:
    """Both read after steps and write weights back: at validation, or at the end of training."""
    nets = {name: _NetWithoutLeftovers(model) for name in STRATEGIES}
    recorders = {name: WeightRecorder() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        callbacks = [_averaging(kind), recorders[name]] if validates else [_averaging(kind)]
        options = {"max_epochs": 3, "validates": validates}
        fit(strategy(), nets[name], *callbacks, model=model, num_samples=12, **options)
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(nets["dear"].validated, nets["ddp"].validated, "weights in validation")
    assert_same(recorders["dear"].seen, recorders["ddp"].seen, "weights in training")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")
    if validates:
        assert_differ(copies(nets["dear"]), recorders["dear"].seen[8])  # epoch 3's last step


class _Writer(Callback):
    """Changes the weights between steps, the way the parameter names say."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        parameter = next(iter(pl_module.parameters()))
        with torch.no_grad():
            if self.way == "in place":
                parameter.mul_(0.5)
            elif self.way == "data":
                parameter.data = parameter.data * 0.5
            else:
                state = {key: value * 0.5 for key, value in pl_module.state_dict().items()}
                pl_module.load_state_dict(state, assign=self.way == "assign")


@pytest.mark.parametrize("way", ["in place", "data", "load"])
@distributed(world_sizes=[2])
def test_weights_written_by_a_callback_are_trained_on(way: str) -> None:
    nets = {name: Net("mlp") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name], _Writer(way))
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")


@distributed(world_sizes=[1, 2])
def test_assigned_weights_are_trained_on() -> None:
    """`assign=True` puts other parameters in place; DDP's optimizer would keep the old ones."""
    nets = {way: Net("mlp") for way in ("load", "assign")}
    for way, net in nets.items():
        fit(dear(), net, _Writer(way))
    assert_same(nets["assign"].losses, nets["load"].losses, "loss")
    assert_same(copies(nets["assign"]), copies(nets["load"]), "weights after fit")
