"""Callbacks, and Fabric's loops, that train on trial and put back what they began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor

from tests.distributed.harness import distributed
from tests.fabric.running import dear as fabric_dear
from tests.fabric.running import new_fabric
from tests.lightning.fitting import WeightRecorder, assert_same, dear, fit
from tests.lightning.nets import Net, copies
from tests.training.models import batch, build, loss_of, optimizer_for

NUM_STEPS = 3


class _Rated(Net):
    """Has the learning rate that the finder sets, and batches by step in the weights' precision."""

    def __init__(self, lr: float) -> None:
        super().__init__("mlp", "adamw")
        self.lr = lr

    def training_step(self, _: Any, batch_idx: int) -> Any:
        data, targets = batch("mlp", self.trainer.global_step, self.trainer.global_rank)
        return self.loss([data.to(next(self.parameters()).dtype), targets])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return optimizer


def _fit(
    net: _Rated, folder: Path, *callbacks: Any, precision: Any, compressor: str
) -> tuple[list[list[Tensor]], float]:
    """Weights after every step, and the learning rate of the last."""
    recorder = WeightRecorder()
    options = {"max_steps": NUM_STEPS, "num_samples": 96, "default_root_dir": folder}
    strategy = dear(compressor=compressor)
    trainer = fit(strategy, net, recorder, *callbacks, precision=precision, **options)
    assert len(recorder.seen) == NUM_STEPS
    return recorder.seen, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize(("compressor", "precision"), [("int4", "32-true"), ("none", "bf16-true")])
@distributed(world_sizes=(2,))
def test_a_search_for_a_learning_rate_leaves_nothing_behind(
    tmp_path: Path, compressor: str, precision: Any
) -> None:
    finder = LearningRateFinder(max_lr=0.1, num_training_steps=16, early_stop_threshold=None)
    options = {"compressor": compressor, "precision": precision}
    found, lr = _fit(_Rated(1e-3), tmp_path, finder, **options)
    assert lr != 1e-3
    fresh, _ = _fit(_Rated(lr), tmp_path, **options)
    assert_same(found, fresh, "weights")


@pytest.mark.parametrize("names", [("model", "optimizer"), ("optimizer", "model")])
@distributed(world_sizes=(2,))
def test_fabric_goes_on_from_what_it_loads(tmp_path: Path, names: tuple[str, str]) -> None:
    fabric = new_fabric(fabric_dear(compressor="int4"))
    raw = build("mlp")
    model, optimizer = fabric.setup(raw, optimizer_for("adamw", raw))
    both = {"model": model, "optimizer": optimizer}
    state = {name: both[name] for name in names}
    fabric.save(tmp_path / "before", state)

    def train() -> list[list[Tensor]]:
        seen = []
        for step in range(NUM_STEPS):
            fabric.backward(loss_of(model, *batch("mlp", step, fabric.global_rank)))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(copies(raw))
        return seen

    first = train()
    fabric.load(tmp_path / "before", state)
    assert_same(train(), first, "weights")
    assert not torch.equal(first[0][0], first[-1][0])
