"""What of Lightning is connected to a fit's pipeline, and let go when it ends.

Its precision plug-ins clip and unscale `.grad`, which is not the mean gradient.

From version 2.6 on it broadcasts before every batch whether rank 0 was told to end, on the default
group, and all ranks wait for it. When a batch starts, the link is full of all-gathers, and the
answer queues behind them: the overlap with forward would be lost. So the answer travels with the
flags of the reduce-scatters instead (`Signal`), and is known when the batch starts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.wrappers import _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.collectives.work import Signal
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline


def connect_precision(precision: Precision, pipeline: Pipeline) -> None:
    """Lets `precision` clip and unscale the shards' gradients, until `disconnect_precision`.

    `clip_gradients`, `configure_gradient_clipping` and `gradient_clip_val` all end in the methods
    replaced here.
    """

    def part_of(optimizer: Optimizer) -> OptimizerPipeline:
        return pipeline.of(unwrapped(optimizer))

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        part_of(optimizer).clip_by_norm(float(clip_val))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        part_of(optimizer).clip_by_value(float(clip_val))

    own = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
    vars(precision).update(own)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        unscale = scaler.unscale_
        scaler.unscale_ = lambda optimizer: part_of(optimizer).unscale(unscale)
        tell_loss_scale(scaler, pipeline, pipeline.parts[0].parameters[0].device)


def tell_loss_scale(scaler: Any, pipeline: Pipeline, device: torch.device) -> None:
    """Lets the pipeline, on `device`, ask for what `scaler` multiplies losses by."""
    for part in pipeline.parts:
        part.plans.loss_scale = partial(loss_scale, scaler, device)


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """What a GradScaler multiplies losses by at present, without waiting for a device."""
    # Its `get_scale` waits for the device.
    scaled: Tensor = scaler.scale(torch.ones(1, dtype=torch.float32, device=device))
    return scaled


def disconnect_precision(precision: Precision) -> None:
    """Undoes `connect_precision`."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(precision).pop(name, None)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        vars(scaler).pop("unscale_", None)


def unwrapped(optimizer: Any) -> Optimizer:
    """Torch's optimizer in what a Trainer or Fabric has put around it, or `optimizer` itself."""
    is_wrapped = isinstance(optimizer, (LightningOptimizer, _FabricOptimizer))
    found: Optimizer = optimizer.optimizer if is_wrapped else optimizer
    return found


_QUESTION = "_broadcast_sigterm_tensor"


def answer_sigterm(trainer: Any, signal: Signal) -> None:
    """Lets the trainer's loop take the answer from `signal`; it asks itself where there is none.

    Undone by `ask_sigterm_again`. Does nothing where this Lightning does not ask.
    """
    loop = trainer.fit_loop.epoch_loop
    ask = getattr(loop, _QUESTION, None)
    if ask is None:
        return
    signal.ask = lambda: bool(getattr(trainer, "received_sigterm", False))

    def answer() -> None:
        heard, signal.heard = signal.heard, None
        # All ranks have heard the same; if there was a signal, Lightning does what it does then.
        if heard is not False:
            ask()

    setattr(loop, _QUESTION, answer)


def ask_sigterm_again(trainer: Any) -> None:
    """Undoes `answer_sigterm`."""
    trainer.fit_loop.epoch_loop.__dict__.pop(_QUESTION, None)
