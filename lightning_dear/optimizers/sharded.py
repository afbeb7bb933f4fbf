"""The user's optimizer, stepped on this rank's shards: 1/world_size of the work and of the state.

The user's parameter groups always hold the user's parameters. Only from the end of the closure to
the end of the inner step do pieces of them, bucket by bucket, stand in their place.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear import private_names
from lightning_dear.bucket import Chunk, FlatBuffers, Piece, as_flat, cut_state, shard_pieces
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState, differs, undo_casts
from lightning_dear.torch_modes import saves_calls

# A call of the optimizer costs as much as stepping so many elements.
MAX_RUN_NUMEL = 1 << 16
"""Elements of shards that are stepped at once on a CPU."""

MAX_RUN_NUMEL_OF_DEVICES = 1 << 23
"""The same on accelerators, which step some tens of elements in a nanosecond."""

_PROFILED: Any = private_names.PROFILED_STEP.of(Optimizer)(print)
"""What torch makes of a class's `step`, by its code: it calls the hooks around it."""

_STEP_HOOKS = (private_names.STEP_PRE_HOOKS.name, private_names.STEP_POST_HOOKS.name)


def inner_step(optimizer: Optimizer, **arguments: Any) -> None:
    """Calls the class's own `step`, without the hooks and profiling that torch wraps around it.

    Nor are hooks called by a `super().step()` within.
    """
    step: Any = type(optimizer).step
    own = step.__wrapped__ if getattr(step, "__code__", None) is _PROFILED.__code__ else step
    hooks = {name: vars(optimizer)[name] for name in _STEP_HOOKS}
    vars(optimizer).update(dict.fromkeys(_STEP_HOOKS, {}))
    try:
        own(optimizer, **arguments)
    finally:
        vars(optimizer).update(hooks)


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the hook that asks was called by a step that another step of `optimizer` has called.

    That is a subclass's `super().step()`: torch wraps both, once there was an object of the plain
    class. Told by the stack, since of a step that raised no hook hears the end.
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
    """Warns, once, that gradients are cleared and not zeroed."""
    warnings.warn(
        f"{type(optimizer).__name__}.zero_grad(set_to_none=False) does what set_to_none=True does"
        " under strategy='dear': a parameter that the next step does not use is left alone, while"
        " momentum and weight decay would go on with zeros. Leave set_to_none out.",
        stacklevel=3,
    )


def closure_skipped(optimizer: Optimizer) -> RuntimeError:
    """What is raised after a step that has updated parameters before there were gradients."""
    return RuntimeError(
        f"{type(optimizer).__name__}.step() did not call its closure, so strategy='dear'"
        " could not reduce the gradients; call the closure before the update."
    )


@dataclass(frozen=True)
class Shards:
    """What of an optimizer's parameters is this rank's under one plan.

    Attributes:
        buffers: The plan's; of no buckets before the first plan and after the last.
        parameters: All that the optimizer trains, in the order of their numbers.
        layouts: The shape and the strides of each, in whose order its state lies.
        group_of: Number of a parameter -> that of its parameter group.
        in_bucket: Number of a bucket -> this rank's pieces of it.
        state: The optimizer's, by piece.
    """

    buffers: FlatBuffers = field(default_factory=lambda: FlatBuffers([], []))
    parameters: Sequence[Parameter] = ()
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    group_of: Sequence[int] = ()
    in_bucket: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class SpreadState:
    """An optimizer's state, of which each rank has parts.

    Attributes:
        entries: Parameter -> its state, the same on all ranks. Tensors on the meta device stand for
            those with a number for each element.
        chunks: (stand-in, this rank's chunks of it), in one order on all ranks.
    """

    entries: Mapping[Parameter, dict[str, Any]]
    chunks: list[tuple[Tensor, list[Chunk]]]

    def take(self, key: str, of: Set[Parameter]) -> SpreadState:
        """What those parameters have under `key`, taken out of both."""
        entries = [(one, its) for one, its in self.entries.items() if one in of and key in its]
        own = {one: {key: its.pop(key)} for one, its in entries}
        taken = {id(its[key]) for its in own.values()}
        chunks = [one for one in self.chunks if id(one[0]) in taken]
        self.chunks[:] = [one for one in self.chunks if id(one[0]) not in taken]
        return SpreadState(own, chunks)


