"""Times forward and backward of the configured model on one rank, without communication."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig
from typing_extensions import override

NUM_WARM_UP = 2
NUM_STEPS = 8
BUDGET_S = 20.0
"""Seconds after which no further step is begun: a large model is not worth eight."""


@dataclass(frozen=True)
class Compute:
    """What one batch costs a rank.

    Attributes:
        gradient_bytes: Bytes of the gradients of all trainable parameters.
        forward_s: Median time of `training_step`.
        backward_s: Median time of backward.
        num_steps: Steps that the medians are of.
    """

    gradient_bytes: int
    forward_s: float
    backward_s: float
    num_steps: int

    @property
    def total_s(self) -> float:
        """Forward and backward together, in seconds."""
        return self.forward_s + self.backward_s


class _StepTimer(Callback):
    """Clocks the phases of every batch; stops the fit when the budget is spent."""

    def __init__(self) -> None:
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self._begin_s = time.perf_counter()
        self._mark_s = 0.0

    def _lap(self, trainer: Trainer) -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before_s, self._mark_s = self._mark_s, time.perf_counter()
        return self._mark_s - before_s

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._lap(trainer)

    @override
    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self.forward_s.append(self._lap(trainer))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.backward_s.append(self._lap(trainer))

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        is_enough = len(self.backward_s) > NUM_WARM_UP
        if is_enough and time.perf_counter() - self._begin_s > BUDGET_S:
            trainer.should_stop = True

    def compute(self, gradient_bytes: int) -> Compute:
        """Medians over all steps but the warm-up."""
        forward_s, backward_s = self.forward_s[NUM_WARM_UP:], self.backward_s[NUM_WARM_UP:]
        if not backward_s:
            raise ValueError(
                f"The training data ended after {len(self.backward_s)} batches on this rank: too"
                f" few to time. The doctor needs {NUM_WARM_UP + 1}."
            )
        return Compute(gradient_bytes, median(forward_s), median(backward_s), len(backward_s))


def measure_compute(cfg: DictConfig, device: torch.device) -> Compute:
    """Fit a copy of the configured model for a few batches on this rank alone, and forget it.

    Args:
        cfg: The job.
        device: Where this rank trains.

    Raises:
        ValueError: If the data has too few batches.
    """
    timer = _StepTimer()
    datamodule = instantiate(cfg.data, _convert_="all")
    model = instantiate(cfg.model, _convert_="all")
    with _quiet():
        trainer: Trainer = instantiate(
            cfg.trainer,
            **_LOCAL,
            strategy=SingleDeviceStrategy(device=device),
            devices=1 if device.index is None else [device.index],
            callbacks=[timer],
            _convert_="all",
        )
        trainer.fit(model, datamodule=datamodule)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return timer.compute(sum(p.numel() * p.element_size() for p in trained))


_LOCAL: dict[str, Any] = {
    "num_nodes": 1,
    "logger": False,
    "max_epochs": -1,
    "max_steps": NUM_WARM_UP + NUM_STEPS,
    "limit_val_batches": 0,
    "val_check_interval": 1.0,
    "accumulate_grad_batches": 1,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
}
"""Of the Trainer that measures; all else is the job's own."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's remarks are about a fit that nobody asked for."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
