"""What a user writes: `python script.py STRATEGY FOLDER`. Leaves each rank's weights in FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

import lightning_dear  # noqa: F401
from tests.lightning.nets import Net, data


def main(strategy: str, folder: Path) -> None:
    """Train for a few steps on two processes."""
    net = SavingNet(folder)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(net, data())
    torch.save(net.state_dict(), folder / f"after-{os.environ.get('LOCAL_RANK', 0)}.pt")


class SavingNet(Net):
    """Writes what each rank holds at the end of training."""

    def __init__(self, folder: Path) -> None:
        super().__init__("mlp", "adamw")
        self.folder = folder

    def on_train_end(self) -> None:
        state = {key: value.clone() for key, value in self.state_dict().items()}
        assert self.trainer.world_size == 2
        torch.save(state, self.folder / f"rank-{self.trainer.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
