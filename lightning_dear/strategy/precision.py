"""Lightning's precision plug-ins on sharded gradients: clipping, and the loss scale."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.engine.pipeline import Pipeline

_CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")


def connect_precision(precision: Precision, pipeline: Pipeline) -> None:
    """Lets `precision` clip and unscale the shards' gradients, until `disconnect_precision`.

    The plug-in's own methods look at `.grad`, which is not the mean gradient. `clip_gradients`,
    `configure_gradient_clipping` and `gradient_clip_val` all end in the methods replaced here.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        pipeline.of(unwrapped(optimizer)).clip_by_norm(float(clip_val))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        pipeline.of(unwrapped(optimizer)).clip_by_value(float(clip_val))

    for name, clip in zip(_CLIPPING, (clip_grad_by_norm, clip_grad_by_value), strict=True):
        setattr(precision, name, clip)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler.unscale_ = partial(_unscale, pipeline, scaler.unscale_)
        for part in pipeline.parts:
            part.plans.loss_scale = partial(loss_scale, scaler, part.parameters[0].device)


def _unscale(pipeline: Pipeline, unscale: Any, optimizer: Optimizer) -> None:
    pipeline.of(unwrapped(optimizer)).unscale(unscale)


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """What a GradScaler multiplies losses by at present, without waiting for a device."""
    # Its `get_scale` waits for the device.
    scaled: Tensor = scaler.scale(torch.ones(1, dtype=torch.float32, device=device))
    return scaled


def disconnect_precision(precision: Precision) -> None:
    """Undoes `connect_precision`."""
    for name in _CLIPPING:
        precision.__dict__.pop(name, None)
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        scaler.__dict__.pop("unscale_", None)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Torch's optimizer in a `LightningOptimizer`, or `optimizer` itself."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
