"""Loads and drops masters in an optimizer's state.

A master is the copy of a weight that the optimizer steps: in fp32 for a 16-bit parameter, and also
for parameters whose differences a compressor encodes.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, optim

from lightning_dear.bucket import LOW_PRECISION

MASTER_KEY = "master_weight"
"""Key of an optimizer's state for a parameter: its master. The optimizer steps the master. A 16-bit
parameter gets the rounded values. A parameter whose differences are encoded lags behind it."""


T = TypeVar("T")


class AdoptedState(NamedTuple):
    """Says whether optimizer state that was taken over had masters. Ranks may differ.

    Attributes:
        brings_masters: Whether a piece of this rank took over its master.
        loses_masters: Whether masters were dropped whose values differ from the weights. From
            `hand_on`, which compares no values: whether any masters were dropped.
    """

    brings_masters: bool
    loses_masters: bool


def undo_casts(optimizer: optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restores the state of 16-bit parameters to the dtypes that `state_dict` has.

    `Optimizer.load_state_dict` casts floating-point state to the dtype of the parameter. Call this
    right after it. Mutates `optimizer.state`. State of other parameters is left as it is.

    Args:
        optimizer: Optimizer into which `state_dict` was loaded.
        state_dict: The argument of that `load_state_dict`.
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
        is_rounded: Whether to round the master to the parameter's dtype before it is compared. If
            not, any value that rounding would change counts as different.
    """
    if master is None:
        return False
    dtype = parameter.dtype if is_rounded else master.dtype
    return not torch.allclose(parameter.to(dtype), master.to(dtype), 0, 0, equal_nan=True)


def without_masters(state: Mapping[T, Mapping[str, Any]]) -> dict[T, dict[str, Any]]:
    """Returns the state of parameters without masters. Parameters without other state are left out.

    Args:
        state: A parameter's index or name -> its state. Not mutated.
    """
    kept = (
        (one, {key: value for key, value in own.items() if key != MASTER_KEY})
        for one, own in state.items()
    )
    return {one: own for one, own in kept if own}


def drop_masters(optimizer: optim.Optimizer) -> bool:
    """Removes all masters from `optimizer.state`, so that training goes on from the weights. Local.

    Returns:
        Whether a removed master differs from its weights. False also if there was none.
    """
    # A list, because `any` would stop at the first difference and leave the other masters there.
    return any([differs(own.pop(MASTER_KEY, None), one) for one, own in optimizer.state.items()])
