"""Which optimizers may step on a part of a tensor: those whose update is element-wise."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
_WHOLE_TENSOR = frozenset(
    {
        "adafactor",
        "distributedshampoo",
        "galoreadamw",
        "lamb",
        "lars",
        "lbfgs",
        "muon",
        "novograd",
        "prodigy",
        "shampoo",
        "soap",
        "sparseadam",
    }
)
_NUM_ROWS, _NUM_COLUMNS, _NUM_STEPS = 8, 32, 3
_SOME_LR = 1e-2


def inner_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's own `step`, without the hooks and profiling that torch wraps around it."""
    step: Any = type(optimizer).step
    inner: Callable[[Optimizer], Any] = step.__wrapped__ if hasattr(step, "hooked") else step
    return inner


def closure_skipped(optimizer: Optimizer) -> RuntimeError:
    """What is raised after a step that has updated parameters before there were gradients."""
    return RuntimeError(
        f"{type(optimizer).__name__}.step() did not call its closure, so strategy='dear'"
        " could not reduce the gradients; call the closure before the update."
    )


def warn_of_zeros(optimizer: Optimizer) -> None:
    """Warns, once, that gradients are cleared and not zeroed."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad(set_to_none=False) does what set_to_none=True does"
        " under strategy='dear': a parameter that the next step does not use is left alone, while"
        " momentum and weight decay would go on with zeros. Leave set_to_none out.",
        stacklevel=3,
    )


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuses an optimizer that would give another result on parts of tensors.

    torch's own element-wise optimizers are known by class; anything else is probed: a matrix
    stepped whole and in two parts, three steps, must end in the same bits, with the options of each
    parameter group.

    Raises:
        ValueError: Naming the optimizer and what to use.
    """
    if type(optimizer) in ELEMENTWISE:
        return
    name = type(optimizer).__name__
    if name.lower() in _WHOLE_TENSOR:
        raise ValueError(_refusal(name, "it works on whole tensors, not element by element"))
    try:
        agrees = all(_steps_alike_on_parts(optimizer, group) for group in used_groups(optimizer))
    except Exception as error:
        raise ValueError(
            _refusal(name, f"stepping it on a small matrix failed: {error}")
        ) from error
    if not agrees:
        raise ValueError(_refusal(name, "a matrix stepped in two parts differs from it whole"))


def _refusal(name: str, why: str) -> str:
    known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
    return (
        f"strategy='dear' cannot shard {name}: {why}. Use gather='gradients', which steps whole"
        f" tensors on every rank; an element-wise optimizer ({known}, or one that passes the same"
        " test); or strategy='ddp'."
    )


def used_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups that have parameters."""
    return [group for group in optimizer.param_groups if group["params"]]


def _steps_alike_on_parts(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_ROWS, _NUM_COLUMNS)
    draw = partial(torch.randn, dtype=torch.float32, generator=generator)
    start = draw(_NUM_ROWS * _NUM_COLUMNS)
    gradients = draw(_NUM_STEPS, start.numel())
    whole, parts = start.clone().view(shape), start.clone().chunk(2)
    _step(optimizer, group, [whole], [[gradient.view(shape)] for gradient in gradients])
    _step(optimizer, group, parts, [gradient.chunk(2) for gradient in gradients])
    agrees = torch.equal(whole.flatten(), torch.cat(parts))
    # Of an optimizer that changed nothing, equal bits say nothing.
    return agrees and not torch.equal(whole.flatten(), start)


@torch.no_grad()
def _step(
    optimizer: Optimizer,
    group: dict[str, Any],
    tensors: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> None:
    """Steps a twin of `optimizer` on one tensor after the other, as the engine steps buckets."""
    twin = twin_of(optimizer, group, tensors)
    step = inner_step(twin)
    for of_tensors in gradients:
        for tensor, gradient in zip(tensors, of_tensors, strict=True):
            # Optimizers may change gradients in place, and the other run needs these too.
            tensor.grad = gradient.clone()
            twin.param_groups[0]["params"] = [tensor]
            step(twin)


def twin_of(optimizer: Optimizer, group: dict[str, Any], tensors: Sequence[Tensor]) -> Optimizer:
    """The optimizer with one of its groups' options, over `tensors`, stepped never."""
    # Not by its constructor, of whose arguments nothing is known here.
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    options = {**group, "params": list(tensors)}
    if "lr" in group and not group["lr"]:
        # A warm-up may begin at 0, where nothing would be seen.
        options["lr"] = group.get("initial_lr") or _SOME_LR
    twin.__dict__.update(state=defaultdict(dict), param_groups=[options])
    for tensor in tensors:
        twin.state[tensor].update(_initial_state(optimizer, group, tensor))
    return twin  # type: ignore[no-any-return]


def _initial_state(optimizer: Optimizer, group: dict[str, Any], tensor: Tensor) -> dict[str, Any]:
    """The constructor's state of the group's first parameter, in `tensor`'s size."""
    first = group["params"][0]
    return {
        key: torch.full_like(tensor, float(value.flatten()[0]))
        if isinstance(value, Tensor) and value.shape == first.shape
        else deepcopy(value)
        for key, value in optimizer.state.get(first, {}).items()
    }
