"""Trains a small network on handwritten digits with a Trainer.

Run `python trainer.py`: it starts two processes on this machine, needs no GPU, and takes seconds.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dear  # noqa: F401 (makes the name "dear" known to Lightning)


class Digits(LightningModule):
    """Two layers. Nothing in here knows of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of right answers, over both processes."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train for five epochs and say how well it went."""
    seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = data[:1500], data[1500:]
    trainer = Trainer(strategy="dear", accelerator="cpu", devices=2, max_epochs=5)
    trainer.fit(
        Digits(),
        DataLoader(TensorDataset(*train), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(*test), batch_size=32),
    )
    trainer.print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
