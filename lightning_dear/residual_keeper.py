"""Residuals between plans, and into and out of an optimizer's state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.checkpoint import residuals
from lightning_dear.checkpoint.residuals import KEY, Residuals
from lightning_dear.checkpoint.sharded_state import ShardedState
from lightning_dear.exchange import CodedBucket
from lightning_dear.work import Collectives


class ResidualKeeper:
    """Holds what encoding has left to be sent while there is no plan.

    Args:
        optimizer: Whose state dict brings residuals; mutated: a hook.
        collectives: What moves the bytes.
    """

    def __init__(self, optimizer: Optimizer, collectives: Collectives) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._coded: Sequence[CodedBucket] = ()
        self._parameters: Sequence[Parameter] = ()
        self._held = Residuals()
        self._hook = optimizer.register_load_state_dict_pre_hook(self._on_loading)

    def attach(self, coded: Sequence[CodedBucket], parameters: Sequence[Parameter]) -> None:
        """Gives what is held to the buckets of a new plan."""
        self._coded, self._parameters = coded, parameters
        residuals.put_in(coded, self._held, parameters)

    def release(self) -> None:
        """Takes over what the buckets have; their plan ends. Collective, blocks."""
        self._held = self._taken()
        self._coded = ()

    def detach(self) -> None:
        """Removes the hook and lets go of the flat buffers; residuals stay readable."""
        self._hook.remove()
        for one in self._coded:
            one.detach()

    def _taken(self) -> Residuals:
        return residuals.take_out(self._coded, self._parameters, self._collectives)

    def add_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with all ranks' residuals, if there are any. Collective, blocks."""
        if not self._coded:
            return state_dict
        packed = residuals.packed(self._taken(), self._numbers(), self._collectives)
        return {**state_dict, KEY: packed}

    def add_to_sharded(self, state: ShardedState) -> ShardedState:
        """`state` with this rank's chunks of all residuals, if there are any. Local."""
        if not self._coded:
            return state
        rank, world_size = self._collectives.rank, self._collectives.world_size
        own, chunks = residuals.sharded(
            self._coded, self._parameters, self._numbers(), rank, world_size
        )
        return ShardedState({**state, KEY: own}, (*state.chunks, *chunks), state.parameters)

    def _numbers(self) -> dict[Tensor, int]:
        """Parameter -> its number in the optimizer's state dict."""
        groups = self._optimizer.param_groups
        own = (parameter for group in groups for parameter in group["params"])
        return {parameter: number for number, parameter in enumerate(own)}

    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Pre-hook of `load_state_dict`: what was kept before belongs to other weights."""
        self._held = Residuals()
        if KEY in state_dict:
            saved = [key for group in state_dict["param_groups"] for key in group["params"]]
            own = [p for group in optimizer.param_groups for p in group["params"]]
            rank, world_size = self._collectives.rank, self._collectives.world_size
            parameter_of = dict(zip(saved, own, strict=True))
            self._held = residuals.unpacked(state_dict[KEY], parameter_of, rank, world_size)
        if self._coded:
            residuals.put_in(self._coded, self._held, self._parameters)
