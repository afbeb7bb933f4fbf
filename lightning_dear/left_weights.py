"""Weights that are in no plan for a while, and whose masters wait in the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.bucket import follow_weights
from lightning_dear.checkpoint.format import MASTER_KEY


class LeftWeights:
    """Lets masters follow what is written to their weights while these are in no plan.

    Weights lag behind their masters, so that neither says by itself which of both is new.

    Args:
        optimizer: Mutated: masters in its state, and a hook.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Parameter, Tensor] = {}
        # Masters that are loaded belong to the weights that are loaded with them.
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._before.clear())

    @torch.no_grad()
    def note(self, parameters: Iterable[Parameter]) -> None:
        """What `parameters` are now, whose plan ends; of those that have a master, a copy."""
        for parameter in parameters:
            if self._has_master(parameter):
                self._before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def follow(self) -> None:
        """Moves masters as their weights were since `note`, or since this was called. Local."""
        self._before = {one: own for one, own in self._before.items() if self._has_master(one)}
        for parameter, before in self._before.items():
            own = self._optimizer.state[parameter]
            master = own[MASTER_KEY] = own[MASTER_KEY].clone()
            follow_weights(master, before, parameter.detach())
            before.copy_(parameter)

    def detach(self) -> None:
        """Removes the hook. Idempotent."""
        self._hook.remove()

    def _has_master(self, parameter: Parameter) -> bool:
        return MASTER_KEY in self._optimizer.state.get(parameter, {})
