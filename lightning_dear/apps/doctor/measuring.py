"""Times forward and backward of a job's model on this rank."""

import time
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer, strategies
from omegaconf import DictConfig
from typing_extensions import override

from lightning_dear.apps.bench.build import build_model, build_trainer
from lightning_dear.doctor.step_watch import StepTimes, StepWatch
from lightning_dear.local_steps import num_modules
from lightning_dear.planning import TensorSpec
from lightning_dear.studies.block import quiet_lightning

NUM_WARM_UP = 3
NUM_STEPS = 8
BUDGET_S = 20.0
"""Seconds after which no further step begins: eight steps of a large model would take too long."""


class Compute(NamedTuple):
    """A model as this rank computes it.

    Attributes:
        times: Medians of a step.
        tensors: Trained parameters.
        num_modules: Number of modules that own trainable parameters.
    """

    times: StepTimes
    tensors: list[TensorSpec]
    num_modules: int = 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trainable parameters."""
        return sum(one.nbytes for one in self.tensors)


class _Timing(Callback):
    """Watches the steps after the first ones, and stops the fit after `BUDGET_S`."""

    def __init__(self) -> None:
        self.watch: StepWatch | None = None
        self._num_seen = 0
        self._end_s = time.perf_counter() + BUDGET_S

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self._num_seen += 1
        if self._num_seen == NUM_WARM_UP:
            self.watch = StepWatch(pl_module, pl_module, trainer.optimizers[0])
        if self.watch is not None:
            self.watch.backward_begins()
            trainer.should_stop = time.perf_counter() > self._end_s


def measure_compute(cfg: DictConfig, device: torch.device) -> Compute:
    """Fit a copy of the configured model for a few batches on this rank alone. Local. Blocks.

    Args:
        cfg: Config of the job.
        device: Device of this rank.

    Raises:
        ValueError: If the data has too few batches.
    """
    model, timing = build_model(cfg), _Timing()
    with quiet_lightning():
        trainer = build_trainer(
            cfg,
            strategies.SingleDeviceStrategy(device=device),
            callbacks=[timing],
            devices=1 if device.index is None else [device.index],
            num_nodes=1,
            max_steps=NUM_WARM_UP + NUM_STEPS,
            accumulate_grad_batches=1,
        )
        trainer.fit(model, datamodule=instantiate(cfg.data, _convert_="all"))
    times = None if timing.watch is None else timing.watch.end()
    if timing.watch is None or times is None:
        raise ValueError(
            f"The training data ended after {trainer.global_step} batches on this rank, too few to"
            f" time. Give at least {NUM_WARM_UP + 2}: more data, or a smaller batch size."
        )
    tensors = timing.watch.tensors(times.times)
    return Compute(times, tensors, num_modules(model, timing.watch.trained))
