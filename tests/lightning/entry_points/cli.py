"""`python cli.py fit --config ...`: LightningCLI with a module that leaves its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import lightning_dear  # noqa: F401
from tests.lightning.nets import data
from tests.lightning.script import SavingNet


class SavingModule(SavingNet):
    """The same with an argument that a command line can give.

    Args:
        folder: Where each rank's weights go.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(Path(folder))


class Data(LightningDataModule):
    """The tests' samples."""

    def train_dataloader(self) -> DataLoader[Any]:
        return data()


if __name__ == "__main__":
    LightningCLI(SavingModule, Data, seed_everything_default=False)
