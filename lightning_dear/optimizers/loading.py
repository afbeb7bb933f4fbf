"""What a loaded optimizer state holds, beyond what torch takes over of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION


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
