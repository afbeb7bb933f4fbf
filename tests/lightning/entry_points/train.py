"""`python train.py STRATEGY NUM_NODES DEVICES FOLDER`: a fit. Each rank leaves its weights."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Trainer

import lightning_dear  # noqa: F401
from tests.lightning.nets import data
from tests.lightning.script import SavingNet


def main(strategy: str, num_nodes: str, devices: str, folder: str) -> None:
    """Train for a few steps and say by whom the ranks were started."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        num_nodes=int(num_nodes),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(SavingNet(Path(folder)), data())
    environment = type(trainer.strategy.cluster_environment).__name__
    Path(folder, f"environment-{trainer.global_rank}").write_text(environment)
    if strategy == "ddp":
        # Lightning leaves gloo's threads to the end of the interpreter, which may then abort.
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