class OptimizerShards:
    """This rank's pieces of an optimizer's parameters, with their mean gradients.

    For norms, clipping and loss scales, whoever steps what. `OptimizerPipeline` drives it.

    Args:
        optimizer: The user's. Its groups are mutated within `on_shards` and within a step only.

    Attributes:
        optimizer: The user's.
        shards: What is this rank's at present.
        left: State that an earlier plan has left for the next one; None: nothing.
        pieces: This rank's, bucket by bucket.
        device: Where the parameters were when the plan began, which is where ranks meet for their
            state; after a fit Lightning moves them to the CPU.
        stepped_early: Numbers of the buckets that this step's closure has stepped already.
        state_at_end: What `optimizer.state` was when the training ended: another one was loaded.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state_at_end: Any = None
        self.pieces: Sequence[Piece] = ()
        self.left: SpreadState | None = None
        self.shards = Shards()
        held = (one for group in optimizer.param_groups for one in group["params"])
        self.device = next((one.device for one in held), torch.device("cpu"))
        self.stepped_early: set[int] = set()
        # Which parameters have a mean gradient.
        self._used: Sequence[bool] = ()
        # What a step has taken out of the optimizer, to be put back.
        self._params: list[list[Parameter]] | None = None
        self._state: defaultdict[Tensor, Any] | None = None
        # Numbers of the buckets that the call under way steps.
        self._last_run: Sequence[int] = ()
        self._hooks: Sequence[RemovableHandle] = ()

    def attach(self, buffers: FlatBuffers, parameters: Sequence[Parameter]) -> None:
        """Takes over this rank's pieces of the optimizer's parameters."""
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
        """Lets go of the flat buffers; state stays readable through `state_of`.

        Gives the optimizer's methods back their ordinary meaning.
        """
        for hook in self._hooks:
            hook.remove()
        self.state_at_end = self.optimizer.state
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for piece in self.pieces:
            kept = self.shards.state.get(piece.parameter)
            piece.gradient = None
            # State is found by this tensor, which as a view would hold the whole flat buffer.
            if not piece.role.has_master:
                piece.parameter = torch.empty(0)
            if kept:
                state[piece.parameter] = kept
        self.shards = replace(self.shards, buffers=FlatBuffers([], []), state=state)

    def state_of(self, piece: Piece) -> Mapping[str, Any]:
        """The optimizer's state for `piece`; empty if it has not been stepped.

        With the fp32 master under MASTER_KEY, once it may differ from the parameter. (torch's
        optimizers take a parameter that has any state for one that they have stepped.)
        """
        state: Mapping[str, Any] = self.shards.state.get(piece.parameter, {})
        if piece.role.has_master and (state or piece.was_stepped):
            return {**state, MASTER_KEY: piece.parameter}
        return state

    def leave(self, left: SpreadState | None) -> None:
        """Lets go of the pieces, whose plan has ended; `left` is what is kept of their state."""
        self.pieces, self.left, self.shards = (), left, Shards()

    # --- mean gradients -------------------------------------------------------------------------

    def set_gradients(self, used: Sequence[bool]) -> None:
        """Gives each piece its part of the mean gradient, and none where nobody had one."""
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
        """World size 1: the piece's part of its parameter's gradient, in storage order; a view."""
        parameter = self.shards.parameters[piece.tensor_index]
        assert parameter.grad is not None
        # Once for all pieces, each of which `as_flat` would else copy the whole gradient for.
        if parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        return as_flat(parameter.grad, parameter.stride())[piece.start : piece.stop]

    def clear_gradients(self) -> None:
        """Lets go of the pieces' gradients, which would stand beside those of the next backward."""
        for piece in self.pieces:
            piece.parameter.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The pieces' gradients, where there are any."""
        gradients = (piece.parameter.grad for piece in self.pieces)
        return [gradient for gradient in gradients if gradient is not None]

    @contextmanager
    def on_shards(self, *extra: Tensor) -> Iterator[None]:
        """Puts all pieces, and `extra` in front of them, into the optimizer's groups meanwhile."""
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
        """Puts the user's parameters and state back, also after a step that raised half-way."""
        if self._params is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._params, strict=True):
            group["params"] = parameters
        if self._state is not None:
            # Perhaps another object: an optimizer may make its state anew.
            self.shards = replace(self.shards, state=self.optimizer.state)
            self.optimizer.state = self._state
        self._params = self._state = None
        self._last_run = ()


