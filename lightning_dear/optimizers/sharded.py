"""Steps the user's optimizer on this rank's shards: 1/world_size of the work and of the state.

The optimizer's parameter groups hold the user's parameters. Pieces of the parameters take their
place from the end of the closure to the end of the optimizer's own step, bucket by bucket, and in
the block of `on_shards`.
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear import private_names
from lightning_dear.bucket import Chunk, FlatBuffers, Piece, as_flat, cut_state, shard_pieces
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState, differs, undo_casts
from lightning_dear.torch_modes import saves_calls

MAX_RUN_NUMEL = 1 << 16
"""Most elements of several buckets that one call of the optimizer steps on a CPU. The overhead of a
call is about the time of stepping that many elements, so smaller buckets are stepped together."""

MAX_RUN_NUMEL_OF_DEVICES = 1 << 23
"""Same as `MAX_RUN_NUMEL`, on accelerators, which step tens of elements in a nanosecond."""

_PROFILED: Any = private_names.PROFILED_STEP.of(Optimizer)(print)
"""torch's wrapper of `step`, which profiles it and calls hooks. `__code__` tells such wrappers."""

_STEP_HOOKS = (private_names.STEP_PRE_HOOKS.name, private_names.STEP_POST_HOOKS.name)


def inner_step(optimizer: Optimizer, **arguments: Any) -> None:
    """Calls the class's `step` unprofiled. No hooks of `optimizer` run, nor in `super().step()`."""
    step: Any = type(optimizer).step
    own = step.__wrapped__ if getattr(step, "__code__", None) is _PROFILED.__code__ else step
    hooks = {name: vars(optimizer)[name] for name in _STEP_HOOKS}
    vars(optimizer).update(dict.fromkeys(_STEP_HOOKS, {}))
    try:
        own(optimizer, **arguments)
    finally:
        vars(optimizer).update(hooks)


def is_nested(optimizer: Optimizer) -> bool:
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
def _has_several_steps(kind: type[Optimizer]) -> bool:
    own = [one for one in kind.__mro__ if one is not Optimizer and "step" in vars(one)]
    return len(own) > 1


