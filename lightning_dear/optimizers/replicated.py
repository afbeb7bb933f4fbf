"""The user's optimizer on whole parameters, bucket by bucket as their mean gradients arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.optimizers.masters import AdoptedState, drop_masters
from lightning_dear.optimizers.sharded import OptimizerShards, closure_skipped, inner_step
from lightning_dear.torch_modes import plain_mode


class ReplicatedOptimizer(OptimizerShards):
    """Steps whole parameters on every rank; each rank has the whole optimizer state.

    `optimizer.step(closure)` runs the closure, reduces, notes all options, and has the mean
    gradients' all-gathers launched. The step under way then finds no gradient and updates nothing:
    `step_bucket` does, later, once a bucket's gradient is there. Where every rank has whole
    gradients already (one rank, or all-reduced buckets) the step under way is an ordinary one.

    State lives in `optimizer.state`, as under plain torch.

    Args:
        optimizer: The user's. Its `state` is mutated by `step_bucket`.
        decouple: Whether gradients are gathered after the step, rather than all-reduced before.
    """

    def __init__(self, optimizer: Optimizer, *, decouple: bool) -> None:
        super().__init__(optimizer)
        self._decouple = decouple
        self._deferred: DeferredStep | None = None
        # Whether a call of `step` has called its closure, and whether it finds whole gradients.
        self._has_begun = self._shows_gradients = False

    def adopt_state(self) -> AdoptedState:
        """Nothing to take over: `optimizer.state` is where state lives.

        But for masters, which nobody steps here: they would be old when they are read again.
        """
        return AdoptedState(False, drop_masters(self.optimizer))

    # --- the step -----------------------------------------------------------------------------

    def run(self, order: Iterable[int]) -> Iterator[Sequence[int]]:
        """Yields the buckets whose mean gradients are to be gathered; steps none of them.

        In the order of their numbers, whatever `order` is.

        Leaves to the call of `optimizer.step` that is under way what is whole already. Whoever
        iterates calls `restore` if anything raises.
        """
        self._has_begun = True
        buffers = self.shards.buffers
        if all(placement.gradient is None for placement in buffers.placements):
            # World size 1: gradients are where autograd left them.
            return
        if not self._decouple:
            self._shows_gradients = True
            for used, placement in zip(self._used, buffers.placements, strict=True):
                placement.parameter.grad = placement.gradient if used else None
            return
        self._deferred = DeferredStep(self.optimizer)
        for bucket in buffers.buckets:
            yield [bucket.number]
        self._leave_only_managed()

    def finish(self) -> Sequence[int]:
        """The call under way has updated everything, or nothing yet; no bucket was stepped by us.

        Raises:
            RuntimeError: If it stepped before there were gradients.
        """
        if not self._has_begun:
            raise closure_skipped(self.optimizer)
        self.restore()
        return ()

    def _leave_only_managed(self) -> None:
        """No parameter in the groups has a gradient until `restore`, whatever was frozen with one.

        Whoever is managed has had its gradient taken by its bucket.
        """
        managed = {id(parameter) for parameter in self.shards.parameters}
        self._set_params_aside()
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in managed]

    @override
    def restore(self) -> None:
        if self._shows_gradients:
            for placement in self.shards.buffers.placements:
                placement.parameter.grad = None
        self._has_begun = self._shows_gradients = False
        super().restore()

    # --- afterwards ---------------------------------------------------------------------------

    def step_bucket(self, number: int) -> None:
        """Updates the parameters of bucket `number`, whose mean gradient has arrived.

        Once a step; in whatever torch contexts the caller is.

        Raises:
            RuntimeError: If a bucket was broken off half-way before.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            raise RuntimeError(
                f"A step of {type(self.optimizer).__name__} was broken off half-way (see the first"
                " error): the weights are a mixture of two steps. Load the last checkpoint."
            )
        buffers, group_of = self.shards.buffers, self.shards.group_of
        slices = buffers.buckets[number].spec.slices
        used = [piece.tensor for piece in slices if self._used[piece.tensor]]
        places = [buffers.placements[index] for index in used]
        before = [place.parameter.grad for place in places]
        # By number: groups may have been added since the step.
        groups: defaultdict[int, list[Tensor]] = defaultdict(list)
        with plain_mode(self.device.type, deferred.dtype):
            try:
                for index, place in zip(used, places, strict=True):
                    groups[group_of[index]].append(place.parameter)
                    place.parameter.grad = place.gradient
                deferred.run(groups)
            finally:
                for place, gradient in zip(places, before, strict=True):
                    place.parameter.grad = gradient
        # Not there after an error: whoever completes another bucket is told above.
        self._deferred = deferred


class DeferredStep:
    """What the optimizer was set to when `step` was called: learning rates, and all else.

    Each part of the step is made by a twin: an object of the optimizer's class with the same
    attributes and the same `state`, and with copies of the groups. So the step sees no option that
    was changed since, and what it counts in the groups or in itself is forgotten with the twin: the
    optimizer's own, empty step has counted it once. What it counts in a container of its own is
    shared, and counted by every part: `why_not_tensorwise` refuses it if steps depend on that.

    Args:
        optimizer: The user's; its `state` is mutated by `run`.

    Attributes:
        dtype: torch's default one at that time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.dtype = optimizer, torch.get_default_dtype()
        # Without the old state, which would else outlive a load_state_dict.
        outdated = ("state", "param_groups")
        self._attributes = {k: v for k, v in optimizer.__dict__.items() if k not in outdated}
        self._options = [_copied(group) for group in optimizer.param_groups]

    def run(self, parameters: Mapping[int, Sequence[Tensor]]) -> None:
        """Steps these parameters, by their group's number, with what is in their `.grad`."""
        twin: Any = object.__new__(type(self._optimizer))
        twin.__dict__.update(self._attributes)
        twin.__dict__.update(
            state=self._optimizer.state,
            param_groups=[
                {**_copied(options), "params": list(parameters.get(number, ()))}
                for number, options in enumerate(self._options)
            ],
        )
        inner_step(twin)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_of(value) for key, value in group.items() if key != "params"}


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A learning rate may be a tensor, which schedulers change in place.
        return value.detach().clone()
    return deepcopy(value) if isinstance(value, list | dict | set) else value
