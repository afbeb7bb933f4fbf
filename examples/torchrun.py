"""Trains a small network on handwritten digits on two hosts, and prints what a step took.

Copy this file to both. Host 0 has the address 10.0.0.1 here. Start the first command on host 0 and
the second one on host 1; they wait for each other:

torchrun --nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=10.0.0.1 torchrun.py
torchrun --nnodes=2 --node-rank=1 --nproc-per-node=1 --master-addr=10.0.0.1 torchrun.py

Append `--strategy=ddp`, or `ddp_bf16` (its own hook), to compare, `--compressor=int8` to send less.
"""

from argparse import ArgumentParser

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dear import DearStrategy
from lightning_dear.callbacks import DearMonitor, TimelineCallback
from lightning_dear.studies.competitors import Bf16DDPStrategy


class Digits(LightningModule):
    """Three layers with 4.5 MB of gradients, which a slow network feels."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        self.net = nn.Sequential(*hidden, nn.Linear(1024, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, and log it."""
        self.log("loss", loss := nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an ordinary optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--strategy", choices=["dear", "ddp", "ddp_bf16"], default="dear")
    parser.add_argument("--compressor", default="none")
    args = parser.parse_args()
    seed_everything(1)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    monitor = DearMonitor()
    # The model is small, and so are its buckets: 1 MiB.
    ours = DearStrategy(compressor=args.compressor, bucket_cap_mb=1)
    strategy = {"dear": ours, "ddp": "ddp", "ddp_bf16": Bf16DDPStrategy()}[args.strategy]
    callbacks = [monitor, TimelineCallback(dirpath=f"outputs/{args.compressor}", warns=False)]
    ranks = {"accelerator": "cpu", "num_nodes": 2, "devices": 1}  # --nnodes, --nproc-per-node
    trainer = Trainer(strategy=strategy, max_steps=60, callbacks=callbacks, **ranks)
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
    figures = {**monitor.summary(), "loss": float(trainer.callback_metrics["loss"])}
    trainer.print({name: round(value, 4) for name, value in figures.items()})
