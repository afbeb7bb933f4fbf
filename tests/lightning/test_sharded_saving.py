"""`save_distributed_checkpoint=True`: what a Trainer does with checkpoints, done with folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner

from lightning_dear import DearStrategy
from lightning_dear.checkpoint.files import CHECKPOINT_KEY, FORMAT
from lightning_dear.checkpoint.folder import convert, is_folder, load
from tests.checkpoint.test_distributed_checkpoint import assert_equal
from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import WeightRecorder, assert_same, ddp, dear, fit, new_trainer
from tests.lightning.nets import Net, copies, data
from tests.training.models import batch

NUM_STEPS, SAVED_AT = 6, 4
NAME = f"step={SAVED_AT}.ckpt"


def folders(**options: Any) -> DearStrategy:
    """Ours with the option on."""
    return dear(save_distributed_checkpoint=True, **options)


class StepNet(Net):
    """Takes its samples by step, since Lightning serves an epoch's first ones after resuming."""

    def training_step(self, _: Any, batch_idx: int) -> Any:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        return self.loss(list(batch(self.model_name, step, rank)))

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def _train(strategy: Any, folder: Path, model: str, optimizer: str) -> Any:
    """Trains to the end, saving on the way; returns the weights of the steps after it."""
    recorder = WeightRecorder()
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    options = {"max_steps": NUM_STEPS, "num_samples": 72, "enable_checkpointing": True}
    fit(strategy, StepNet(model, optimizer), recorder, callback, model=model, **options)
    return recorder.seen[SAVED_AT:]


def _resume(strategy: Any, path: Path, model: str, optimizer: str) -> Any:
    recorder = WeightRecorder()
    options = {"max_steps": NUM_STEPS, "num_samples": 72, "ckpt_path": str(path)}
    fit(strategy, StepNet(model, optimizer), recorder, model=model, **options)
    assert len(recorder.seen) == NUM_STEPS - SAVED_AT
    return recorder.seen


def _train_both(folder: Path, model: str, optimizer: str) -> None:
    """Saves a file and a folder of the same training, and resumes the folder to the same bits."""
    seen = _train(folders(), folder / "folders", model, optimizer)
    assert_same(_train(dear(), folder / "files", model, optimizer), seen, "weights")
    resumed = _resume(folders(), folder / "folders" / NAME, model, optimizer)
    assert_same(resumed, seen, "resumed weights")


def _resume_both(folder: Path, model: str, optimizer: str) -> None:
    files, sharded = folder / "files" / NAME, folder / "folders" / NAME
    # The option says how to save, not what can be loaded.
    assert_same(
        _resume(dear(), sharded, model, optimizer),
        _resume(folders(), files, model, optimizer),
        "weights",
    )


