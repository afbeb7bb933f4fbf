"""Rows: validation, logging, the loops' own options, and fits that begin or end unusually."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from tests.lightning.matrix.nets import RowNet, gpt, mlp
from tests.lightning.matrix.rows import Feature, fit_and_validate
from tests.lightning.nets import copies

row = partial(Feature, section="Loops, validation and logging")


class _Logger(RowNet):
    """Logs reduced values, and gathers across ranks in the middle of a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        self.log("worst", loss, sync_dist=True, reduce_fx="max", on_step=True, on_epoch=True)
        self.note("logged", [self.trainer.callback_metrics.get("loss", torch.zeros(()))])
        self.note("gathered", [self.all_gather(loss.detach())])
        return loss

    def on_train_epoch_end(self) -> None:
        self.note("worst", [self.trainer.callback_metrics["worst_epoch"]])


class _Peeking(RowNet):
    """Evaluates with gradients enabled, between steps and inside a training step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.loss(batch)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("peeked", [self.loss(batch) for _ in range(2)])


def _fit_then(*stages: str) -> Any:
    return partial(_drive_stages, stages)


class _Evaluated(RowNet):
    """Notes its weights in every evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("evaluated", copies(self))

    test_step = validation_step
    predict_step = validation_step


def _drive_stages(
    stages: Sequence[str], trainer: Trainer, module: LightningModule, loader: Any
) -> None:
    trainer.fit(module, loader)
    for stage in stages:
        getattr(trainer, stage)(module, loader)


def _fit_twice(trainer: Trainer, module: LightningModule, loader: Any) -> None:
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)


def _early_stopping(folder: Path) -> Sequence[Callback]:
    return [EarlyStopping("val_loss", patience=0, min_delta=10.0)]


FEATURES = (
    row(name="logging with sync_dist, and all_gather in a step", net=_Logger),
    row(
        name="sanity check and validation between steps",
        net=gpt,
        data="gpt",
        drive=fit_and_validate,
        trainer={"val_check_interval": 2, "num_sanity_val_steps": 2, "limit_val_batches": 2},
    ),
    row(
        name="validate, test and predict after a fit",
        net=_Evaluated,
        drive=_fit_then("validate", "test", "predict"),
    ),
    row(
        name="forwards with gradients between steps", net=partial(_Peeking, model="gpt"), data="gpt"
    ),
    row(name="fit twice", net=mlp, drive=_fit_twice, num_steps=12),
    row(
        name="EarlyStopping",
        net=mlp,
        drive=fit_and_validate,
        callbacks=_early_stopping,
        trainer={"max_epochs": 5},
        num_batches=3,
        num_steps=6,
    ),
    row(name="max_steps", net=mlp, trainer={"max_steps": 1}, trains=False, num_steps=1),
    row(name="fast_dev_run", net=mlp, trainer={"fast_dev_run": 2}, num_steps=2),
    row(name="overfit_batches", net=mlp, trainer={"overfit_batches": 2}, num_steps=2),
    row(name="detect_anomaly", net=mlp, trainer={"detect_anomaly": True}),
    row(
        name="inference_mode=False",
        net=mlp,
        drive=fit_and_validate,
        trainer={"inference_mode": False},
    ),
)
