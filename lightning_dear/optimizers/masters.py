"""The fp32 masters of 16-bit weights: in an optimizer's state, loaded, and without a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.bucket import LOW_PRECISION, follow_weights

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


class LeftWeights:
    """Lets masters follow what is written to their weights while these are in no plan.

    Weights lag behind their masters, so that neither says by itself which of both is new.

    Args:
        optimizer: Mutated: masters in its state, and a hook.

    Attributes:
        noted: Parameter -> what it was when it was last noted.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.noted: dict[Tensor, Tensor] = {}
        # Masters that are loaded belong to the weights that are loaded with them.
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self.noted.clear())

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """What `parameters` are now: a copy of those that have a master and were not noted yet."""
        for parameter in parameters:
            if self._has_master(parameter) and parameter not in self.noted:
                self.noted[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def follow(self, wanted: Collection[Tensor] | None = None) -> None:
        """Moves masters as their weights were since `note`, or since this was called. Local.

        Args:
            wanted: Of these parameters; None: of all.
        """
        self.noted = {one: own for one, own in self.noted.items() if self._has_master(one)}
        if not self.noted:
            return
        only = set(self.noted if wanted is None else wanted)
        for parameter in only & self.noted.keys():
            own = self._optimizer.state[parameter]
            # State dicts taken before hold the old one, which must not change.
            master = own[MASTER_KEY] = own[MASTER_KEY].clone()
            # The state and the weights may have been moved to another device since.
            follow_weights(master, self.noted[parameter].to(master.device), parameter.detach())
            self.noted[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def sync(self) -> None:
        """Gives weights that are noted the values of their masters, which all ranks have. Local.

        After `follow`, or what was written to them is lost.
        """
        for parameter in self.noted:
            parameter.copy_(self._optimizer.state[parameter][MASTER_KEY])
            self.noted[parameter].copy_(parameter)

    def detach(self) -> None:
        """Removes the hook. Idempotent."""
        self._hook.remove()

    def _has_master(self, parameter: Tensor) -> bool:
        return MASTER_KEY in self._optimizer.state.get(parameter, {})


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
