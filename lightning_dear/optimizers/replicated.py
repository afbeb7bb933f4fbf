"""The user's optimizer on whole parameters, bucket by bucket as their mean gradients arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.bucket import FlatBuffers, Placement
from lightning_dear.optimizers.deferred import DeferredStep
from lightning_dear.optimizers.elementwise import closure_skipped
from lightning_dear.optimizers.listener import GatherListener
from lightning_dear.optimizers.masters import MASTER_KEY, differs
from lightning_dear.optimizers.sharded import ShardedOptimizer
from lightning_dear.torch_modes import plain_mode


class ReplicatedOptimizer(ShardedOptimizer):
    """Steps whole parameters on every rank; each rank has the whole optimizer state.

    `optimizer.step(closure)` runs the closure, reduces, notes all options, and has the mean
    gradients' all-gathers launched. The step under way then finds no gradient and updates nothing:
    `step_bucket` does, later, once a bucket's gradient is there. Where every rank has whole
    gradients already (one rank, or all-reduced buckets) the step under way is an ordinary one.

    State lives in `optimizer.state`, as under plain torch. Reading it through
    `optimizer.state_dict()` completes what is pending; so does `load_state_dict`, beforehand.

    The pieces of this rank's shards, with their mean gradients, are there for norms, clipping and
    loss scales, as in `ShardedOptimizer`; nothing is stepped on them.

    Args:
        optimizer: The user's. Mutated: its hooks, and `zero_grad`.
        listener: The pipeline.
        decouple: Whether gradients are gathered after the step, rather than all-reduced before.
    """

    def __init__(self, optimizer: Optimizer, listener: GatherListener, *, decouple: bool) -> None:
        super().__init__(optimizer, listener)
        self._gathers = listener
        self._decouple = decouple
        self._placements: Sequence[Placement] = ()
        self._indices: dict[int, list[list[int]]] = {}
        self._used: Sequence[bool] = ()
        self._deferred: DeferredStep | None = None
        self._outside: list[list[Parameter]] | None = None
        self._has_begun = self._is_showing = self._is_broken = False
        self._hooks = (  # type: ignore[assignment]
            *self._hooks,
            optimizer.register_state_dict_pre_hook(self._on_saving),
        )

    @override
    def attach(
        self, buffers: FlatBuffers, parameters: Sequence[Parameter], rank: int, world_size: int
    ) -> None:
        super().attach(buffers, parameters, rank, world_size)
        self._placements = buffers.placements
        group_of = {
            id(parameter): number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        self._indices = {}
        for bucket in buffers.buckets:
            groups: list[list[int]] = [[] for _ in self.optimizer.param_groups]
            for part in bucket.spec.slices:
                groups[group_of[id(parameters[part.tensor])]].append(part.tensor)
            self._indices[bucket.number] = groups

    @override
    def detach(self) -> None:
        super().detach()
        self._placements, self._indices = (), {}

    @property
    def _has_buffers(self) -> bool:
        """Whether gradients lie in buckets: not at world size 1, where they stay in `.grad`."""
        return any(placement.gradient is not None for placement in self._placements)

    @override
    def set_gradients(self, used: Sequence[bool]) -> None:
        super().set_gradients(used)
        self._used = tuple(used)

    @override
    def adopt_state(self) -> bool:
        """Nothing to take over: `optimizer.state` is where state lives.

        But for masters, which nobody steps here: they would be old when they are read again.
        """
        is_lost = False
        for parameter, own in self.optimizer.state.items():
            is_lost |= differs(own.pop(MASTER_KEY, None), parameter)
        if is_lost:
            self._listener.masters_dropped()
        return False

    def _on_saving(self, optimizer: Optimizer) -> None:
        self._gathers.complete_parameters("optimizer state")

    @override
    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._gathers.complete_parameters("optimizer state")
        super()._on_loading(optimizer, state_dict)

    # --- the step -----------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def _begin(self) -> None:
        self.restore()
        self._listener.before_step()
        self._has_begun = True
        if not self._has_buffers:
            return
        if not self._decouple:
            self._show_gradients()
            return
        self._deferred = DeferredStep(self.optimizer)
        for number in self._indices:
            self._gathers.launch(number)
        self._leave_only_managed()

    def _leave_only_managed(self) -> None:
        """No parameter in the groups has a gradient until `restore`, whatever was frozen with one.

        Whoever is managed has had its gradient taken by its bucket.
        """
        managed = {id(parameter) for parameter in self._parameters}
        groups = self.optimizer.param_groups
        self._outside = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in managed]

    @override
    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Post-hook: the step under way has updated everything, or nothing yet."""
        if not self._has_begun:
            raise closure_skipped(optimizer)
        self._has_begun = False
        self._end_step()

    @override
    def restore(self) -> None:
        """Puts the user's parameters back, also after a step that raised half-way."""
        if self._outside is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._outside, strict=True):
                group["params"] = parameters
            self._outside = None
        if self._is_showing:
            self._hide_gradients()
        super().restore()

    def _show_gradients(self) -> None:
        self._is_showing = True
        for used, placement in zip(self._used, self._placements, strict=True):
            placement.parameter.grad = placement.gradient if used else None

    def _hide_gradients(self) -> None:
        self._is_showing = False
        for placement in self._placements:
            placement.parameter.grad = None

    # --- afterwards ---------------------------------------------------------------------------

    def step_bucket(self, number: int) -> None:
        """Updates the parameters of bucket `number`, whose mean gradient has arrived.

        Once a step; in whatever torch contexts the caller is.

        Raises:
            RuntimeError: If a bucket was broken off half-way before.
        """
        if self._is_broken or self._deferred is None:
            raise RuntimeError(
                f"A step of {type(self.optimizer).__name__} was broken off half-way (see the first"
                " error): the weights are a mixture of two steps. Load the last checkpoint."
            )
        self._is_broken = True
        with plain_mode(self.device.type), self._with_gradients(number) as parameters:
            self._deferred.run(parameters)
        self._is_broken = False

    @contextmanager
    def _with_gradients(self, number: int) -> Iterator[list[list[Tensor]]]:
        """The bucket's used parameters by group, with the mean in `.grad` meanwhile."""
        groups = [[i for i in group if self._used[i]] for group in self._indices[number]]
        places = [self._placements[index] for group in groups for index in group]
        before = [place.parameter.grad for place in places]
        try:
            for place in places:
                place.parameter.grad = place.gradient
            yield [[self._placements[index].parameter for index in group] for group in groups]
        finally:
            for place, gradient in zip(places, before, strict=True):
                place.parameter.grad = gradient
