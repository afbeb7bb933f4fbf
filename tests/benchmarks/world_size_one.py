"""What strategy="dear" costs where there is nothing to communicate: one process, default job.

    python -m tests.benchmarks.world_size_one --blocks 8 --steps 60 --raw overhead.csv

Blocks of steps under Lightning's single-device strategy and under ours alternate in one process.
Prints the median step of each and the median over blocks of their ratio and difference, and keeps
every step in a CSV file.
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from typing_extensions import override

from lightning_dear import DearStrategy
from lightning_dear.workloads.data import DigitsDataModule
from lightning_dear.workloads.nets import ResNet
from lightning_dear.workloads.task import Classifier

NUM_WARM_UP_STEPS = 10


class _Clock(Callback):
    """Notes when every batch ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.ends_s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        pairs = zip(self.ends_s, self.ends_s[1:], strict=False)
        return [after - before for before, after in pairs][NUM_WARM_UP_STEPS:]


def _steps(strategy: Any, num_steps: int) -> list[float]:
    seed_everything(1, verbose=False)
    net = ResNet(in_channels=1, num_classes=10, channels=[32, 64, 128], num_blocks=2)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-3)
    clock = _Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=num_steps + NUM_WARM_UP_STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Classifier(net=net, optimizer=optimizer), DigitsDataModule())
    return clock.steps_s()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--raw", type=Path, default=Path("world_size_one.csv"))
    options = parser.parse_args()
    for namespace in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{namespace}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    steps_s: dict[str, list[float]] = {"single": [], "dear": []}
    ratios, differences_ms = [], []
    for block in range(options.blocks):
        order = ("single", "dear") if block % 2 == 0 else ("dear", "single")
        taken = {}
        for name in order:
            strategy = DearStrategy() if name == "dear" else "auto"
            taken[name] = _steps(strategy, options.steps)
            steps_s[name] += taken[name]
        ratios.append(median(taken["dear"]) / median(taken["single"]))
        differences_ms.append((median(taken["dear"]) - median(taken["single"])) * 1e3)
    with options.raw.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "step_s"])
        writer.writerows((name, step_s) for name, all_s in steps_s.items() for step_s in all_s)
    single_ms, dear_ms = (median(steps_s[name]) * 1e3 for name in ("single", "dear"))
    print(f"single device   {single_ms:8.3f} ms a step (median of {len(steps_s['single'])})")
    print(f"dear, one rank  {dear_ms:8.3f} ms a step (median of {len(steps_s['dear'])})")
    print("by block        " + " ".join(f"{ratio:.3f}" for ratio in ratios))
    # A shared machine changes its speed between blocks: only neighbours are comparable.
    print(f"median of blocks {median(ratios):.3f}, {median(differences_ms):+.3f} ms")


if __name__ == "__main__":
    main()
