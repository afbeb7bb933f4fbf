"""One training, from fresh weights to the test, in processes that go on to the next."""

from __future__ import annotations

import hashlib
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_dear.benchmarking.block import quiet_lightning
from lightning_dear.benchmarking.competitors import forget_mesh
from lightning_dear.exchange.compressed import GradientsNotFinite

_EXPECTED_WARNINGS = (
    ".*does not have many workers.*",
    "Using `DistributedSampler` with the dataloaders.*",
)
"""What Lightning says of every test and fit here, beside what it says in `dear-bench`."""


@dataclass(frozen=True)
class Ending:
    """What came of a training on this rank.

    Attributes:
        losses: Of every step made, this rank's.
        metrics: Of the test, over all ranks; None where gradients could not be encoded any more.
        batches: Digest of this rank's training batches, in order.
        train_s: Seconds of the fit.
    """

    losses: Tensor
    metrics: Mapping[str, float] | None
    batches: str
    train_s: float


class Recorder(Callback):
    """Notes the loss of every step and what was trained on.

    Args:
        on_step: Called after every step.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._losses: list[Tensor] = []
        self._checksum = 0

    @property
    def losses(self) -> Tensor:
        """[steps] fp64, on the CPU."""
        return torch.tensor([float(loss) for loss in self._losses], dtype=torch.float64)

    @property
    def batches(self) -> str:
        """Digest of all batches so far."""
        return f"{self._checksum:08x}"

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                self._checksum = zlib.crc32(_bytes_of(leaf), self._checksum)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        self._on_step()


def run_training(
    new_trainer: Callable[[list[Callback]], Trainer],
    module: LightningModule,
    datamodule: LightningDataModule,
    on_step: Callable[[], None] = lambda: None,
) -> Ending:
    """Fit and test `module`. Collective, blocks.

    Args:
        new_trainer: Makes the trainer, with these callbacks; it saves, logs and validates nothing.
        module: Mutated: trained.
        datamodule: May have been used before.
        on_step: Called after every step.
    """
    recorder = Recorder(on_step)
    metrics = None
    with _quiet():
        trainer = new_trainer([recorder])
        began_s = time.perf_counter()
        try:
            trainer.fit(module, datamodule=datamodule)
            train_s = time.perf_counter() - began_s
            (metrics,) = trainer.test(module, datamodule=datamodule, verbose=False)
        except GradientsNotFinite:
            train_s = time.perf_counter() - began_s
    forget_mesh(trainer.strategy)
    return Ending(recorder.losses, metrics, recorder.batches, train_s)


def digest_of(module: LightningModule) -> str:
    """Return a digest of all parameters and buffers, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()[:12]


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet_lightning():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield
