"""Residuals between plans, and into and out of an optimizer's state dict."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.checkpoint import residuals
from lightning_dear.checkpoint.by_parameter import Residuals
from lightning_dear.checkpoint.residuals import KEY
from lightning_dear.checkpoint.sharded_state import ShardedState
from lightning_dear.collectives.work import Collectives
from lightning_dear.exchange import CompressedBucket


class ResidualKeeper:
    """Holds what encoding has left to be sent of parameters that are in no bucket.

    That is all of them while there is no plan, and later those that are frozen, until another plan
    has them again.

    Args:
        optimizer: Whose state dict brings residuals; mutated: a hook.
        collectives: What moves the bytes.
    """

    def __init__(self, optimizer: Optimizer, collectives: Collectives) -> None:
        self._optimizer = optimizer
        self._collectives = collectives
        self._coded: Sequence[CompressedBucket] = ()
        self._parameters: Sequence[Parameter] = ()
        self._held: Residuals | None = None
        self._seed: int | None = None
        self._is_detached = False
        self._hook = optimizer.register_load_state_dict_pre_hook(self._on_loading)

    def attach(
        self, coded: Sequence[CompressedBucket], parameters: Sequence[Parameter], seed: int
    ) -> None:
        """Gives what is held of `parameters`, which are all of a new plan's, to its buckets.

        Args:
            coded: Of the new plan.
            parameters: See above.
            seed: Of what they draw at random, if none is in use and none was loaded.
        """
        self._coded, self._parameters = coded, parameters
        self._seed = seed if self._seed is None else self._seed
        for one in coded:
            one.start_anew(self._seed)
        if self._held is not None:
            self._put_in(self._held)

    def release(self) -> None:
        """Takes over what the buckets have; their plan ends. Collective, blocks."""
        if self._coded:
            self._held = self.taken()
        self._coded = self._parameters = ()

    def detach(self) -> None:
        """Removes the hook and lets go of the flat buffers; residuals stay readable. Idempotent."""
        if self._is_detached:
            return
        self._is_detached = True
        self._hook.remove()
        for one in self._coded:
            one.detach()

    def _put_in(self, held: Residuals) -> None:
        self._seed = self._seed if held.seed is None else held.seed
        planned = set(self._parameters)
        own, others = held.of(lambda one: one in planned), held.of(lambda one: one not in planned)
        self._held = None if others.is_of_nothing else others
        residuals.put_in(self._coded, own, self._parameters)
        lost = residuals.unknown_names(self._coded, own, self._parameters)
        if lost and self._collectives.rank == 0:
            warnings.warn(
                f"What a compressor had left to be sent ({', '.join(lost)}) is dropped: this"
                " training has another compressor, none, or another gather, for some or all"
                " parameters. Keep these as they were to have it sent.",
                stacklevel=2,
            )

    def taken(self) -> Residuals:
        """Of all parameters, in buckets and not. Collective, blocks."""
        own = residuals.take_out(self._coded, self._parameters, self._collectives)
        return own if self._held is None else own.joined(self._held)

    def add_to(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with all ranks' residuals, if there are any. Collective, blocks."""
        held = self.taken() if self._coded else self._held
        if held is None:
            return state_dict
        numbers = self._numbers()
        held = held.of(lambda one: one in numbers)
        return {**state_dict, KEY: residuals.packed(held, numbers, self._collectives)}

    def add_to_sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` with this rank's chunks of all residuals, if there are any. Local."""
        if not self._coded and self._held is None:
            return state
        rank, world_size = self._collectives.rank, self._collectives.world_size
        held, numbers = self._held or Residuals(), self._numbers()
        held = held.of(lambda one: one in numbers)
        in_buckets = residuals.parts_of(self._coded, self._parameters)
        common = residuals.common_to_all(self._coded, self._parameters).joined(held)
        parts = chain(in_buckets, residuals.parts_held(held))
        own, chunks = residuals.sharded(parts, common, numbers, rank, world_size)
        before = state if isinstance(state, ShardedState) else ShardedState(state, (), ())
        return ShardedState({**before, KEY: own}, (*before.chunks, *chunks), before.parameters)

    def _numbers(self) -> dict[Tensor, int]:
        """Parameter -> its number in the optimizer's state dict."""
        groups = self._optimizer.param_groups
        own = (parameter for group in groups for parameter in group["params"])
        return {parameter: number for number, parameter in enumerate(own)}

    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Pre-hook of `load_state_dict`: what was kept before belongs to other weights."""
        groups = state_dict["param_groups"], optimizer.param_groups
        saved_sizes, own_sizes = ([len(one["params"]) for one in all_own] for all_own in groups)
        if saved_sizes != own_sizes:
            # torch refuses that, and says so: nothing is loaded.
            return
        held = Residuals()
        if KEY in state_dict:
            saved = [key for group in state_dict["param_groups"] for key in group["params"]]
            own = [p for group in optimizer.param_groups for p in group["params"]]
            rank, world_size = self._collectives.rank, self._collectives.world_size
            parameter_of = dict(zip(saved, own, strict=True))
            held = residuals.unpacked(state_dict[KEY], parameter_of, rank, world_size)
        if self._parameters:
            self._put_in(held)
        else:
            self._held = held if KEY in state_dict else None