def warn_of_zeros(optimizer: Optimizer) -> None:
    """Warns that `zero_grad(set_to_none=False)` sets gradients to None and not to 0."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad(set_to_none=False) does what set_to_none=True does"
        " under strategy='dear'. Leave set_to_none out. A parameter that the next step does not use"
        " stays as it is: zeros in .grad would let momentum and weight decay change it.",
        stacklevel=3,
    )


def closure_skipped(optimizer: Optimizer) -> RuntimeError:
    """Returns the error for a step that updated parameters before the gradients were reduced."""
    return RuntimeError(
        f"{type(optimizer).__name__}.step() did not call its closure, so strategy='dear' could not"
        " reduce the gradients. Call the closure in step(), before parameters are updated."
    )


@dataclass(frozen=True)
class Shards:
    """One optimizer's parameters under one plan, and this rank's pieces of them.

    Attributes:
        buffers: Flat buffers of the plan. They have no buckets before the first and after the last.
        parameters: Parameters that the optimizer trains, by parameter index.
        layouts: (shape, strides) of each parameter. State is stored in the order of these strides.
        group_of: Parameter index -> index of its parameter group.
        in_bucket: Bucket number -> this rank's pieces of the bucket.
        state: Optimizer state of the pieces, keyed by `Piece.parameter`.
    """

    buffers: FlatBuffers = field(default_factory=lambda: FlatBuffers([], []))
    parameters: Sequence[Parameter] = ()
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    group_of: Sequence[int] = ()
    in_bucket: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))


class SpreadState(NamedTuple):
    """Optimizer state by parameter, of which each rank has chunks.

    Attributes:
        entries: Parameter -> its state, the same on all ranks. A tensor with an element for each
            element of the parameter is replaced by a stand-in, which is on the meta device.
        chunks: (stand-in, this rank's chunks of the tensor), in the same order on all ranks.
    """

    entries: Mapping[Parameter, dict[str, Any]]
    chunks: list[tuple[Tensor, list[Chunk]]]

    def take(self, key: str, of: Set[Parameter]) -> "SpreadState":
        """Removes the state under `key` of the parameters `of`, and returns it. Mutates `self`."""
        entries = [(one, its) for one, its in self.entries.items() if one in of and key in its]
        own = {one: {key: its.pop(key)} for one, its in entries}
        taken = {id(its[key]) for its in own.values()}
        chunks = [one for one in self.chunks if id(one[0]) in taken]
        self.chunks[:] = [one for one in self.chunks if id(one[0]) not in taken]
        return SpreadState(own, chunks)


class SteppedPieces:
    """The pieces of an optimizer's parameters that this rank steps, with their mean gradients.

    Base of `ShardedOptimizer` and `ReplicatedOptimizer`. `MeanGradient` uses it for norms, clipping
    and loss scales. `OptimizerPipeline` drives the step of the subclass.

    Args:
        optimizer: The user's optimizer. Its groups are mutated in `on_shards` and in a step only.

    Attributes:
        optimizer: The user's optimizer.
        shards: The parameters and pieces of the present plan.
        left: State that an ended plan has left for the next one. None means no such state.
        pieces: This rank's pieces, bucket by bucket.
        device: Device that the parameters had when the plan began, through which state is sent.
            After a fit Lightning moves the parameters to the CPU.
        state_at_end: `optimizer.state` when the training ended; a later load assigns another dict.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state_at_end: Any = None
        self.pieces: Sequence[Piece] = ()
        self.left: SpreadState | None = None
        self.shards = Shards()
        held = (one for group in optimizer.param_groups for one in group["params"])
        self.device = next((one.device for one in held), torch.device("cpu"))
        # Parameter index -> whether any rank had a gradient.
        self._used: Sequence[bool] = ()
        # The user's parameters and state while pieces take their place in the optimizer.
        self._params: list[list[Parameter]] | None = None
        self._state: defaultdict[Tensor, Any] | None = None
        # Numbers of the buckets whose pieces the optimizer's own step updates.
        self._last_run: Sequence[int] = ()
        self._hooks: Sequence[RemovableHandle] = ()

    def attach(self, buffers: FlatBuffers, parameters: Sequence[Parameter]) -> None:
        """Makes this rank's pieces under a new plan, and forgets `left`. Local."""
        self.left = None
        in_bucket = {bucket.number: shard_pieces(bucket) for bucket in buffers.buckets}
        self.pieces = list(chain(*in_bucket.values()))
        groups = enumerate(self.optimizer.param_groups)
        numbers = {id(one): number for number, group in groups for one in group["params"]}
        group_of = [numbers[id(parameter)] for parameter in parameters]
        for piece in self.pieces:
            parameter = parameters[piece.tensor_index]
            piece.is_plain = parameter.is_contiguous() and piece.numel == parameter.numel()
        self.device = parameters[0].device
        layouts = [(one.shape, one.stride()) for one in parameters]
        self.shards = Shards(buffers, parameters, layouts, group_of, in_bucket)

    def detach(self) -> None:
        """Drops the flat buffers and removes hooks. State stays readable through `state_of`."""
        for hook in self._hooks:
            hook.remove()
        self.state_at_end = self.optimizer.state
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece in self.pieces:
            kept = self.shards.state.get(piece.parameter)
            piece.gradient = None
            # A view as key of the state would keep the flat buffer alive. A master is no view.
            if not piece.role.has_master:
                piece.parameter = torch.empty(0)
            if kept:
                state[piece.parameter] = kept
        self.shards = replace(self.shards, buffers=FlatBuffers([], []), state=state)

    def state_of(self, piece: Piece) -> Mapping[str, Any]:
        """Returns the optimizer state of `piece`, which is empty if it has not been stepped.

        A piece's master is added under MASTER_KEY once the piece has state or was stepped. Not
        before: torch's optimizers would take a parameter with any state for a stepped one.
        """
        state: Mapping[str, Any] = self.shards.state.get(piece.parameter, {})
        if piece.role.has_master and (state or piece.was_stepped):
            return {**state, MASTER_KEY: piece.parameter}
        return state

    def leave(self, left: SpreadState | None) -> None:
        """Drops an ended plan's pieces. Keeps their state for the next plan, unless it is None."""
        self.pieces, self.left, self.shards = (), left, Shards()

    # --- mean gradients -------------------------------------------------------------------------

    def set_gradients(self, used: Sequence[bool]) -> None:
        """Sets each piece's `.grad` to its part of the mean gradient, or to None if not `used`.

        Args:
            used: Parameter index -> whether any rank had a gradient.
        """
        self._used = tuple(used)
        for piece in self.pieces:
            if not used[piece.tensor_index]:
                piece.parameter.grad = None
            elif piece.gradient is not None:
                piece.parameter.grad = piece.gradient
            else:
                gradient = self.shards.parameters[piece.tensor_index].grad
                assert gradient is not None
                is_plain = gradient.is_contiguous() and piece.is_plain
                piece.parameter.grad = gradient.view(-1) if is_plain else self._own_gradient(piece)

    def _own_gradient(self, piece: Piece) -> Tensor:
        """Returns the piece of the parameter's `.grad`, which it first puts in storage order."""
        parameter = self.shards.parameters[piece.tensor_index]
        assert parameter.grad is not None
        # Put in storage order here: `as_flat` would copy the whole gradient for every piece.
        if parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        return as_flat(parameter.grad, parameter.stride())[piece.start : piece.stop]

    def clear_gradients(self) -> None:
        """Sets `.grad` of all pieces to None, to free memory before the next backward."""
        for piece in self.pieces:
            piece.parameter.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of all pieces that have one."""
        gradients = (piece.parameter.grad for piece in self.pieces)
        return [gradient for gradient in gradients if gradient is not None]

    @contextmanager
    def on_shards(self, *extra: Tensor) -> Iterator[None]:
        """A context in which the optimizer has the tensors `extra`, and all pieces with state."""
        self._swap()
        try:
            self._put(self.shards.in_bucket)
            self.optimizer.param_groups[0]["params"][:0] = extra
            yield
        finally:
            self.restore()

    def _put(self, numbers: Iterable[int]) -> None:
        groups: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for number in numbers:
            for piece in self.shards.in_bucket[number]:
                groups[self.shards.group_of[piece.tensor_index]].append(piece.parameter)
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = parameters

    def _set_params_aside(self) -> None:
        self._params = [group["params"] for group in self.optimizer.param_groups]

    def _swap(self) -> None:
        self._set_params_aside()
        self._state, self.optimizer.state = self.optimizer.state, self.shards.state

    def restore(self) -> None:
        """Puts the user's parameters and state back, if pieces have taken their place."""
        if self._params is None:
            return
        # Groups that the user has added after a step that raised stay as they are.
        groups = self.optimizer.param_groups[: len(self._params)]
        for group, parameters in zip(groups, self._params, strict=True):
            group["params"] = parameters
        if self._state is not None:
            # Read back, because a step may assign a new object to `optimizer.state`.
            self.shards = replace(self.shards, state=self.optimizer.state)
            self.optimizer.state = self._state
        self._params = self._state = None
        self._last_run = ()


class ShardedOptimizer(SteppedPieces):
    """Steps the user's optimizer on this rank's pieces, bucket by bucket in one call of `step`.

    `optimizer.step(closure)` keeps its meaning for its caller. The closure runs once, and
    `OptimizerPipeline` reduces the gradients. Then buckets are stepped, in gather
    order, with the options that the parameter groups have now. A run is one bucket or several small
    ones. `begin_step` steps all runs but the last with the `step` of the optimizer's class, and
    leaves the pieces of the last run in the groups for the call that the user has made.

    The state of the pieces is in `shards.state`. Outside a step `optimizer.state` is the user's
    dict, which is normally empty. State that `load_state_dict` puts there is moved to the pieces
    before the next step.

    Args:
        optimizer: The user's optimizer. Mutated: gets hooks of `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
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
        most = MAX_RUN_NUMEL_OF_DEVICES if saves_calls(self.device) else MAX_RUN_NUMEL
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

        After `load_state_dict` all earlier state of the pieces is dropped. Otherwise only pieces of
        parameters that are in `optimizer.state` get other state.
        """
        whole = self.optimizer.state
        was_loaded = self._was_loaded
        if was_loaded:
            self._forget()
        if not whole:
            return AdoptedState(False, False)
        brings_masters = False
        for piece in self.pieces:
            parameter = self.shards.parameters[piece.tensor_index]
            own = {
                key: cut_state(key, value, parameter, piece)
                for key, value in whole.get(parameter, {}).items()
            }
            master = own.pop(MASTER_KEY, None)
            if master is not None and piece.role.has_master:
                piece.parameter.copy_(master)
                piece.was_stepped = brings_masters = True
            if own:
                self.shards.state[piece.parameter] = own
        return AdoptedState(brings_masters, self._take_out(whole, was_loaded))

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
                weights = cut_state(MASTER_KEY, parameter.detach(), parameter, piece)
                piece.parameter.copy_(weights)
                piece.was_stepped = False

    def _warn_of_shards(self, optimizer: Optimizer) -> None:
        """Pre-hook of `state_dict`: warns once if sharded state is missing, except in `packed`."""
        own: Mapping[Any, Any] = self.shards.state if self.left is None else self.left.entries
        has_shards, is_filled = (any(s.values()) for s in (own, optimizer.state))
        if has_shards and not is_filled and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.state_dict() is without its state, which is sharded."
                " On all ranks, call trainer.save_checkpoint(path) to save it, or"
                " strategy.optimizer_state(optimizer, on_all_ranks=True) to get it whole. Under"
                " Fabric: fabric.save(path, state), or state_dict() of the optimizer it set up.",
                stacklevel=2,
            )

    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    @torch.no_grad()
    def _on_loaded(self, optimizer: Optimizer) -> None:
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
