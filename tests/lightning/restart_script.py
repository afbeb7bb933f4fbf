"""A script for torchrun whose first two attempts a rank is killed in: `FOLDER trainer|fabric`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from lightning_dear.fabric import DearFabricStrategy
from tests.lightning.fault_script import START_TIMEOUT
from tests.lightning.faults import (
    NUM_STEPS,
    OPTIONS,
    Fault,
    checkpoint_in,
    fit,
    keeper_in,
    new_strategy,
)
from tests.lightning.nets import copies


def fault_of_attempt() -> Fault | None:
    """Rank 1 in the first attempt, rank 0 in the second."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    return Fault("kill", "forward", 1 - attempt, 3 + attempt) if attempt < 2 else None


def train(folder: Path) -> None:
    """Goes on from the last checkpoint; rank 0 leaves the weights behind."""
    trainer = Trainer(
        strategy=new_strategy(timeout=START_TIMEOUT),
        accelerator="cpu",
        devices=2,
        callbacks=[keeper_in(folder)],
        logger=False,
        enable_progress_bar=False,
        **OPTIONS,
    )
    file = checkpoint_in(folder)
    net = fit(trainer, fault_of_attempt(), str(file) if file.exists() else None)
    if trainer.is_global_zero:
        torch.save(copies(net), folder / "weights")


def train_with_fabric(folder: Path) -> None:
    """Begins anew each time."""
    fabric = Fabric(
        strategy=DearFabricStrategy(timeout=START_TIMEOUT), accelerator="cpu", devices=2
    )
    fabric.launch()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fault = fault_of_attempt()
    for step in range(NUM_STEPS):
        if fault is not None and (fault.rank, fault.step) == (fabric.global_rank, step):
            fault.strike()
        optimizer.zero_grad()
        fabric.backward(model(torch.full((2, 4), float(step))).sum())
        optimizer.step()
    if fabric.is_global_zero:
        torch.save(copies(net), folder / "weights")


if __name__ == "__main__":
    {"trainer": train, "fabric": train_with_fabric}[sys.argv[2]](Path(sys.argv[1]))
