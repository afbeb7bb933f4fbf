"""Batches for a model that does not look at them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_dear.workloads.splits import SplitDataModule


class _Numbers(Dataset[Tensor]):
    """Item i is the number i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class ReplayData(SplitDataModule):
    """Batches of running numbers; no two ranks get the same one in a step.

    Args:
        num_steps: Training batches for each rank. Validation and test have one each.
        batch_size: Numbers per batch and process: what a batch counts for where samples per second
            are reported. The times of a replay do not depend on it.
    """

    def __init__(self, num_steps: int = 1000, batch_size: int = 1) -> None:
        super().__init__(batch_size)
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
        self.num_steps = num_steps

    @override
    def setup(self, stage: str) -> None:
        """Make the numbers; called on every process."""
        world_size = self.trainer.world_size if self.trainer is not None else 1
        self.train_set = _Numbers(self.num_steps * self.batch_size * world_size)
        self.val_set = self.test_set = _Numbers(self.batch_size * world_size)
