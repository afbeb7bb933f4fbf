"""Times forward and backward of a job's model on this rank."""

import time
from statistics import median
from typing import NamedTuple

import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig
from typing_extensions import override

from lightning_dear.apps.bench.build import build_model, build_trainer
from lightning_dear.local_steps import num_modules
from lightning_dear.studies.block import BlockLength, StepProbe, quiet_lightning
from lightning_dear.telemetry.statistics import median_and_error

NUM_WARM_UP = 3
NUM_STEPS = 8
BUDGET_S = 20.0
"""Seconds after which no further step begins: eight steps of a large model would take too long."""


class Compute(NamedTuple):
    """Time and bytes of one batch on one rank.

    Attributes:
        gradient_bytes: Bytes of the gradients of all trainable parameters.
        forward_s: Median time of `training_step`.
        backward_s: Median time of backward.
        num_steps: Number of steps over which the medians are taken.
        error_s: By how much `total_s` may be wrong, see `median_and_error`.
        numel: Number of elements of the gradients.
        num_modules: Number of modules that own trainable parameters.
    """

    gradient_bytes: int
    forward_s: float
    backward_s: float
    num_steps: int
    error_s: float = 0.0
    numel: int = 0
    num_modules: int = 1

    @property
    def total_s(self) -> float:
        """Forward and backward together, in seconds."""
        return self.forward_s + self.backward_s


class _StepTimer(StepProbe):
    """Synchronizes with the device before it reads the clock; stops the fit after `BUDGET_S`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(BlockLength(NUM_WARM_UP, NUM_STEPS), on_step=self._stop_in_time)
        self.trainer: Trainer | None = None
        self._device = device
        self._end_s = time.perf_counter() + BUDGET_S

    def _stop_in_time(self) -> None:
        if self.trainer is not None and len(self.begins_s) >= NUM_WARM_UP:
            self.trainer.should_stop = time.perf_counter() > self._end_s

    @override
    def start(self, action_name: str) -> None:
        self._synchronize()
        super().start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self._synchronize()
        super().stop(action_name)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_compute(cfg: DictConfig, device: torch.device) -> Compute:
    """Fit a copy of the configured model for a few batches on this rank alone. Local. Blocks.

    Args:
        cfg: Config of the job.
        device: Device of this rank.

    Raises:
        ValueError: If the data has too few batches.
    """
    model, timer = build_model(cfg), _StepTimer(device)
    with quiet_lightning():
        trainer = timer.trainer = build_trainer(
            cfg,
            SingleDeviceStrategy(device=device),
            profiler=timer,
            devices=1 if device.index is None else [device.index],
            num_nodes=1,
            max_steps=NUM_WARM_UP + NUM_STEPS,
            accumulate_grad_batches=1,
        )
        trainer.fit(model, datamodule=instantiate(cfg.data, _convert_="all"))
    forward_s, backward_s = timer.forward_s[NUM_WARM_UP:], timer.backward_s[NUM_WARM_UP:]
    if not backward_s:
        raise ValueError(
            f"The training data ended after {len(timer.backward_s)} batches on this rank, too"
            f" few to time. Give at least {NUM_WARM_UP + 1}: more data, or a smaller batch size."
        )
    trained = [one for one in model.parameters() if one.requires_grad]
    _, error_s = median_and_error([*map(sum, zip(forward_s, backward_s, strict=False))])
    times = median(forward_s), median(backward_s), len(backward_s), error_s
    sizes = sum(one.numel() for one in trained), num_modules(model, trained)
    return Compute(sum(one.nbytes for one in trained), *times, *sizes)
