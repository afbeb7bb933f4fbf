"""Trains a small network on handwritten digits with Fabric, in a loop of your own.

Run `python fabric.py`: it starts two processes on this machine, needs no GPU, and takes seconds.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dear  # noqa: F401 (makes the name "dear" known to Lightning)


def main() -> None:
    """Train for five epochs, save, and say how well it went."""
    fabric = Fabric(strategy="dear", accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(1)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)  # Both in one call.

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    batches = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))

    for _ in range(5):
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)  # Not loss.backward().
            optimizer.step()
            optimizer.zero_grad()

    # Every process calls it: each has a part of the optimizer's state.
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    mean = fabric.all_reduce(loss.detach())
    fabric.print(f"loss {mean:.3f}")


if __name__ == "__main__":
    main()
