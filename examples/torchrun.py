"""Trains a small network on handwritten digits on two hosts, and prints what a step took.

Copy this file to both. Host 0 has the address 10.0.0.1 here. Start the first command on host 0 and
the second one on host 1; they wait for each other:

torchrun --nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=10.0.0.1 torchrun.py
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=1 --master-addr=10.0.0.1 torchrun.py

Append `--strategy=ddp` to compare with, or `--compressor=int8` to send fewer bytes.
"""

from __future__ import annotations

from argparse import ArgumentParser

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear import DearStrategy
from lightning_dear.callbacks import DearMonitor, TimelineCallback


class Digits(LightningModule):
    """Three layers with 4.5 MB of gradients, which a slow network feels."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        self.net = nn.Sequential(*hidden, nn.Linear(1024, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--strategy", choices=["dear", "ddp"], default="dear")
    parser.add_argument("--compressor", default="none")
    args = parser.parse_args()
    seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    monitor = DearMonitor()
    callbacks, strategy = [monitor], args.strategy
    if strategy == "dear":
        callbacks += [TimelineCallback(dirpath="outputs")]
        # The model is small, and so are its buckets: 1 MiB.
        strategy = DearStrategy(compressor=args.compressor, bucket_cap_mb=1)
    ranks = {"accelerator": "cpu", "num_nodes": 2, "devices": 1}  # --nnodes, --nproc-per-node
    trainer = Trainer(strategy=strategy, max_steps=60, callbacks=callbacks, **ranks)
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
    trainer.print({name: round(value, 4) for name, value in monitor.summary().items()})