class ShardedOptimizer(OptimizerShards):
    """Steps the user's optimizer on the pieces, bucket by bucket within one call of its `step`.

    `optimizer.step(closure)` keeps its meaning for whoever calls it: the closure runs once, then
    `OptimizerPipeline` reduces, then every bucket is stepped, in gather order, with the group's
    options at that moment. The class's own step runs for each run of buckets but the last (`run`).
    The pieces of the last one are left in the groups for the call under way, which `finish` ends.

    State lives here, by piece. `optimizer.state` is the user's dict outside a step, and normally
    empty. What is put into it (`load_state_dict`) is taken over before the next step.

    Args:
        optimizer: The user's. Mutated: hooks of `load_state_dict`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._was_loaded = self._has_warned = False
        # Not among `_hooks`: after the training the state is still here.
        optimizer.register_state_dict_pre_hook(self._warn_of_shards)
        self._loading: dict[str, Any] | None = None
        self._hooks = (
            optimizer.register_load_state_dict_pre_hook(self._on_loading),
            optimizer.register_load_state_dict_post_hook(self._on_loaded),
        )

    # --- the step -------------------------------------------------------------------------------

    def run(self, order: Iterable[int]) -> Iterator[Sequence[int]]:
        """Steps the buckets of `order`, in runs; yields each run's numbers once it is stepped.

        Leaves the last run to the call of `optimizer.step` that is under way. Whoever iterates
        calls `restore` if anything raises.
        """
        wanted = dict.fromkeys((*order, *self.shards.in_bucket))
        late = [number for number in wanted if number not in self.stepped_early]
        most = MAX_RUN_NUMEL_OF_DEVICES if saves_calls(self.device) else MAX_RUN_NUMEL
        *head, last = step_runs(late, self.shards.in_bucket, most)
        self._swap()
        for numbers in head:
            self._put(numbers)
            inner_step(self.optimizer)
            self._note_stepped(numbers)
            yield numbers
        self._put(last)
        self._last_run = last

    def finish(self) -> Sequence[int]:
        """The call under way has stepped the last run; returns its numbers.

        Raises:
            RuntimeError: If it stepped before there were gradients.
        """
        if not self._last_run:
            raise closure_skipped(self.optimizer)
        numbers, self._last_run = self._last_run, ()
        self._note_stepped(numbers)
        return numbers

    def step_early(self, number: int) -> None:
        """Steps bucket `number`, whose gradient is reduced, within the closure of a step.

        The rest of the step then leaves it out. All its parameters must have been used.
        """
        for piece in self.shards.in_bucket[number]:
            piece.parameter.grad = piece.gradient
        self._swap()
        # First: should the step raise, part of the state may be new.
        self.stepped_early.add(number)
        try:
            self._put([number])
            inner_step(self.optimizer)
            self._note_stepped([number])
        finally:
            self.restore()

    def _note_stepped(self, numbers: Sequence[int]) -> None:
        parameters = self.shards.parameters
        for number in numbers:
            pieces = self.shards.in_bucket[number]
            stepped = [piece for piece in pieces if piece.parameter.grad is not None]
            for piece in stepped:
                piece.was_stepped = True
            if self.shards.buffers.buckets[number].is_stepped_whole:
                # No gather will tell autograd that what it saved of these is no longer there.
                changed = [parameters[piece.tensor_index] for piece in stepped]
                torch.autograd.graph.increment_version(changed)

    # --- state ----------------------------------------------------------------------------------

    def adopt_state(self) -> AdoptedState:
        """Cuts state that stands in `optimizer.state` under whole parameters into pieces.

        Takes the managed parameters' state out of `optimizer.state`. After a `load_state_dict`
        what the pieces had before is forgotten, otherwise only what is given replaces it.

        Masters of weights that were written to after loading are lost: writes win.
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
        """Takes the managed parameters' state out of `whole`; says whether a master is lost.

        Of 16 bits those are lost, too, that were loaded and do not round to their weights.
        """
        is_lost, buffers = False, self.shards.buffers
        for parameter, placement in zip(self.shards.parameters, buffers.placements, strict=True):
            home = buffers.buckets[placement.buckets[0]]
            master = whole.pop(parameter, {}).get(MASTER_KEY)
            if not home.role.has_master or (was_loaded and not home.role.lags):
                is_lost |= differs(master, parameter, is_rounded=home.role.has_master)
        return is_lost

    def _forget(self) -> None:
        """Back to before the first step: masters, which were of other weights, are the weights."""
        self._was_loaded = False
        self.shards.state.clear()
        for piece in self.pieces:
            if piece.role.has_master:
                parameter = self.shards.parameters[piece.tensor_index]
                weights = cut_state(MASTER_KEY, parameter.detach(), parameter, piece)
                piece.parameter.copy_(weights)
                piece.was_stepped = False

    def _warn_of_shards(self, optimizer: Optimizer) -> None:
        """Whoever wants the whole state lends it to `optimizer` while asking, see `packed`."""
        own: Mapping[Any, Any] = self.shards.state if self.left is None else self.left.entries
        has_shards, is_lent = (any(s.values()) for s in (own, optimizer.state))
        if has_shards and not is_lent and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.state_dict() is without its state, of which each rank"
                " has its shards elsewhere. All ranks call trainer.save_checkpoint(path) to save"
                " it, strategy.optimizer_state(optimizer, on_all_ranks=True) to have it whole, or"
                " under Fabric fabric.save(path, state) and state_dict() of what setup returned.",
                stacklevel=2,
            )

    def _on_loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    @torch.no_grad()
    def _on_loaded(self, optimizer: Optimizer) -> None:
        if self.left is not None:
            # It is of other weights.
            self.left = SpreadState({}, [])
        self._was_loaded = True
        loaded, self._loading = self._loading, None
        if loaded is not None:
            undo_casts(optimizer, loaded)


Pieces = Mapping[int, Sequence[Piece]]
"""Number of a bucket -> this rank's pieces of it."""


def step_runs(numbers: Sequence[int], pieces: Pieces, most: int) -> list[list[int]]:
    """Cuts a list of buckets into runs that one call of the optimizer steps, small ones together.

    Of at most `most` elements: the first gather of a run waits for the whole run.
    """
    runs: list[list[int]] = []
    room = 0
    for number in numbers:
        numel = sum(piece.stop - piece.start for piece in pieces[number])
        if not runs or numel > room:
            runs.append([])
            room = most
        runs[-1].append(number)
        room -= numel
    return runs
