"""Steps the user's optimizer on whole parameters, whose mean gradients every rank has."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim
from typing_extensions import override

from lightning_dear.optimizers import masters, sharded
from lightning_dear.optimizers.pieces import SteppedPieces, names_of, parameters_of, put_into
from lightning_dear.torch_modes import plain_mode


class ReplicatedOptimizer(SteppedPieces):
    """Steps whole parameters on every rank, each rank with the whole optimizer state.

    `OptimizerPipeline` uses it with `gather="gradients"`. Within `optimizer.step(closure)` the
    closure runs, gradients are reduced, the options of all parameter groups are copied, and the
    all-gathers of the mean gradients are launched. The optimizer's own step finds no gradient then
    and updates nothing. `step_bucket` makes the update later, once a bucket's gradient is gathered.

    If every rank has whole gradients before the step (one rank without a compressor, or all-reduced
    buckets), the optimizer's own step makes an ordinary update and nothing is gathered.

    The state is in `optimizer.state`, as under plain torch. Between steps other code that reads or
    writes it waits for the buckets that are still to be stepped (`StateBetweenSteps`).

    Args:
        optimizer: The user's optimizer. `step_bucket` mutates its `state`.
        decouple: Whether mean gradients are gathered after the step. If not, they have been
            all-reduced before it.
        before_access: Called before other code uses the state between steps, with whether it reads.
            Raises if that would mislead.
    """

    def __init__(
        self, optimizer: optim.Optimizer, *, decouple: bool, before_access: Callable[[bool], None]
    ) -> None:
        super().__init__(optimizer)
        self._decouple, self._before_access = decouple, before_access
        self._deferred: DeferredStep | None = None
        # Both are False outside a step, and in a step whose closure has not been called yet.
        self._has_begun = self._shows_gradients = False

    def adopt_state(self) -> masters.AdoptedState:
        """Drops masters from `optimizer.state`, and takes over nothing. Local.

        Other state stays in `optimizer.state`. Masters are not stepped here, so they would be
        outdated when a later run loads them.
        """
        return masters.AdoptedState(False, masters.drop_masters(self.optimizer))

    @override
    def check_read(self, key: Any) -> None:
        self._before_access(True)

    @override
    def before_write(self) -> Set[Any]:
        self._before_access(False)
        return frozenset()

    # --- the step -----------------------------------------------------------------------------

    def begin_step(self, order: Iterable[int]) -> Iterator[Sequence[int]]:
        """Prepares the step, and yields the buckets whose mean gradients may be gathered now.

        Steps nothing. Yields buckets in the order of their bucket numbers, one at a time. The
        caller launches the gather of each. If every rank has whole gradients already, no bucket is
        yielded, and `.grad` holds them until `restore`, so that the optimizer's own step updates
        the parameters. The caller must call `restore` if anything raises.

        Args:
            order: Not used: no bucket is stepped now, so none is ready before another.
        """
        self._has_begun = True
        self.optimizer.state = self.guard().plain
        buffers = self.shards.buffers
        if all(placement.gradient is None for placement in buffers.placements):
            # Without gradient buffers (world size 1, no compressor) autograd has left the gradients
            # in `.grad`, where the optimizer finds them.
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
        """Ends the step after the optimizer's own step has returned, and calls `restore`.

        Returns:
            Numbers of the buckets to gather now: always none, `begin_step` has yielded them all.

        Raises:
            RuntimeError: If the optimizer did not call its closure, so that it updated parameters
                before the gradients were reduced.
        """
        if not self._has_begun:
            raise sharded.closure_skipped(self.optimizer)
        self.restore()
        return ()

    def _leave_only_managed(self) -> None:
        """Takes parameters that are in no bucket out of the optimizer's groups, until `restore`.

        Such a parameter, for example one that was frozen, may still have a gradient in `.grad`,
        which the optimizer's own step would use. Parameters in buckets have None in `.grad`, since
        their gradients were moved into the buckets. So the optimizer's own step updates nothing.
        """
        managed = {id(parameter) for parameter in self.shards.parameters}
        self._set_params_aside()
        names = names_of(self.optimizer)
        for group in self.optimizer.param_groups:
            put_into(group, [p for p in group["params"] if id(p) in managed], names)

    @override
    def restore(self) -> None:
        if self._shows_gradients:
            for placement in self.shards.buffers.placements:
                placement.parameter.grad = None
        if self._has_begun:
            self.guard()
        self._has_begun = self._shows_gradients = False
        super().restore()

    # --- afterwards ---------------------------------------------------------------------------

    def step_bucket(self, number: int) -> None:
        """Updates the parameters of a bucket whose mean gradient has been gathered. Local.

        Call it once for each bucket of a step. Parameters that no rank used stay as they are.
        `.grad` holds the mean gradient during the update, and its former value afterwards. Torch
        contexts of the caller, such as autocast, have no effect on the update.

        Args:
            number: The bucket number.

        Raises:
            RuntimeError: If updating an earlier bucket of the step has raised.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            raise RuntimeError(
                f"A step of {type(self.optimizer).__name__} was broken off half-way (see the first"
                " error). Load the last checkpoint: the weights are a mixture of two steps."
            )
        buffers, group_of = self.shards.buffers, self.shards.group_of
        slices = buffers.buckets[number].spec.slices
        used = [piece.tensor for piece in slices if self._used[piece.tensor]]
        places = [buffers.placements[index] for index in used]
        before = [place.parameter.grad for place in places]
        # Keyed by group index, because the user may have added groups since the step.
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
        # Put back only after success: after an error the next call raises the RuntimeError above.
        self._deferred = deferred


