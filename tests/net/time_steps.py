"""One rank of a short training of `time_trees`; rank 0 prints its steady steps as JSON.

Run by path, with `PYTHONPATH` set to the tree that is to be timed, and torchrun's variables.
This file's folder is then the first on `sys.path`: `finding` is found there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from finding import find
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = {"one": (60, 400), "digits": (8, 40), "bert": (6, 30), "bert-2x2": (6, 30)}
"""Case -> steps to warm up, and steps that count."""

BERT_SCALE, BERT_STEP_S = 64.0, 0.06


class _Clock(Callback):
    """Notes when every batch ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends_s.append(time.perf_counter())


class _Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _workload(case: str, num_steps: int) -> tuple[LightningModule, Any]:
    """The module and its data."""
    if case == "one":
        inputs = torch.randn(8 * num_steps, 16)
        targets = torch.randint(4, (8 * num_steps,))
        return _Small(), DataLoader(TensorDataset(inputs, targets), batch_size=8)
    if case == "digits":
        net = find("resnet", "ResNet")(
            in_channels=1, num_classes=10, channels=[32, 64, 128], num_blocks=2
        )
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-3)
        module = find("classifier", "Classifier")(net=net, optimizer=sgd)
        return module, find("digits", "DigitsDataModule")()
    module = find("replay", "ReplayModel")("bert_base", scale=BERT_SCALE, compute_s=BERT_STEP_S)
    return module, find("replay", "ReplayData")(num_steps=num_steps)


def steps_s(case: str) -> list[float]:
    """Trains on this rank; seconds of the steps that count."""
    from lightning_dear import DearStrategy

    num_warm_up, num_counted = NUM_STEPS[case]
    seed_everything(1, verbose=False)
    module, data = _workload(case, num_warm_up + num_counted + 1)
    world_size = int(os.environ["WORLD_SIZE"])
    clock = _Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DearStrategy(),
        plugins=[TorchElasticEnvironment() if world_size > 1 else LightningEnvironment()],
        max_steps=num_warm_up + num_counted + 1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    pairs = zip(clock.ends_s, clock.ends_s[1:], strict=False)
    return [after - before for before, after in pairs][num_warm_up:]


def _on_hosts(case: str) -> AbstractContextManager[object]:
    """A context in which two ranks share a host, if the case says so."""
    if case != "bert-2x2":
        return nullcontext()
    host = f"host {int(os.environ['RANK']) // 2}", ""
    return mock.patch("lightning_dear.collectives.factory._host", return_value=host)


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=tuple(NUM_STEPS), required=True)
    parser.add_argument("--tree", type=Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for namespace in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{namespace}").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    import lightning_dear

    assert Path(lightning_dear.__file__).is_relative_to(options.tree), lightning_dear.__file__
    with _on_hosts(options.case):
        taken_s = steps_s(options.case)
    if os.environ["RANK"] == "0":
        print(json.dumps(taken_s), flush=True)


if __name__ == "__main__":
    main()
