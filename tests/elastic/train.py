"""What torchrun starts in these tests: a training that goes on from its last checkpoint.

    train.py FOLDER [CHECKPOINT]

Each rank appends a line of JSON to FOLDER/events for what happens, with the time.
"""

# ruff: noqa: E402

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

BEGIN_S = time.time()

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_dear import DearStrategy

NUM_STEPS = 150


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
        )

    @override
    def training_step(self, batch: torch.Tensor, *_: Any) -> torch.Tensor:
        time.sleep(0.05)
        return (self.net(batch) - batch).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Events(Callback):
    """Writes down steps and weights, and keeps the checkpoint that a restart goes on from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_stepped = False

    def note(self, trainer: Trainer, event: str, **more: Any) -> None:
        line = {"event": event, "rank": trainer.global_rank, "world": trainer.world_size}
        line |= {"step": trainer.global_step, "t": time.time(), "begin": BEGIN_S, **more}
        line |= {"group": os.environ.get("GROUP_RANK"), "pid": os.getpid()}
        with (self.folder / "events").open("a") as file:
            file.write(json.dumps(line) + "\n")

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        last = self.folder / "last.ckpt"
        if trainer.global_rank == 0 and last.exists():
            shutil.copy(last, self.folder / f"from{trainer.global_step}.ckpt")
        self.note(trainer, "start")

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.has_stepped:
            self.has_stepped = True
            self.note(trainer, "first")

    @override
    def on_exception(self, trainer: Trainer, module: LightningModule, error: Any) -> None:
        self.note(trainer, "stop", error=type(error).__name__)

    @override
    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        data = b"".join(one.detach().numpy().tobytes() for one in module.parameters())
        self.note(trainer, "end", digest=hashlib.sha256(data).hexdigest()[:16])


def main(folder: Path, checkpoint: str, *, elastic: bool = True) -> None:
    seed_everything(1, verbose=False)
    data = torch.randn(6000, 16, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy=DearStrategy(elastic=elastic),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=NUM_STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, save_on_exception=True), Events(folder)],
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(Model(), loader, ckpt_path=checkpoint, weights_only=False)


if __name__ == "__main__":
    by_hand = len(sys.argv) > 2
    main(Path(sys.argv[1]), sys.argv[2] if by_hand else "last", elastic=not by_hand)
