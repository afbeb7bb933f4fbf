"""Loads and drops masters, the fp32 copies of weights, in an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION

MASTER_KEY = "master_weight"
"""Key of an optimizer's state for a parameter: its fp32 master. The optimizer steps the master, and
the parameter gets its rounded values."""


class AdoptedState(NamedTuple):
    """Says whether optimizer state that was taken over had masters.

    Attributes:
        brings_masters: Whether masters were taken over.
        loses_masters: Whether masters were dropped whose values differ from the weights.
    """

    brings_masters: bool
    loses_masters: bool


def undo_casts(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restores the state of 16-bit parameters to the dtypes that `state_dict` has.

    `Optimizer.load_state_dict` casts floating-point state to the dtype of the parameter. Call this
    right after it. Mutates `optimizer.state`.
    """
    saved_groups = (group["params"] for group in state_dict["param_groups"])
    groups = (group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(chain(*saved_groups), chain(*groups), strict=True):
        if parameter.dtype not in LOW_PRECISION:
            continue
        for name, value in state_dict["state"].get(key, {}).items():
            # `step` is left out, since torch does not cast it.
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def differs(master: Tensor | None, parameter: Tensor, *, is_rounded: bool = False) -> bool:
    """Tells whether the values of `parameter` differ from its master. May wait for the device.

    Args:
        master: Loaded master of the parameter. None means no master, and the result is False.
        parameter: The parameter.
        is_rounded: Whether to round the master to the parameter's dtype before it is compared.
    """
    if master is None:
        return False
    dtype = parameter.dtype if is_rounded else master.dtype
    return not torch.allclose(parameter.to(dtype), master.to(dtype), 0, 0, equal_nan=True)


def drop_masters(optimizer: Optimizer) -> bool:
    """Removes all masters from `optimizer.state`, so that training goes on from the weights.

    Returns:
        Whether a removed master differs from its weights.
    """
    # A list, because `any` would stop at the first difference and leave the other masters there.
    return any([differs(own.pop(MASTER_KEY, None), one) for one, own in optimizer.state.items()])
