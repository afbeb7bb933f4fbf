"""What is in a checkpoint, and when one can be written. Resuming: `test_resume_matrix.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    STRATEGIES,
    WeightRecorder,
    assert_ranks_agree,
    assert_same,
    assert_same_optimizer,
    dear,
    fit,
)
from tests.lightning.nets import Net
from tests.training.models import batch, optimizer_for

NUM_STEPS, SAVED_AT = 6, 4


class StepNet(Net):
    """Takes its samples by step, since Lightning serves an epoch's first ones after resuming."""

    def training_step(self, _: Any, batch_idx: int) -> Any:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        return self.loss(list(batch(self.model_name, step, rank)))


def _save(folder: Path, model: str, optimizer: str) -> Any:
    """Trains to the end, saving on the way; returns the weights of the steps after it."""
    recorder, net = WeightRecorder(), StepNet(model, optimizer)
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    options = {"max_steps": NUM_STEPS, "num_samples": 48, "enable_checkpointing": True}
    fit(dear(), net, recorder, callback, model=model, **options)
    return recorder.seen[SAVED_AT:]


def _file(folder: Path) -> str:
    return str(folder / f"step={SAVED_AT}.ckpt")


def _resume(folder: Path, model: str, optimizer: str) -> Any:
    recorder, net = WeightRecorder(), StepNet(model, optimizer)
    options = {"max_steps": NUM_STEPS, "num_samples": 48, "ckpt_path": _file(folder)}
    fit(dear(), net, recorder, model=model, **options)
    return recorder.seen


@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd")])
@distributed(world_sizes=[2])
def test_buffers_and_tied_weights_come_back(tmp_path: Path, model: str, optimizer: str) -> None:
    uninterrupted = _save(tmp_path, model, optimizer)
    resumed = _resume(tmp_path, model, optimizer)
    assert len(resumed) == len(uninterrupted) > 0
    assert_same(resumed, uninterrupted, "weights")
    assert_ranks_agree(resumed)


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


class _Looking(Callback):
    """Keeps what each rank has in a checkpoint, and what it is given if it asks itself."""

    seen: Any = None

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        asked = trainer.strategy.optimizer_state(trainer.optimizers[0], on_all_ranks=True)
        self.seen = checkpoint["optimizer_states"][0]["state"], asked["state"]


@distributed(world_sizes=[2])
def test_a_checkpoint_is_whole_on_rank_0_and_what_one_asks_for_is_so_on_all(tmp_path: Path) -> None:
    looking = _Looking()
    trainer = fit(dear(), Net("mlp", "adamw"), looking)
    trainer.save_checkpoint(tmp_path / "file")
    in_checkpoint, asked = looking.seen
    file = torch.load(tmp_path / "file")["optimizer_states"][0]["state"]
    assert asked.keys() == in_checkpoint.keys() == file.keys()
    for number, entries in file.items():
        assert torch.equal(asked[number]["exp_avg"], entries["exp_avg"])
        assert in_checkpoint[number]["exp_avg"].is_meta == (trainer.global_rank == 1)


class _Stop(Callback):
    """Raises behind a step, or half-way through the next backward, on every rank."""

    def __init__(self, *, is_in_backward: bool) -> None:
        self.is_in_backward = is_in_backward

    def on_before_backward(self, trainer: Any, net: Any, loss: Tensor) -> None:
        if self.is_in_backward and trainer.global_step == 3:
            net.net.layers[2].weight.register_hook(self._stop)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not self.is_in_backward and trainer.global_step == 3:
            self._stop()

    def _stop(self, *_: Any) -> None:
        raise RuntimeError("stopped here")


@pytest.mark.parametrize("is_in_backward", [False, True])
@distributed(world_sizes=[2])
def test_a_checkpoint_saved_by_an_exception(tmp_path: Path, is_in_backward: bool) -> None:
    """All ranks stop after step 3: what is saved holds step 3, and resumes to the same bits."""
    uninterrupted = WeightRecorder()
    fit(dear(), Net(), uninterrupted)
    callbacks = [_Stop(is_in_backward=is_in_backward), OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(dear(), Net(), *callbacks, enable_checkpointing=True)
    saved = torch.load(tmp_path / "on_exception.ckpt")
    assert saved["global_step"] == 3
    assert_same(saved["state_dict"].values(), uninterrupted.seen[2], "weights")
