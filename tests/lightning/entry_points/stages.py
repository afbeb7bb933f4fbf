"""`python stages.py STRATEGY FOLDER`: every entry point of a Trainer, one after the other.

Each rank leaves in FOLDER what it saw: losses, metrics, predictions and the final weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_dear  # noqa: F401
from tests.lightning.nets import Net, copies, data


class Stages(Net):
    """Can do all that a Trainer may ask for; writes predictions, since a process may end."""

    def __init__(self, folder: Path) -> None:
        super().__init__("mlp", "adamw")
        self.folder = folder
        self.predicted: list[Tensor] = []
        self.stage = "first"

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.predicted.append(self.net(batch[0]))

    def on_predict_end(self) -> None:
        torch.save(self.predicted, self.folder / f"predicted-{self.global_rank}.pt")

    def on_train_end(self) -> None:
        found = {"losses": self.losses, "weights": copies(self)}
        torch.save(found, self.folder / f"fit-{self.stage}-{self.global_rank}.pt")


class FailsEverywhere(Callback):
    """Raises on every rank in one batch, once."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            raise ZeroDivisionError("the user's own mistake")


def new_trainer(strategy: str, *callbacks: Callback) -> Trainer:
    """A quiet one for two processes."""
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def main(strategy: str, folder: Path) -> None:
    """Fit, validate, test, predict, fit on, fail, and fit again."""
    net, loader = Stages(folder), data()
    in_order = DataLoader(loader.dataset, batch_size=2)
    trainer = new_trainer(strategy)
    trainer.fit(net, loader)
    metrics = [trainer.validate(net, in_order, verbose=False)]
    metrics.append(trainer.test(net, in_order, verbose=False))
    trainer.predict(net, in_order, return_predictions=False)
    # A launcher that starts new processes for every call lets one Trainer fit once.
    if strategy in ("dear", "ddp"):
        net.stage = "longer"
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, loader)
        fail_once(strategy, net)
    net.stage = "last"
    new_trainer(strategy).fit(net, loader)
    found = {"metrics": metrics, "weights": copies(net)}
    torch.save(found, folder / f"all-{os.environ.get('LOCAL_RANK', '0')}.pt")
    if strategy == "ddp":
        # Lightning leaves gloo's threads to the end of the interpreter, which may then abort.
        dist.destroy_process_group()


def fail_once(strategy: str, net: Stages) -> None:
    """A fit that ends in an exception, which the user catches."""
    try:
        new_trainer(strategy, FailsEverywhere()).fit(net, data())
    except ZeroDivisionError:
        return
    raise AssertionError("the exception did not reach the caller")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