TWIN = "_lightning_dear_twin"
"""Name of an attribute of an optimizer's copies that step in place of it, see `DeferredStep`."""


class DeferredStep:
    """A step of an optimizer that is made later, bucket by bucket, in calls of `run`.

    It is made with the learning rates and all other options and attributes that the optimizer has
    when this object is made.

    Each call of `run` steps with a twin: an object of the optimizer's class with the same
    attributes and the same `state`, and with copies of the groups. So the step does not see options
    that were changed meanwhile. Counters that the twin changes in its groups or attributes are lost
    with it. The optimizer's own step, which updates nothing, has counted once for all buckets. A
    counter inside a container that is an attribute, such as a list, is shared with the twins and so
    counted by every bucket. The trial of `why_not_tensorwise` refuses an optimizer whose steps
    depend on such a counter.

    Args:
        optimizer: The user's optimizer. `run` mutates the `state` that it has now.

    Attributes:
        dtype: torch's default dtype when the object was made.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._kind, self.dtype = type(optimizer), torch.get_default_dtype()
        self._attributes = {k: v for k, v in vars(optimizer).items() if k != "param_groups"}
        self._attributes[TWIN] = True
        self._options = [_copied(group) for group in optimizer.param_groups]
        self._names = names_of(optimizer)
        self._carried = {id(one): dict(vars(one)) for one in parameters_of(optimizer) if vars(one)}

    def run(self, parameters: Mapping[int, Sequence[Tensor]]) -> None:
        """Steps some parameters, in place, with the gradients in their `.grad`.

        Args:
            parameters: Index of a parameter group -> the parameters of the group to step now.
        """
        twin: Any = object.__new__(self._kind)
        groups = [_copied(options) for options in self._options]
        vars(twin).update(self._attributes, param_groups=groups)
        for number, group in enumerate(groups):
            put_into(group, [*parameters.get(number, ())], self._names)
        newer = [(one, self._hide_newer(one)) for one in chain.from_iterable(parameters.values())]
        sharded.inner_step(twin)
        for one, new in newer:
            vars(one).update(new)

    def _hide_newer(self, parameter: Tensor) -> dict[str, Any]:
        """Returns attributes that were put on a parameter later, and removes them for the step."""
        own, before = vars(parameter), self._carried.get(id(parameter), {})
        new = {key: value for key, value in own.items() if before.get(key, before) is not value}
        for key in new:
            del own[key]
        own.update(before if new else {})
        return new


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_of(value) for key, value in group.items() if key != "params"}


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Cloned, because schedulers change a learning rate that is a tensor in place.
        return value.detach().clone()
    return deepcopy(value) if isinstance(value, list | dict | set) else value
