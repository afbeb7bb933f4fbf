"""Steps the user's optimizer on this rank's shards: 1/world_size of the work and of the state.

The optimizer's parameter groups hold the user's parameters. Pieces of the parameters take their
place from the end of the closure to the end of the optimizer's own step, bucket by bucket, and in
the block of `on_shards`.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, optim
from typing_extensions import override

from lightning_dear import private_names, torch_modes
from lightning_dear.bucket import Piece, cut_state
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState, differs, undo_casts
from lightning_dear.optimizers.pieces import SpreadState, SteppedPieces

MAX_RUN_NUMEL = 1 << 16
"""Most elements of several buckets that one call of the optimizer steps on a CPU. The overhead of a
call is about the time of stepping that many elements, so smaller buckets are stepped together."""

MAX_RUN_NUMEL_OF_DEVICES = 1 << 23
"""Same as `MAX_RUN_NUMEL`, on accelerators, which step tens of elements in a nanosecond."""

_PROFILED: Any = private_names.PROFILED_STEP.of(optim.Optimizer)(print)
"""torch's wrapper of `step`, which profiles it and calls hooks. `__code__` tells such wrappers."""

_STEP_HOOKS = (private_names.STEP_PRE_HOOKS.name, private_names.STEP_POST_HOOKS.name)


def inner_step(optimizer: optim.Optimizer, **arguments: Any) -> None:
    """Calls the class's `step` unprofiled. No hooks of `optimizer` run, nor in `super().step()`."""
    step: Any = type(optimizer).step
    own = step.__wrapped__ if getattr(step, "__code__", None) is _PROFILED.__code__ else step
    hooks = {name: vars(optimizer)[name] for name in _STEP_HOOKS}
    vars(optimizer).update(dict.fromkeys(_STEP_HOOKS, {}))
    try:
        own(optimizer, **arguments)
    finally:
        vars(optimizer).update(hooks)


def is_nested(optimizer: optim.Optimizer) -> bool:
    """Tells a step hook whether it was called by the inner one of two nested steps of `optimizer`.

    Steps are nested when a subclass calls `super().step()`: torch wraps the `step` of both classes
    once an object of the base class has been made, and each wrapper calls the hooks. The call stack
    is examined, because no post-hook runs after a step that raised.
    """
    num_steps, kind = 0, cast(Any, type(optimizer))
    frame: FrameType | None = sys._getframe(1) if _has_several_steps(kind) else None
    while frame is not None and num_steps < 2:
        is_step = frame.f_code is _PROFILED.__code__
        num_steps += is_step and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return num_steps > 1


@cache
def _has_several_steps(kind: type[optim.Optimizer]) -> bool:
    return sum(one is not optim.Optimizer and "step" in vars(one) for one in kind.__mro__) > 1


