"""The pieces of an optimizer's parameters that one rank steps, and the state that belongs to them.

`StateBetweenSteps` is what other code finds as `optimizer.state` between two steps.
"""

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple, NoReturn, cast
from zlib import crc32

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dear.bucket import Chunk, FlatBuffers, Piece, as_flat, cut_state, shard_pieces
from lightning_dear.optimizers.masters import MASTER_KEY

NAMES = "param_names"
"""Key of a parameter group with the parameters' names, if the optimizer was given names."""


def parameters_of(*optimizers: optim.Optimizer) -> list[nn.Parameter]:
    """All parameters in the groups of optimizers, frozen ones too, in their order. Local."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return [parameter for group in groups for parameter in group["params"]]


def group_numbers(optimizer: optim.Optimizer) -> dict[Tensor, int]:
    """Returns: parameter -> index of its group, for all of an optimizer's, frozen ones too."""
    groups = enumerate(optimizer.param_groups)
    return {one: number for number, group in groups for one in group["params"]}


def names_of(optimizer: optim.Optimizer) -> dict[int, str]:
    """Returns the names of an optimizer's parameters, by the `id` of each. Empty without names."""
    named = (zip(one["params"], one.get(NAMES, ()), strict=False) for one in optimizer.param_groups)
    return {id(one): name for one, name in chain.from_iterable(named)}


def put_into(group: dict[str, Any], tensors: list[Any], names: Mapping[int, str]) -> None:
    """Makes `tensors` the parameters of a group, which gets their names if it has names.

    Args:
        group: Parameter group of an optimizer. Mutated.
        tensors: Its new parameters.
        names: `id` of a tensor -> its name. Other tensors get the name "".
    """
    group["params"] = tensors
    if NAMES in group:
        group[NAMES] = [names.get(id(one), "") for one in tensors]


def is_uncuttable(value: Any, parameter: Tensor) -> bool:
    """Whether `value`, an attribute of `parameter`, is a tensor that cannot be cut with it."""
    return isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape


def carry_attributes(pieces: Iterable[Piece], parameters: Sequence[nn.Parameter]) -> None:
    """Gives each piece the attributes that other code has put on its parameter.

    A tensor with an element for each element of the parameter is cut, and copied.

    Raises:
        RuntimeError: If an attribute is another tensor with several elements, which cannot be cut.
    """
    for piece in pieces:
        parameter = parameters[piece.tensor_index]
        for key, value in vars(parameter).items():
            if is_uncuttable(value, parameter):
                raise RuntimeError(
                    f"The attribute '{key}' of a parameter is a tensor of another shape than the"
                    " parameter, so that it cannot be cut. Use gather='gradients', which steps"
                    " whole tensors, or expand it to the parameter's shape."
                )
            setattr(piece.parameter, key, cut_state(key, value, parameter, piece))


@dataclass(frozen=True)
class Shards:
    """One optimizer's parameters under one plan, and this rank's pieces of them.

    Attributes:
        buffers: Flat buffers of the plan. They have no buckets before the first and after the last.
        parameters: Parameters that the optimizer trains, by parameter index.
        layouts: (shape, strides) of each parameter. State is stored in the order of these strides.
        group_of: Parameter index -> index of its parameter group.
        names: `id` of `Piece.parameter` -> name of the parameter in its group's "param_names".
        in_bucket: Bucket number -> this rank's pieces of the bucket.
        state: Optimizer state of the pieces, keyed by `Piece.parameter`.
    """

    buffers: FlatBuffers = field(default_factory=lambda: FlatBuffers([], []))
    parameters: Sequence[nn.Parameter] = ()
    layouts: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    group_of: Sequence[int] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    in_bucket: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))


class SpreadState(NamedTuple):
    """Optimizer state by parameter, of which each rank has chunks.

    Attributes:
        entries: Parameter -> its state, the same on all ranks. A tensor with an element for each
            element of the parameter is replaced by a stand-in, which is on the meta device.
        chunks: (stand-in, this rank's chunks of the tensor), in the same order on all ranks.
    """

    entries: Mapping[nn.Parameter, dict[str, Any]]
    chunks: list[tuple[Tensor, list[Chunk]]]

    def take(self, key: str, of: Set[nn.Parameter]) -> "SpreadState":
        """Removes the state under `key` of the parameters `of`, and returns it. Mutates `self`."""
        entries = [(one, its) for one, its in self.entries.items() if one in of and key in its]
        own = {one: {key: its.pop(key)} for one, its in entries}
        taken = {id(its[key]) for its in own.values()}
        chunks = [one for one in self.chunks if id(one[0]) in taken]
        self.chunks[:] = [one for one in self.chunks if id(one[0]) not in taken]
        return SpreadState(own, chunks)


_KNOWN_READERS = (
    "lightning_dear.",
    "torch.optim.optimizer",
    "lightning.fabric.utilities.optimizer",
    "lightning_fabric.utilities.optimizer",
)
"""Modules that may read `optimizer.state` at any time, and know what is not there: torch's
`state_dict` and pickling of optimizers, and Lightning's move of state to a device."""


