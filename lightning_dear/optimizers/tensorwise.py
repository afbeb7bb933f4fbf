"""Which optimizers may step one tensor after the other: those that treat each on its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION
from lightning_dear.compression import PowerSGD, SparseAllReduce
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.optimizers.elementwise import (
    ELEMENTWISE,
    check_elementwise,
    inner_step,
    twin_of,
    used_groups,
)
from lightning_dear.optimizers.replicated import DeferredStep

_KNOWN = ELEMENTWISE | {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}
_SHAPES = ((8, 32), (24, 8))
_NUM_STEPS = 3


def check_tensorwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that would give another result if tensors are stepped one by one.

    torch's own are known by class; anything else is probed: two matrices stepped together and one
    by one, three steps, must end in the same bits, with the options of each parameter group.

    Raises:
        ValueError: Naming the optimizer and what to use.
    """
    if type(optimizer) in _KNOWN:
        return
    try:
        agrees = all(_steps_alike_one_by_one(optimizer, group) for group in used_groups(optimizer))
    except Exception as error:
        raise ValueError(
            _refusal(
                optimizer,
                f"stepping it on small matrices failed ({error}); note that a step must"
                " skip parameters whose .grad is None",
            )
        ) from error
    if not agrees:
        raise ValueError(_refusal(optimizer, "two matrices stepped one by one differ from both"))


def check_steppable(optimizer: Optimizer, options: ExchangeOptions) -> None:
    """Refuses an optimizer that cannot be stepped as `options` steps it.

    Raises:
        ValueError: Naming the optimizer and what to use.
    """
    if not options.is_of_gradients:
        check_elementwise(optimizer)
        return
    check_tensorwise(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if narrow := {str(p.dtype) for p in parameters if p.dtype in LOW_PRECISION}:
        raise ValueError(
            f"gather='gradients' steps parameters as they are, and an update is often below the"
            f" resolution of {', '.join(sorted(narrow))}; use {_with_masters(options)}a mixed"
            " precision."
        )


def _with_masters(options: ExchangeOptions) -> str:
    """How fp32 masters can be stepped with what else is set; nothing where they cannot."""
    codec = options.codec
    whole = PowerSGD, SparseAllReduce
    if isinstance(codec, whole) or getattr(codec, "clip_norm", None) is not None:
        return ""
    way = "gather='parameters'"
    if not options.decouple:
        way += " without decouple=False"
    if codec is not None and default_gather(codec, options.groups) == "gradients":
        way += f" and halves='reduce' in {codec.name}"
    return f"{way}, which steps fp32 masters of 16-bit parameters, or "


def _refusal(optimizer: Optimizer, why: str) -> str:
    known = ", ".join(sorted(kind.__name__ for kind in _KNOWN))
    return (
        "strategy='dear' with gather='gradients' steps each tensor when its gradient has arrived,"
        f" and {type(optimizer).__name__} does not allow that: {why}. Use an optimizer that treats"
        f" every tensor on its own ({known}, or one that passes the same test), or strategy='ddp'."
    )


def _steps_alike_one_by_one(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float32, generator=generator)
    start = [draw(shape) for shape in _SHAPES]
    together, apart = ([tensor.clone() for tensor in start] for _ in range(2))
    twins = [twin_of(optimizer, group, tensors) for tensors in (together, apart)]
    for _ in range(_NUM_STEPS):
        gradients = [draw(shape) for shape in _SHAPES]
        _give(together, gradients)
        _step(twins[0])
        _step_apart(twins[1], apart, gradients)
    agrees = all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    return agrees and not any(torch.equal(a, b) for a, b in zip(together, start, strict=True))


@torch.no_grad()
def _step(twin: Optimizer) -> None:
    inner_step(twin)(twin)


def _step_apart(twin: Optimizer, tensors: list[Tensor], gradients: list[Tensor]) -> None:
    """As the engine does: a step that finds no gradient, and the rest of it tensor by tensor."""
    deferred = DeferredStep(twin)
    _give(tensors, [None] * len(tensors))
    _step(twin)
    _give(tensors, gradients)
    with torch.no_grad():
        for tensor in tensors:
            deferred.run({0: [tensor]})


def _give(tensors: list[Tensor], gradients: Any) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = None if gradient is None else gradient.clone()