def warn_of_zeros(optimizer: optim.Optimizer) -> None:
    """Warns that `zero_grad(set_to_none=False)` sets gradients to None and not to 0."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad(set_to_none=False) does what set_to_none=True does"
        " under strategy='dear'. Leave set_to_none out. A parameter that the next step does not use"
        " stays as it is: zeros in .grad would let momentum and weight decay change it.",
        stacklevel=3,
    )


def closure_skipped(optimizer: optim.Optimizer) -> RuntimeError:
    """Returns the error for a step that updated parameters before the gradients were reduced."""
    return RuntimeError(
        f"{type(optimizer).__name__}.step() did not call its closure, so strategy='dear' could not"
        " reduce the gradients. Call the closure in step(), before parameters are updated."
    )


class ShardedOptimizer(SteppedPieces):
    """Steps the user's optimizer on this rank's pieces, bucket by bucket in one call of `step`.

    `optimizer.step(closure)` keeps its meaning for its caller. The closure runs once, and
    `OptimizerPipeline` reduces the gradients. Then buckets are stepped, in gather
    order, with the options that the parameter groups have now. A run is one bucket or several small
    ones. `begin_step` steps all runs but the last with the `step` of the optimizer's class, and
    leaves the pieces of the last run in the groups for the call that the user has made.

    The state of the pieces is in `shards.state`. Outside a step `optimizer.state` is the user's
    dict, which is normally empty, and refuses reads (`StateBetweenSteps`). State that is put there,
    such as by `load_state_dict`, is moved to the pieces before the next step.

    Args:
        optimizer: The user's optimizer. Mutated: gets hooks of `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._was_loaded = self._has_warned = False
        # Not in `_hooks`, which `detach` removes: state stays sharded after the training.
        optimizer.register_state_dict_pre_hook(self._warn_of_shards)
        self._loading: dict[str, Any] | None = None
        self._hooks = (
            optimizer.register_load_state_dict_pre_hook(self._on_loading),
            optimizer.register_load_state_dict_post_hook(self._on_loaded),
        )

    # --- the step -------------------------------------------------------------------------------

    def begin_step(self, order: Iterable[int]) -> Iterator[Sequence[int]]:
        """Steps all runs but the last; yields each run's bucket numbers, to be gathered now.

        Leaves the last run to the call of `optimizer.step` that is under way. The caller must call
        `restore` if anything raises. Buckets not in `order` come last.
        """
        wanted = dict.fromkeys((*order, *self.shards.in_bucket))
        most = MAX_RUN_NUMEL_OF_DEVICES if torch_modes.saves_calls(self.device) else MAX_RUN_NUMEL
        *head, last = step_runs([*wanted], self.shards.in_bucket, most)
        self._swap()
        for numbers in head:
            self._put(numbers)
            inner_step(self.optimizer)
            self._note_stepped(numbers)
            yield numbers
        self._put(last)
        self._last_run = last

    def finish(self) -> Sequence[int]:
        """Returns the last run's bucket numbers, after the optimizer's own step has returned.

        Raises:
            RuntimeError: If the optimizer did not call its closure, which reduces the gradients.
        """
        if not self._last_run:
            raise closure_skipped(self.optimizer)
        numbers, self._last_run = self._last_run, ()
        self._note_stepped(numbers)
        return numbers

    def _note_stepped(self, numbers: Sequence[int]) -> None:
        parameters = self.shards.parameters
        for number in numbers:
            pieces = self.shards.in_bucket[number]
            stepped = [piece for piece in pieces if piece.parameter.grad is not None]
            for piece in stepped:
                piece.was_stepped = True
            if self.shards.buffers.buckets[number].is_stepped_whole:
                # Autograd sees changes by version counters. In other buckets the all-gather raises
                # these, and this bucket is not gathered.
                changed = [parameters[piece.tensor_index] for piece in stepped]
                torch.autograd.graph.increment_version(changed)

    # --- state ----------------------------------------------------------------------------------

    def adopt_state(self) -> AdoptedState:
        """Moves the state of whole parameters from `optimizer.state` to the pieces. Local.

        If `optimizer.state` is another dict than before, such as after `load_state_dict`, all
        earlier state of the pieces is dropped. Otherwise entries of `optimizer.state` replace those
        of the pieces, and removed entries are dropped.
        """
        if was_loaded := self._was_loaded:
            self._forget()
        self.drop_removed()
        whole = self.guard().plain
        if not whole:
            return AdoptedState(False, False)
        brings_masters = False
        for piece in self.pieces:
            parameter = self.shards.parameters[piece.tensor_index]
            entries = whole.get(parameter, {}).items()
            own = {key: cut_state(key, value, parameter, piece) for key, value in entries}
            master = own.pop(MASTER_KEY, None)
            if master is not None and piece.role.has_master:
                piece.parameter.copy_(master)
                piece.was_stepped = brings_masters = True
            if own:
                self.shards.state[piece.parameter] = own
        return AdoptedState(brings_masters, self._take_out(whole, was_loaded))

    @override
    def check_read(self, key: Any) -> None:
        is_of_others = isinstance(key, Tensor) and key not in self.before_write()
        is_here = is_of_others or (key is not None and key in self.outside.plain)
        # A rank that has no piece at all cannot tell whether others have state.
        if not is_here and (self._has_state() or not self.pieces):
            self.refuse_read()

    def _has_state(self) -> bool:
        """Whether this rank has state of any parameter that is not in `optimizer.state`."""
        own: Mapping[Any, Any] = self.shards.state if self.left is None else self.left.entries
        return any(not isinstance(entry, Mapping) or entry for entry in own.values())

    @override
    def before_write(self) -> Set[Any]:
        others = {key for key in self.shards.state if not isinstance(key, Tensor)}
        return others.union(self.shards.parameters, () if self.left is None else self.left.entries)

    @override
    def before_copy(self) -> None:
        self._warn_of_shards(self.optimizer)

    def _take_out(self, whole: dict[Tensor, Any], was_loaded: bool) -> bool:
        """Removes the parameters' state from `whole`; tells whether a master is lost.

        A master is lost if it differs from a parameter that has none now, or if it was loaded for a
        16-bit parameter and does not round to the parameter's values.
        """
        is_lost, buffers = False, self.shards.buffers
        for parameter, placement in zip(self.shards.parameters, buffers.placements, strict=True):
            home = buffers.buckets[placement.buckets[0]]
            master = whole.pop(parameter, {}).get(MASTER_KEY)
            if not home.role.has_master or (was_loaded and not home.role.lags):
                is_lost |= differs(master, parameter, is_rounded=home.role.has_master)
        return is_lost

    def _forget(self) -> None:
        """Drops all state of the pieces and sets their masters to the present weights."""
        self._was_loaded = False
        self.shards.state.clear()
        for piece in self.pieces:
            if piece.role.has_master:
                parameter = self.shards.parameters[piece.tensor_index]
                piece.parameter.copy_(cut_state(MASTER_KEY, parameter.detach(), parameter, piece))
                piece.was_stepped = False

    def _warn_of_shards(self, optimizer: optim.Optimizer) -> None:
        """Pre-hook of `state_dict`: warns once if sharded state is missing, except in `packed`."""
        if self._has_state() and not any(optimizer.state.values()) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.state_dict() is without its state, which is sharded,"
                " and so are copies and pickles of the optimizer. On all ranks, call"
                " trainer.save_checkpoint(path) to save it, or"
                " strategy.optimizer_state(optimizer, on_all_ranks=True) to get it whole. Under"
                " Fabric: fabric.save(path, state), or state_dict() of the optimizer it set up.",
                stacklevel=2,
            )

    def _on_loading(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    @torch.no_grad()
    def _on_loaded(self, optimizer: optim.Optimizer) -> None:
        if self.left is not None:
            # The loaded state replaces what an ended plan has left.
            self.left = SpreadState({}, [])
        self._was_loaded = True
        loaded, self._loading = self._loading, None
        if loaded is not None:
            undo_casts(optimizer, loaded)


Pieces = Mapping[int, Sequence[Piece]]
"""Bucket number -> this rank's pieces of the bucket."""


def step_runs(numbers: Sequence[int], pieces: Pieces, most: int) -> list[list[int]]:
    """Groups buckets into runs, each of which one call of the optimizer steps.

    Args:
        numbers: Bucket numbers in the order of the step.
        pieces: Bucket number -> this rank's pieces of the bucket.
        most: Most elements of a run of several buckets. A run's gathers start only when the whole
            run is stepped, so long runs would delay them.
    """
    runs, room = list[list[int]](), 0
    for number in numbers:
        numel = sum(piece.stop - piece.start for piece in pieces[number])
        if not runs or numel > room:
            runs.append([])
            room = most
        runs[-1].append(number)
        room -= numel
    return runs
