"""Weights that are in no plan for a while, and whose masters wait in the optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor
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
        self._before: dict[Tensor, Tensor] = {}
        # Masters that are loaded belong to the weights that are loaded with them.
        self._hook = optimizer.register_load_state_dict_post_hook(lambda _: self._before.clear())

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """What `parameters` are now: a copy of those that have a master and were not noted yet."""
        for parameter in parameters:
            if self._has_master(parameter) and parameter not in self._before:
                self._before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def follow(self, wanted: Collection[Tensor] | None = None) -> None:
        """Moves masters as their weights were since `note`, or since this was called. Local.

        Args:
            wanted: Of these parameters; None: of all.
        """
        self._before = {one: own for one, own in self._before.items() if self._has_master(one)}
        if not self._before:
            return
        only = set(self._before if wanted is None else wanted)
        for parameter in only & self._before.keys():
            own = self._optimizer.state[parameter]
            master = own[MASTER_KEY] = own[MASTER_KEY].clone()
            # The state and the weights may have been moved to another device since.
            follow_weights(master, self._before[parameter].to(master.device), parameter.detach())
            self._before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def sync(self) -> None:
        """Gives weights that are noted the values of their masters, which all ranks have. Local.

        After `follow`, or what was written to them is lost.
        """
        for parameter in self._before:
            parameter.copy_(self._optimizer.state[parameter][MASTER_KEY])
            self._before[parameter].copy_(parameter)

    def detach(self) -> None:
        """Removes the hook. Idempotent."""
        self._hook.remove()

    def _has_master(self, parameter: Tensor) -> bool:
        return MASTER_KEY in self._optimizer.state.get(parameter, {})