def _is_known_reader() -> bool:
    """Tells whether the code that calls this file is in `_KNOWN_READERS`."""
    frame: FrameType | None = sys._getframe()
    passed = (__name__, "collections.abc", "_collections_abc")
    while frame is not None and frame.f_globals.get("__name__") in passed:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_KNOWN_READERS)


def _reader(name: str) -> Any:
    """Returns a method of `StateBetweenSteps` that reads: dict's method `name`, after a check."""

    def read(self: "StateBetweenSteps", *args: Any) -> Any:
        self._check(*args)
        return getattr(self.plain, name)(*args)

    return read


class StateBetweenSteps(MutableMapping[Any, Any]):
    """`optimizer.state` between steps: reads of sharded state raise; the next step uses writes.

    With sharded state it holds the entries that other code has written since the last step, and the
    state of parameters in no bucket. With gathered gradients it holds all state. All methods are
    local. Its copies and pickles are plain dicts.

    Args:
        stepper: Decides which reads are refused.
        entries: The first entries.

    Attributes:
        plain: The entries, in the dict that the optimizer itself reads and writes.
        removed: Parameters, and other keys, whose state in the shards other code has removed.
        written: Words for an error message. Ranks compare them: they are equal if all ranks have
            written to the same keys.
    """

    def __init__(self, stepper: "SteppedPieces", entries: Mapping[Any, Any]) -> None:
        self._stepper, self.plain = stepper, defaultdict[Any, Any](dict, entries)
        self.removed: set[Any] = set()
        self.written, self._digest = "as the last step left it", 0

    def _check(self, key: Any = None, *_: Any) -> None:
        """Raises if other code may not read the entry of `key`. None means all entries."""
        if not _is_known_reader():
            self._stepper.check_read(key)

    def _note(self, what: str, key: Any = None) -> Set[Any]:
        """Notes a write of other code. Returns the keys that may have state in the shards."""
        if _is_known_reader():
            return frozenset()
        in_shards = self._stepper.before_write()
        held = enumerate(parameters_of(self._stepper.optimizer))
        place = next((number for number, one in held if one is key), -1)
        # A sum, since code may write in the order of a set, which differs between ranks.
        self._digest = (self._digest + crc32(f"{what} {place}".encode())) % (1 << 32)
        self.written = f"written by other code (hash {self._digest:08x})"
        return in_shards

    __getitem__, __contains__, __iter__, __len__, get, setdefault = map(
        _reader, ("__getitem__", "__contains__", "__iter__", "__len__", "get", "setdefault")
    )

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, _Removed):
            self._stepper.refuse_read()
        # An entry replaces the one in the shards, also if it is empty.
        self.removed.update({key} & self._note("put", key))
        self.plain[key] = value

    def pop(self, key: Any, *default: Any) -> Any:
        """Removes an entry. If it is in the shards, the result refuses all reads."""
        if key not in self._note("remove", key):
            return self.plain.pop(key, *default)
        self.removed.add(key)
        return self.plain.pop(key, _Removed(self._stepper, {}))

    __delitem__ = pop

    @override
    def clear(self) -> None:
        self.removed.update(self._note("clear"))
        self.plain.clear()

    @override
    def __reduce__(self) -> Any:
        self._stepper.before_copy()
        return self.plain.__reduce__()


class _Removed(StateBetweenSteps):
    """In place of an entry that was removed while it was in the shards: refuses all reads."""

    @override
    def _check(self, *_: Any) -> None:
        self._stepper.refuse_read()


