"""A checkpoint of ours, of DDP or of one device goes on under any of them, at any world size.

The global batch is the same at every world size: `GLOBAL_BATCH` samples are made from the step's
number, and rank r of P takes samples r, r + P, r + 2P, ... of them. So runs at different world
sizes differ only in the order of summation, and can be compared with one that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.harness import run_ranks
from tests.lightning.fitting import (
    WeightRecorder,
    assert_differ,
    assert_ranks_agree,
    assert_same,
    ddp,
    dear,
    new_trainer,
    poison_until_waited,
)
from tests.lightning.nets import Net
from tests.training.models import distance, optimizer_for

GLOBAL_BATCH = 12
NUM_BATCHES, NUM_EPOCHS = 4, 2
SAVED_AT = {"in mid-epoch": 3, "between epochs": 4}
OTHER_ORDER = 1e-5
"""Relative distance allowed where the world size, and so the order of summation, differs."""
OTHER_ORDER_16_BIT = 2e-2
KINDS = ("plain", "two optimizers", "16-bit weights", "GradScaler")

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "dear": dear,
    "ddp": ddp,
    "single": lambda: SingleDeviceStrategy(device="cpu"),
}


@dataclass(frozen=True)
class Run:
    """Who trains: a strategy on a number of ranks."""

    strategy: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.strategy}({self.world_size})"


DEAR = [Run("dear", world_size) for world_size in (1, 2, 3)]
DDP, SINGLE = Run("ddp", 2), Run("single", 1)
PAIRS = [
    *((saver, resumer) for saver in DEAR for resumer in (*DEAR, DDP, SINGLE)),
    *((saver, resumer) for saver in (DDP, SINGLE) for resumer in DEAR),
]


class _GlobalBatchNet(Net):
    """Takes its part of the step's global batch; its learning rate falls with every step."""

    def training_step(self, _: Any, batch_idx: int) -> Any:
        return self.loss(self.part_of(self.trainer.global_step))

    def part_of(self, step: int) -> list[Tensor]:
        """This rank's samples of the global batch of `step`."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(GLOBAL_BATCH, 7, generator=generator)
        targets = torch.randint(3, (GLOBAL_BATCH,), generator=generator)
        part = slice(self.trainer.global_rank, None, self.trainer.world_size)
        return [inputs[part].to(self.dtype), targets[part]]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _TwoOptimizersNet(_GlobalBatchNet):
    """Matrices under one optimizer, vectors under another; each step counts as one."""

    automatic_optimization = False

    def training_step(self, _: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(self.part_of(self.trainer.global_step // 2)))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        parts = [[p for p in self.parameters() if (p.dim() > 1) == is_first] for is_first in (1, 0)]
        return [optimizer_for(self.optimizer_name, nn.ParameterList(part)) for part in parts]


def _options(kind: str) -> dict[str, Any]:
    if kind == "GradScaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return {"precision": "bf16-true"} if kind == "16-bit weights" else {}


def _train(
    run: Run, optimizer: str, folder: Path | None, ckpt_path: Path | None, kind: str
) -> list[list[Tensor]]:
    """Trains to the end; returns the weights in every step from its start on."""
    recorder = WeightRecorder()
    net = (_TwoOptimizersNet if kind == "two optimizers" else _GlobalBatchNet)("mlp", optimizer)
    is_single = run.strategy == "single"
    environment = LightningEnvironment() if is_single else TorchElasticEnvironment()
    callbacks: list[Any] = [recorder]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1))
    options = _options(kind)
    trainer = new_trainer(
        STRATEGIES[run.strategy](),
        *callbacks,
        plugins=[environment, *options.pop("plugins", [])],
        max_epochs=NUM_EPOCHS,
        use_distributed_sampler=False,
        enable_checkpointing=folder is not None,
        **options,
    )
    # Every rank counts the same batches; what is in them comes from the step.
    loader = DataLoader(TensorDataset(torch.zeros(NUM_BATCHES)), batch_size=1)
    with poison_until_waited():
        trainer.fit(net, loader, ckpt_path=ckpt_path)
    assert_ranks_agree(recorder.seen)
    return recorder.seen


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Path], Any]]:
    """(run, optimizer, kind) -> a checkpoint and the weights of every step; made once."""

    @cache
    def saved(run: Run, optimizer: str, kind: str) -> tuple[list[Path], Any]:
        folder = tmp_path_factory.mktemp("saved")
        seen = run_ranks(_train, run.world_size, run, optimizer, folder, None, kind)[0]
        files = sorted(folder.iterdir(), key=lambda file: int(file.stem.removeprefix("step=")))
        assert len(files) == len(seen) == NUM_BATCHES * NUM_EPOCHS
        return files, seen

    return saved


def _check(
    save: Any, saver: Run, resumer: Run, optimizer: str, step: int, kind: str, limit: float
) -> None:
    files, uninterrupted = save(saver, optimizer, kind)
    arguments = (resumer, optimizer, None, files[step - 1], kind)
    resumed = run_ranks(_train, resumer.world_size, *arguments)[0]
    expected = uninterrupted[step:]
    assert len(resumed) == len(expected)
    if saver.world_size == resumer.world_size:
        assert_same(resumed, expected, "weights")
    else:
        for left, right in zip(resumed, expected, strict=True):
            assert distance(left, right) < limit
    assert_differ(resumed[-1], resumed[0])


@pytest.mark.parametrize("when", SAVED_AT)
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
@pytest.mark.parametrize(("saver", "resumer"), PAIRS, ids=str)
def test_resuming_equals_never_stopping(
    save: Any, saver: Run, resumer: Run, optimizer: str, when: str
) -> None:
    """By the bit at an equal world size."""
    _check(save, saver, resumer, optimizer, SAVED_AT[when], "plain", OTHER_ORDER)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
@pytest.mark.parametrize("resumer", [*DEAR, DDP], ids=str)
def test_resuming_two_optimizers(save: Any, resumer: Run, optimizer: str) -> None:
    _check(save, DEAR[1], resumer, optimizer, 3, "two optimizers", OTHER_ORDER)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
@pytest.mark.parametrize("kind", ["16-bit weights", "GradScaler"])
@pytest.mark.parametrize("resumer", DEAR, ids=str)
def test_resuming_in_16_bits(save: Any, resumer: Run, kind: str, optimizer: str) -> None:
    """The float32 copies of the weights, and the scale, are in the checkpoint."""
    _check(save, DEAR[1], resumer, optimizer, 3, kind, OTHER_ORDER_16_BIT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saver", DEAR, ids=str)
def test_every_checkpoint_loads_with_weights_only(save: Any, saver: Run, kind: str) -> None:
    files, uninterrupted = save(saver, "adamw", kind)
    for file, weights in zip(files, uninterrupted, strict=True):
        state = torch.load(file, weights_only=True)["state_dict"]
        assert_same([state.values()], [weights], f"weights in {file.name}")
