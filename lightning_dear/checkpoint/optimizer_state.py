"""Sharded optimizer state in torch's ordinary format: by parameter number, whole or as it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.bucket import Chunk, Piece
from lightning_dear.checkpoint.moving import Item, Wanted, move
from lightning_dear.collectives.work import Collectives
from lightning_dear.optimizers.masters import MASTER_KEY, AdoptedState
from lightning_dear.optimizers.sharded import OptimizerShards, SpreadState

CLASS = "optimizer_class"
"""Key in a state dict: the name of the class that has written it."""

_WHOLE = -1
"""In the place of a bucket's number."""


@dataclass(frozen=True)
class Scalar:
    """Holds a tensor that all ranks have alike (`step`), and whether it came from the CPU."""

    value: Tensor
    is_on_cpu: bool


class ShardedState(dict[str, Any]):
    """Holds `optimizer.state_dict()`, with meta tensors in place of sharded ones.

    It can be looked at like the ordinary one, but only `folder.save` can write it.

    Args:
        packed: The state dict.
        chunks: (stand-in, this rank's chunks of it), for every stand-in in `packed`.
        parameters: The optimizer's, which all ranks hold alike.
    """

    def __init__(
        self,
        packed: Mapping[str, Any],
        chunks: Iterable[tuple[Tensor, list[Chunk]]],
        parameters: Sequence[Parameter],
    ) -> None:
        super().__init__(packed)
        self.chunks = tuple(chunks)
        self.parameters = parameters

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "This optimizer state is sharded, or whole on rank 0 alone, and cannot be pickled,"
            " copied or loaded: save it with trainer.save_checkpoint on all ranks. Without"
            " save_distributed_checkpoint=True strategy.optimizer_state(optimizer,"
            " on_all_ranks=True) is whole on all."
        )

    @override
    def copy(self) -> NoReturn:
        # What `load_state_dict` does first.
        self.__reduce_ex__(2)


def check_class(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuses the state of another optimizer; earlier versions and DDP do not say whose it is.

    Raises:
        ValueError: Naming both classes.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    saved = state_dict.get(CLASS, kinds[0])
    if saved not in kinds:
        raise ValueError(
            f"This is the state of {saved}, from which {kinds[0]} cannot go on: train with {saved},"
            f" or load the weights alone. To load it all the same, drop its key '{CLASS}'."
        )


@torch.inference_mode(False)
@torch.no_grad()
def spread_state(sharded: OptimizerShards, collectives: Collectives) -> SpreadState:
    """Returns the state as it lies. Collective, blocks; moves descriptions, no state.

    The chunks are views of the state that the optimizer works on, but for what a plan has left.
    """
    if sharded.left is not None:
        return sharded.left
    parts: defaultdict[int, list[tuple[Piece, Mapping[str, Any]]]] = defaultdict(list)
    for piece in sharded.pieces:
        if own := sharded.state_of(piece):
            parts[piece.tensor_index].append((piece, own))
    described = {
        index: {key: _described(value, piece) for key, value in own.items()}
        for index, pieces in parts.items()
        for piece, own in pieces
    }
    everyones = collectives.all_gather_object(described)
    merged = {index: entries for one in everyones for index, entries in one.items()}
    entries: dict[Parameter, dict[str, Any]] = {}
    chunks: list[tuple[Tensor, list[Chunk]]] = []
    for index, own in sorted(merged.items()):
        like, layout = sharded.shards.parameters[index], sharded.shards.layouts[index]
        entries[like] = {key: _restored(value, like, *layout) for key, value in own.items()}
        for key, value in entries[like].items():
            if _is_stand_in(value):
                here = [(piece.start, own[key]) for piece, own in parts[index] if key in own]
                fits = [Chunk(*one) for one in here if one[1].dtype == value.dtype]
                chunks.append((value, fits))
    return SpreadState(entries, chunks)


def sharded_state(sharded: OptimizerShards, collectives: Collectives) -> ShardedState:
    """Returns `spread_state` by the numbers of parameters: save before the next step."""
    spread = spread_state(sharded, collectives)
    parameters = sharded.shards.parameters or list(spread.entries)
    return ShardedState(packed(sharded.optimizer, spread.entries), spread.chunks, parameters)


@torch.no_grad()
def gathered(
    state: ShardedState, collectives: Collectives, device: torch.device, *, on_rank_0: bool
) -> dict[str, Any]:
    """Returns `state` with whole tensors, on the CPU, where sharded. Collective, blocks.

    Args:
        state: What `sharded_state` returns.
        collectives: Of the pipeline.
        device: Where ranks meet.
        on_rank_0: Whether other ranks get a `ShardedState` that nobody can save, instead.
    """
    if not state.chunks:
        return dict(state)
    holds = collectives.world.rank == 0 or not on_rank_0
    whole: dict[int, Tensor] = {}

    def made(stand_in: Tensor) -> Tensor:
        whole[id(stand_in)] = torch.zeros_like(stand_in, device="cpu")
        return whole[id(stand_in)]

    wanted = [[Wanted(0, one.numel(), partial(made, one))] * holds for one, _ in state.chunks]
    # Lists of their own: what is had stays where it is.
    parts = zip(state.chunks, wanted, strict=True)
    items = [Item(like.dtype, list(chunks), want) for (like, chunks), want in parts]
    move(items, collectives, device)
    return _filled(dict(state), whole) if holds else ShardedState(state, (), ())


def _filled(value: Any, whole: Mapping[int, Tensor]) -> Any:
    """`value` with whole tensors in the place of stand-ins, by their `id`."""
    if type(value) is dict:
        return {key: _filled(one, whole) for key, one in value.items()}
    return whole.get(id(value), value)


@torch.inference_mode(False)
@torch.no_grad()
def hand_on(
    left: SpreadState, sharded: OptimizerShards, known: set[Parameter], collectives: Collectives
) -> AdoptedState:
    """Moves what an earlier plan has left to whoever steps it now. Collective, blocks.

    The state of parameters that are in no plan is whole in `optimizer.state` afterwards, on every
    rank. What lies there already wins.

    Args:
        left: What is sent of its chunks is let go of.
        sharded: Mutated: of the new plan, or of none.
        known: The module's parameters; what was of others is forgotten.
        collectives: What moves the bytes.
    """
    pieces: defaultdict[Tensor, list[Piece]] = defaultdict(list)
    for piece in sharded.pieces:
        pieces[sharded.shards.parameters[piece.tensor_index]].append(piece)
    for one in known - set(sharded.shards.parameters):
        pieces[one] = [Piece(_WHOLE, 0, one.numel(), _WHOLE, 0, one, None)]
    chunks = {id(stand_in): own for stand_in, own in left.chunks}
    items: list[Item] = []
    new: list[tuple[Piece, dict[str, Any]]] = []
    for parameter, described in left.entries.items():
        _check_layout(parameter, described)
        places = [(piece, dict.fromkeys(described)) for piece in pieces[parameter]]
        for key, value in described.items():
            want = [wanted for place in places for wanted in _wanted(key, value, *place)]
            if _is_stand_in(value):
                items.append(Item(value.dtype, chunks[id(value)], want))
        new += places
    move(items, collectives, sharded.device)
    had_master: set[bool] = set()
    for piece, own in new:
        state = sharded.shards.state
        if piece.bucket == _WHOLE:
            state = sharded.optimizer.state
            own.update(state.get(piece.parameter, {}))
        elif MASTER_KEY in own:
            del own[MASTER_KEY]
            piece.was_stepped = piece.role.has_master
            had_master.add(piece.role.has_master)
        if own:
            state[piece.parameter] = own
    return AdoptedState(True in had_master, False in had_master)


def _check_layout(parameter: Parameter, described: Mapping[str, Any]) -> None:
    def layout(one: Tensor) -> list[tuple[int, int]]:
        return [own for own in zip(one.shape, one.stride(), strict=True) if own[0] != 1]

    if any(_is_stand_in(one) and layout(one) != layout(parameter) for one in described.values()):
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} has another shape or memory format than"
            " when its optimizer's state was made. Change these before the first fit, or with"
            " another optimizer; or save a checkpoint first, and resume from that."
        )