class SteppedPieces(ABC):
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
        state_at_end: `optimizer.state` when the training ended. None means that it goes on. After
            a later load `optimizer.state` is another dict.
        outside: Is `optimizer.state` between steps, once the first step has begun.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state_at_end: Any = None
        self.outside = StateBetweenSteps(self, {})
        self.pieces: Sequence[Piece] = ()
        self.left: SpreadState | None = None
        self.shards = Shards()
        held = parameters_of(optimizer)
        self.device = held[0].device if held else torch.device("cpu")
        # Parameter index -> whether any rank had a gradient.
        self._used: Sequence[bool] = ()
        # The user's parameters (and their names) and state while pieces are in the optimizer.
        self._params: list[dict[str, Any]] | None = None
        self._state: Any = None
        # Numbers of the buckets whose pieces the optimizer's own step updates.
        self._last_run: Sequence[int] = ()
        self._hooks: Sequence[RemovableHandle] = ()

    def attach(self, buffers: FlatBuffers, parameters: Sequence[nn.Parameter]) -> None:
        """Makes this rank's pieces under a new plan, and forgets `left`. Local."""
        self.left = None
        in_bucket = {bucket.number: shard_pieces(bucket) for bucket in buffers.buckets}
        self.pieces = list(chain(*in_bucket.values()))
        group_of = [*map(group_numbers(self.optimizer).__getitem__, parameters)]
        known, names = names_of(self.optimizer), dict[int, str]()
        for piece in self.pieces:
            parameter = parameters[piece.tensor_index]
            piece.is_plain = parameter.is_contiguous() and piece.numel == parameter.numel()
            names[id(piece.parameter)] = known.get(id(parameter), "")
        self.device = parameters[0].device
        layouts = [(one.shape, one.stride()) for one in parameters]
        self.shards = Shards(buffers, parameters, layouts, group_of, names, in_bucket)

    def detach(self) -> None:
        """Drops the flat buffers and removes hooks. State stays readable through `state_of`."""
        for hook in self._hooks:
            hook.remove()
        self.drop_removed()
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
        return [one.parameter.grad for one in self.pieces if one.parameter.grad is not None]

    @contextmanager
    def on_shards(self, *extra: Tensor) -> Iterator[None]:
        """A context in which the optimizer has the tensors `extra`, and all pieces with state."""
        self._swap()
        try:
            self._put(self.shards.in_bucket)
            first = self.optimizer.param_groups[0]
            put_into(first, [*extra, *first["params"]], self.shards.names)
            yield
        finally:
            self.restore()

    def _put(self, numbers: Iterable[int]) -> None:
        shards = self.shards
        groups: list[list[Tensor]] = [[] for _ in self.optimizer.param_groups]
        for piece in chain.from_iterable(shards.in_bucket[number] for number in numbers):
            groups[shards.group_of[piece.tensor_index]].append(piece.parameter)
        for group, tensors in zip(self.optimizer.param_groups, groups, strict=True):
            put_into(group, tensors, shards.names)

    def _set_params_aside(self) -> None:
        groups = self.optimizer.param_groups
        self._params = [{k: one[k] for k in ("params", NAMES) if k in one} for one in groups]

    def _swap(self) -> None:
        carry_attributes(self.pieces, self.shards.parameters)
        self._set_params_aside()
        self._state, self.optimizer.state = self.optimizer.state, self.shards.state

    def restore(self) -> None:
        """Puts the user's parameters and state back, if pieces have taken their place."""
        if self._params is None:
            return
        # Groups that the user has added after a step that raised stay as they are.
        groups = self.optimizer.param_groups[: len(self._params)]
        for group, own in zip(groups, self._params, strict=True):
            group.update(own)
        if self._state is not None:
            # Read back, because a step may assign a new object to `optimizer.state`.
            self.shards = replace(self.shards, state=self.optimizer.state)
            self.optimizer.state = self._state
        self._params = self._state = None
        self._last_run = ()
        self.guard()

    def note_written(self) -> None:
        """Notes that other code may have written to the pieces in the block of `on_shards`."""
        for piece in self.pieces:
            piece.was_stepped = True
        torch.autograd.graph.increment_version(list(self.shards.parameters))

    # --- `optimizer.state` between steps ----------------------------------------------------------

    def guard(self) -> StateBetweenSteps:
        """Makes `outside` the optimizer's state, with the present entries. Idempotent."""
        state: Any = self.optimizer.state
        if self.is_replaced and state is not self.outside.plain:
            self.outside = StateBetweenSteps(self, state)
        self.optimizer.state = cast(Any, self.outside)
        return self.outside

    @property
    def is_replaced(self) -> bool:
        """Whether other code has put another dict in the place of `outside`."""
        return cast(Any, self.optimizer.state) is not self.outside

    @property
    def written(self) -> str:
        """Part of a sentence: what other code has written to `optimizer.state`."""
        return "another dict" if self.is_replaced else self.outside.written

    def drop_removed(self) -> None:
        """Drops the state in shards that other code has removed from `optimizer.state`.

        If it has put another dict there, also after the end of the training, drops all.
        """
        if self.is_replaced and self.optimizer.state is not self.state_at_end:
            self.shards.state.clear()
        removed, parameters = self.outside.removed, self.shards.parameters
        pieces = self.pieces if removed else ()
        gone = [one.parameter for one in pieces if parameters[one.tensor_index] in removed]
        for key in (*gone, *removed):
            self.shards.state.pop(key, None)
        removed.clear()

    @abstractmethod
    def check_read(self, key: Any) -> None:
        """Raises if other code may not read an entry of `outside` now, or (None) all of them."""

    @abstractmethod
    def before_write(self) -> Set[Any]:
        """Prepares `outside` for a write of other code; returns keys that have state in shards."""

    def before_copy(self) -> None:
        """Prepares `outside` for a copy or a pickle, which has no state that is in shards."""
        self.before_write()

    def refuse_read(self) -> NoReturn:
        """Raises the error for a read of state that is in shards."""
        kind = type(self.optimizer).__name__
        what = (
            f"The state of this {kind} was read between steps, and each rank has only pieces of it."
            " Put the code that reads it into `with strategy.on_shards(optimizer):`, where groups,"
            " state and .grad are this rank's pieces. Or call"
            if self.state_at_end is None
            else f"The training of this {kind} has ended, and each rank has only pieces of its"
            " state. To step on, begin another fit, or load a checkpoint into another optimizer."
            " To read the state, call"
        )
        raise RuntimeError(
            f"{what} strategy.optimizer_state(optimizer, on_all_ranks=True), on all ranks, for a"
            " state dict with whole tensors."
        )