@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd")])
@pytest.mark.parametrize("saver", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_folder_resumes_as_a_file_does(
    tmp_path: Path, saver: int, model: str, optimizer: str
) -> None:
    run_ranks(_train_both, saver, tmp_path, model, optimizer)
    assert (tmp_path / "files" / NAME).is_file()
    ours = load(tmp_path / "folders" / NAME)
    theirs = torch.load(tmp_path / "files" / NAME, weights_only=True)
    assert ours[CHECKPOINT_KEY] == theirs[CHECKPOINT_KEY] == {"format": FORMAT}
    for checkpoint in (ours, theirs):
        del checkpoint["callbacks"]  # They hold the path.
    assert_equal(ours, theirs)
    for resumer in (1, 2, 3):
        run_ranks(_resume_both, resumer, tmp_path, model, optimizer)


def _train_folders(folder: Path) -> None:
    _train(folders(), folder, "conv", "adamw")


def _resume_converted(folder: Path) -> None:
    ours = _resume(dear(), folder / "folders" / NAME, "conv", "adamw")
    theirs = _resume(ddp(), folder / "file.ckpt", "conv", "adamw")
    assert_same(ours, theirs, "weights")


def test_ddp_resumes_a_converted_folder(tmp_path: Path) -> None:
    run_ranks(_train_folders, 3, tmp_path / "folders")
    convert(tmp_path / "folders" / NAME, tmp_path / "file.ckpt")
    run_ranks(_resume_converted, 2, tmp_path)
    Net.load_from_checkpoint(tmp_path / "file.ckpt", model="conv", optimizer="adamw")


@distributed(world_sizes=[1, 2])
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=1,
    )  # fmt: skip
    options = {"max_steps": NUM_STEPS, "num_samples": 72, "enable_checkpointing": True}
    net = StepNet()
    trainer = fit(folders(), net, callback, **options)
    names = ["last.ckpt", f"step={NUM_STEPS - 1}.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert sorted(os.listdir(tmp_path)) == names
    assert all(load(tmp_path / name)["global_step"] > NUM_STEPS - 2 for name in names)
    trained = copies(net)
    for path in ("best", "last", str(tmp_path / names[-1])):
        other = StepNet()
        (results,) = trainer.test(other, data(), ckpt_path=path, verbose=False)
        assert results["test_loss"] > 0
        assert_same(copies(other), trained, f"weights of {path}")
    # Resuming from "last" goes on from there.
    recorder = WeightRecorder()
    resumed = {**options, "max_steps": NUM_STEPS + 2, "ckpt_path": "last"}
    fit(folders(), StepNet(), recorder, ModelCheckpoint(tmp_path), **resumed)
    assert len(recorder.seen) == 2


@distributed(world_sizes=[2])
def test_last_may_be_a_link(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=1, save_last="link", every_n_train_steps=2,
        monitor="step", mode="max",
    )  # fmt: skip
    options = {"max_steps": NUM_STEPS, "num_samples": 72, "enable_checkpointing": True}
    fit(folders(), StepNet(), callback, **options)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", f"step={NUM_STEPS}.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink()
    assert load(tmp_path / "last.ckpt")["global_step"] == NUM_STEPS


@distributed(world_sizes=[2])
def test_saving_over_the_other_kind(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    for strategy, expected in ((dear, False), (folders, True), (folders, True), (dear, False)):
        trainer = fit(strategy(), Net("mlp", "adamw"))
        trainer.save_checkpoint(path)
        assert is_folder(path) == expected
        trainer.strategy.barrier()
    assert torch.load(path)["global_step"] > 0
    assert os.listdir(tmp_path) == ["saved.ckpt"]


@distributed(world_sizes=[2])
def test_all_ranks_save_to_the_path_of_rank_0(tmp_path: Path) -> None:
    trainer = fit(folders(), Net("mlp", "adamw"))
    trainer.save_checkpoint(tmp_path / f"rank {trainer.global_rank}")
    assert os.listdir(tmp_path) == ["rank 0"]
    load(tmp_path / "rank 0")


class _Stop(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("stopped here")


@distributed(world_sizes=[2])
def test_a_folder_saved_by_an_exception(tmp_path: Path) -> None:
    callbacks = [_Stop(), OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(RuntimeError, match="stopped here"):
        fit(folders(), Net("mlp", "adamw"), *callbacks, enable_checkpointing=True)
    saved = load(tmp_path / "on_exception.ckpt")
    assert saved["global_step"] == 3
    assert all(entries["step"] == 3 for entries in saved["optimizer_states"][0]["state"].values())


class _RateNet(Net):
    rate = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


@distributed(world_sizes=[2])
def test_lr_find_saves_restores_and_clears_away(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = _RateNet()
    before = copies(net)
    trainer = new_trainer(folders(), default_root_dir=tmp_path, enable_checkpointing=True)
    Tuner(trainer).lr_find(net, data(), num_training=5, attr_name="rate", update_attr=False)
    assert_same(copies(net), before, "weights")
    trainer.strategy.barrier()  # Rank 0 removes, and nobody waits for it.
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(".ckpt")] == []


# Refused.


@distributed(world_sizes=[1])
def test_what_folders_would_go_past_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="would not use AsyncCheckpointIO"):
        fit(folders(checkpoint_io=AsyncCheckpointIO()), Net())
    trainer = fit(folders(), Net())
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "saved", storage_options={"x": 1})
    with pytest.raises(ValueError, match="s3://bucket/saved"):
        trainer.save_checkpoint("s3://bucket/saved")


@pytest.mark.parametrize("strategy", [dear, folders])
@distributed(world_sizes=[1])
def test_an_unknown_format_is_refused_by_name(tmp_path: Path, strategy: Any) -> None:
    trainer = fit(dear(), Net())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    checkpoint = torch.load(tmp_path / "saved.ckpt")
    assert checkpoint[CHECKPOINT_KEY] == {"format": FORMAT}
    torch.save({**checkpoint, CHECKPOINT_KEY: {"format": 99}}, tmp_path / "new.ckpt")
    with pytest.raises(ValueError, match="lightning_dear format 99"):
        fit(strategy(), Net(), ckpt_path=str(tmp_path / "new.ckpt"))
