"""The masters of weights that follow them, in an optimizer's state: loaded, and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION

MASTER_KEY = "master_weight"
"""Of an optimizer's state: the fp32 numbers that are stepped, where weights follow them."""


class AdoptedState(NamedTuple):
    """What was found in `optimizer.state` and taken over.

    Attributes:
        brings_masters: Whether fp32 masters were among it.
        loses_masters: Whether masters were dropped that differ from the weights.
    """

    brings_masters: bool
    loses_masters: bool


def undo_casts(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Gives 16-bit parameters the state that `state_dict` has, which torch has cast to 16 bits.

    Mutates `optimizer.state`; to be called right after `optimizer.load_state_dict(state_dict)`.
    """
    saved_groups = (group["params"] for group in state_dict["param_groups"])
    groups = (group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(chain(*saved_groups), chain(*groups), strict=True):
        if parameter.dtype not in LOW_PRECISION:
            continue
        for name, value in state_dict["state"].get(key, {}).items():
            # torch never casts `step` to 16 bits.
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def differs(master: Tensor | None, parameter: Tensor, *, is_rounded: bool = False) -> bool:
    """Whether `parameter`'s numbers are not those of its loaded master. May wait for the device.

    Where `is_rounded`, those of the master in the parameter's precision.
    """
    if master is None:
        return False
    dtype = parameter.dtype if is_rounded else master.dtype
    return not torch.allclose(parameter.to(dtype), master.to(dtype), 0, 0, equal_nan=True)


def drop_masters(optimizer: Optimizer) -> bool:
    """Takes masters out of `optimizer.state`, since weights count; whether one of them differs."""
    # A list, so that none stays behind the first that differs.
    return any([differs(own.pop(MASTER_KEY, None), one) for one, own in optimizer.state.items()])