def _wanted(key: str, value: Any, piece: Piece, own: dict[str, Any]) -> list[Wanted]:
    """Puts what is described into a piece's own state; or returns what will be put there."""
    is_master = key == MASTER_KEY and piece.bucket != _WHOLE
    if not _is_stand_in(value):
        own[key] = value.clone() if isinstance(value, Tensor) else value
    if not _is_stand_in(value) or (is_master and not piece.role.has_master):
        return []
    # Beside fp32 masters state is fp32, see `cut_state`.
    is_cast = piece.role.has_master and value.is_floating_point()
    dtype = piece.parameter.dtype if is_cast else value.dtype

    def room() -> Tensor:
        like = piece.parameter
        made = like if is_master else torch.zeros_like(like, dtype=dtype, requires_grad=False)
        own[key] = made
        return made

    return [Wanted(piece.start, piece.stop, room)]


def packed(optimizer: Optimizer, state: Mapping[Parameter, Any]) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with `state` added, by number; its own wins."""
    # torch numbers parameters inside `state_dict` alone, so that it is lent the state.
    whole: dict[Any, Any] = dict(optimizer.state)
    # What somebody has put there since the state was left wins.
    whole.update((one, {**own, **whole.get(one, {})}) for one, own in state.items())
    held = {one for group in optimizer.param_groups for one in group["params"]}
    # Of those that left the groups it would say KeyError, and nobody could remove them here.
    for gone in {key for key in whole if isinstance(key, Tensor)} - held:
        del whole[gone]
    own, optimizer.state = optimizer.state, defaultdict(dict, whole)
    try:
        state_dict = optimizer.state_dict()
        return {**state_dict, "state": dict(sorted(state_dict["state"].items()))}
    finally:
        optimizer.state = own


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _described(value: Any, piece: Piece) -> Any:
    """For other ranks: of a tensor with a number for each element the dtype, else all of it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return value.dtype
    # It is pickled for other ranks, which may not have the device that it is on.
    return Scalar(value.cpu(), value.device.type == "cpu")


def _restored(value: Any, like: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """What was described, where it came from; a stand-in for what has a number for each element."""
    if isinstance(value, torch.dtype):
        return torch.empty_strided(shape, strides, dtype=value, device="meta")
    if isinstance(value, Scalar):
        return value.value.to("cpu" if value.is_on_cpu else like.device, copy=True)
    return value
