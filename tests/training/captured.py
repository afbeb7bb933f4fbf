"""A stand-in for a CUDA graph that takes the place of a module's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Replay(torch.autograd.Function):
    """Computes with the memory that parameters had when they were captured. Runs no hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, twin: nn.Module, *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.twin, ctx.x = twin, x.detach().requires_grad_()
            ctx.y = twin(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [ctx.x, *ctx.twin.parameters()]
        own, *others = torch.autograd.grad(ctx.y, inputs, gradients)
        return own, None, *others


def capture(module: nn.Module, twin: nn.Module) -> None:
    """Replaces the module's forward, as `torch.cuda.make_graphed_callables` does.

    Args:
        module: The module.
        twin: Another module of the same kind. It gets the memory of the module's parameters.
    """
    parameters = list(module.parameters())
    for own, parameter in zip(twin.parameters(), parameters, strict=True):
        own.data = parameter.data
    module.forward = lambda x: _Replay.apply(x, twin, *parameters)
