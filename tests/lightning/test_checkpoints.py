"""Saving in the middle of training, and resuming under ours, plain DDP and one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.distributed.harness import distributed, run_ranks
from tests.engine.models import batch, distance, optimizer_for
from tests.lightning.fitting import (
    STRATEGIES,
    WeightRecorder,
    assert_ranks_agree,
    assert_same,
    dear,
    fit,
)
from tests.lightning.nets import Net, copies
from tests.lightning.test_observable_points import assert_same_optimizer

NUM_STEPS, SAVED_AT = 6, 4


class _StepNet(Net):
    """Takes its samples by step, since Lightning serves an epoch's first ones after resuming."""

    def training_step(self, _: Any, batch_idx: int) -> Any:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        return self.loss(list(batch(self.model_name, step, rank)))


def _save(folder: Path, model: str, optimizer: str) -> Any:
    """Trains to the end, saving on the way; returns the weights of the steps after it."""
    return _train_and_save(folder, dear(), model, optimizer)


def _train_and_save(folder: Path, strategy: Any, model: str, optimizer: str) -> Any:
    recorder, net = WeightRecorder(), _StepNet(model, optimizer)
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    options = {"max_steps": NUM_STEPS, "num_samples": 48, "enable_checkpointing": True}
    fit(strategy, net, recorder, callback, model=model, **options)
    return recorder.seen[SAVED_AT:]


def _file(folder: Path) -> str:
    return str(folder / f"step={SAVED_AT}.ckpt")


def _resume(folder: Path, strategy: Any, model: str, optimizer: str) -> Any:
    recorder, net = WeightRecorder(), _StepNet(model, optimizer)
    options = {"max_steps": NUM_STEPS, "num_samples": 48, "ckpt_path": _file(folder)}
    fit(strategy, net, recorder, model=model, **options)
    return recorder.seen


@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd")])
@distributed(world_sizes=[1, 2, 3])
def test_resuming_equals_never_stopping(tmp_path: Path, model: str, optimizer: str) -> None:
    uninterrupted = _save(tmp_path, model, optimizer)
    resumed = _resume(tmp_path, dear(), model, optimizer)
    assert len(resumed) == len(uninterrupted) > 0
    assert_same(resumed, uninterrupted, "weights")
    assert_ranks_agree(resumed)


@distributed(world_sizes=[2])
def test_ddp_resumes_our_checkpoint_and_we_theirs(tmp_path: Path) -> None:
    seen = {
        name: _train_and_save(tmp_path / name, strategy(), "conv", "adamw")
        for name, strategy in STRATEGIES.items()
    }
    for saver, resumer in (("dear", "ddp"), ("ddp", "dear")):
        resumed = _resume(tmp_path / saver, STRATEGIES[resumer](), "conv", "adamw")
        assert len(resumed) == NUM_STEPS - SAVED_AT
        assert_same(resumed, seen[saver], f"weights of {resumer} after {saver}")


class _WholeBatchNet(Net):
    """Sees the same samples at every world size: only the sum over ranks differs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        world_size = self.trainer.world_size
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        inputs = torch.randn(12, 7, generator=generator)
        targets = torch.randint(3, (12,), generator=generator)
        part = slice(self.trainer.global_rank, None, world_size)
        return self.loss([inputs[part], targets[part]])


def _train_whole(folder: Path, is_resumed: bool) -> Any:
    net = _WholeBatchNet("mlp", "adamw")
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    options = {"num_samples": 64, "max_steps": NUM_STEPS, "enable_checkpointing": True}
    fit(dear(), net, callback, ckpt_path=_file(folder) if is_resumed else None, **options)
    return copies(net)


@pytest.mark.parametrize(("saver", "resumer"), [(2, 1), (1, 2), (2, 4), (4, 3)])
def test_resuming_on_another_number_of_ranks(tmp_path: Path, saver: int, resumer: int) -> None:
    uninterrupted = run_ranks(_train_whole, saver, tmp_path, False)[0]
    resumed = run_ranks(_train_whole, resumer, tmp_path, True)[0]
    assert distance(resumed, uninterrupted) < 1e-6
    assert distance(resumed, copies(_WholeBatchNet())) > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world_sizes=[2])
def test_the_optimizer_state_is_torchs_own(tmp_path: Path, optimizer: str) -> None:
    """A plain optimizer in one process loads it and gives it back unchanged."""
    _save(tmp_path, "gpt", optimizer)
    checkpoint = torch.load(_file(tmp_path))
    net = Net("gpt")
    net.load_state_dict(checkpoint["state_dict"])
    plain = optimizer_for(optimizer, net.net)
    plain.load_state_dict(checkpoint["optimizer_states"][0])
    assert len(plain.state) == len(list(net.parameters()))
    for parameter, entries in plain.state.items():
        for key, value in entries.items():
            assert key == "step" or value.shape == parameter.shape
    assert_same_optimizer(checkpoint["optimizer_states"][0], plain.state_dict())


@distributed(world_sizes=[1, 2])
def test_a_checkpoint_saved_after_fit(tmp_path: Path) -> None:
    """The trainer saves whole optimizer state although training is over."""
    saved = {}
    for name, strategy in STRATEGIES.items():
        trainer = fit(strategy(), Net("gpt", "adamw"), model="gpt")
        trainer.save_checkpoint(tmp_path / name)
        saved[name] = torch.load(tmp_path / name)
    ours, theirs = saved["dear"], saved["ddp"]
    assert_same(ours["state_dict"].values(), theirs["state_dict"].values(), "weights")
    assert_same_optimizer(ours["optimizer_states"][0], theirs["optimizer_states"][0])


class _Stop(Callback):
    """Raises behind a step, on every rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("stopped here")


@distributed(world_sizes=[2])
def test_a_checkpoint_saved_by_an_exception(tmp_path: Path) -> None:
    """All ranks stop after step 3: what is saved holds step 3, and resumes to the same bits."""
    uninterrupted = WeightRecorder()
    fit(dear(), Net(), uninterrupted)
    callbacks = [_Stop(), OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(dear(), Net(), *callbacks, enable_checkpointing=True)
    saved = torch.load(tmp_path / "on_exception.ckpt")
    assert saved["global_step"] == 3
    assert_same(saved["state_dict"].values(), uninterrupted.seen[2], "weights")
