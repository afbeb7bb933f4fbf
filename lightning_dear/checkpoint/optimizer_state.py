"""Sharded optimizer state in torch's ordinary format: by parameter number, whole or as it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.bucket import Piece
from lightning_dear.checkpoint.moving import Chunk, Item, Wanted, move
from lightning_dear.collectives.work import Collectives
from lightning_dear.optimizers.masters import MASTER_KEY
from lightning_dear.optimizers.sharded import AdoptedState, LeftPiece, OptimizerShards

CLASS = "optimizer_class"
"""Key in a state dict: the name of the class that has written it."""

_IN_NO_PLAN = -1
"""In the place of a tensor's number in a plan."""

Described = dict[int, dict[str, Any]]
"""Tensor index -> state key -> `PerElement`, `Scalar`, or a value that is no tensor."""


@dataclass(frozen=True)
class PerElement:
    """Stands for a tensor with one value per element, of which each rank has its pieces."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Scalar:
    """A tensor that all ranks have alike (`step`), on the CPU, and whether it came from there."""

    value: Tensor
    is_on_cpu: bool


class ShardedState(dict[str, Any]):
    """`optimizer.state_dict()` in which tensors on the meta device stand for sharded ones.

    It can be looked at like the ordinary one, but only `folder.save` can write it.

    Args:
        packed: The state dict.
        chunks: (stand-in, this rank's chunks of it), for every stand-in in `packed`.
        parameters: The optimizer's, which all ranks hold alike.
    """

    def __init__(
        self,
        packed: Mapping[str, Any],
        chunks: Iterable[tuple[Tensor, Sequence[Chunk]]],
        parameters: Sequence[Parameter],
    ) -> None:
        super().__init__(packed)
        self.chunks = tuple(chunks)
        self.parameters = parameters

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "This optimizer state is sharded, or whole on rank 0 alone, and cannot be pickled,"
            " copied or loaded: save it with trainer.save_checkpoint on all ranks, or take the"
            " state from strategy.optimizer_state(optimizer), whole on every rank that calls."
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


@torch.no_grad()
def sharded_state(sharded: OptimizerShards, collectives: Collectives) -> ShardedState:
    """The optimizer's state as it lies. Collective, blocks; moves descriptions, no state.

    The chunks are views of the state that the optimizer works on: save before the next step.

    Args:
        sharded: With its state adopted.
        collectives: Of the pipeline.
    """
    parameters = sharded.shards.parameters
    pieces = [(piece, sharded.state_of(piece)) for piece in sharded.pieces]
    described, _ = _describe(pieces, (), collectives)
    state = {
        index: {key: _restored(value, parameters[index]) for key, value in entries.items()}
        for index, entries in described.items()
    }
    chunks = _chunks_of(pieces)
    own_state = packed(sharded.optimizer, {parameters[index]: own for index, own in state.items()})
    stand_ins = [
        (state[index][key], chunks[index, key])
        for index, entries in described.items()
        for key, value in entries.items()
        if isinstance(value, PerElement)
    ]
    return ShardedState(own_state, stand_ins, parameters)


@torch.no_grad()
def gathered(
    state: dict[str, Any], collectives: Collectives, device: torch.device, *, on_rank_0: bool
) -> dict[str, Any]:
    """`state` with whole tensors, on the CPU, where it was sharded. Collective, blocks.

    Args:
        state: What `sharded_state` returns, or what is whole already.
        collectives: Of the pipeline.
        device: Where ranks meet.
        on_rank_0: Whether other ranks get a `ShardedState` that nobody can save, instead.
    """
    if not isinstance(state, ShardedState):
        return state
    holds, cpu = collectives.rank == 0 or not on_rank_0, torch.device("cpu")
    whole: dict[int, Tensor] = {}

    def made(stand_in: Tensor) -> Tensor:
        whole[id(stand_in)] = torch.zeros_like(stand_in, device=cpu)
        return whole[id(stand_in)]

    items = [
        Item(
            stand_in.dtype,
            [chunk for chunk in chunks if chunk.values.dtype == stand_in.dtype],
            [Wanted(0, stand_in.numel(), partial(made, stand_in))] if holds else [],
        )
        for stand_in, chunks in state.chunks
    ]
    what = "the whole optimizer state, which save_distributed_checkpoint=True makes nowhere"
    move(items, collectives, device, cpu, what, is_copy=True)
    return _filled(dict(state), whole) if holds else ShardedState(state, (), ())


def _filled(value: Any, whole: Mapping[int, Tensor]) -> Any:
    """`value` with whole tensors in the place of stand-ins, by their `id`."""
    if type(value) is dict:
        return {key: _filled(one, whole) for key, one in value.items()}
    return whole.get(id(value), value)


@torch.no_grad()
def hand_on(
    left: list[LeftPiece],
    before: Sequence[Parameter],
    sharded: OptimizerShards,
    planned: Sequence[Parameter],
    known: Collection[Tensor],
    collectives: Collectives,
) -> AdoptedState:
    """Moves what an earlier plan has left to whoever steps it now. Collective, blocks.

    The state of parameters that are in no plan is whole in `optimizer.state` afterwards, on every
    rank. What lies there already wins.

    Args:
        left: This rank's; emptied, and let go of as it is sent.
        before: The parameters of that plan, by `Piece.tensor_index` in `left`.
        sharded: Mutated: the new plan's.
        planned: The new plan's parameters; of none where there is no plan.
        known: The module's parameters; what was of others is forgotten.
        collectives: What moves the bytes.
    """
    number_of = {one: number for number, one in enumerate(planned)}
    places = [number_of.get(one, _IN_NO_PLAN if one in known else None) for one in before]
    described, agreed = _describe(left, places, collectives)
    chunks = _chunks_of(left)
    left.clear()
    pieces: defaultdict[int | None, list[Piece]] = defaultdict(list)
    for piece in sharded.pieces:
        pieces[piece.tensor_index].append(piece)
    state, own = sharded.shards.state, sharded.optimizer.state
    items: list[Item] = []
    new: list[tuple[Piece, dict[str, Any]]] = []
    have_masters: list[bool] = []
    for index, entries in described.items():
        places = [(piece, {}) for piece in pieces[agreed[index]]]
        if agreed[index] == _IN_NO_PLAN:
            one = before[index]
            places = [(Piece(index, 0, one.numel(), _IN_NO_PLAN, 0, one, None), {})]
        elif MASTER_KEY in entries:
            have_masters += [piece.has_master for piece, _ in places]
        for key, value in entries.items():
            want = [wanted for place in places for wanted in _wanted(key, value, *place)]
            if isinstance(value, PerElement):
                items.append(Item(value.dtype, chunks.pop((index, key), []), want))
        new += places
    chunks.clear()
    device, what = sharded.device, "another plan of buckets, which fusion='threshold' never makes"
    move(items, collectives, device, device, what)
    for piece, entries in new:
        if piece.bucket == _IN_NO_PLAN:
            own[piece.parameter] = {**entries, **own.get(piece.parameter, {})}
        elif entries:
            state[piece.parameter] = entries
    return AdoptedState(any(have_masters), not all(have_masters))


def _wanted(key: str, value: Any, piece: Piece, entries: dict[str, Any]) -> list[Wanted]:
    """What of described state a piece wants; puts it into `entries`, or lets it be put there."""
    if not isinstance(value, PerElement):
        entries[key] = _restored(value, piece.parameter)
        return []
    if key == MASTER_KEY and piece.bucket != _IN_NO_PLAN:
        piece.was_stepped = piece.has_master
        own = Wanted(piece.start, piece.stop, lambda: piece.parameter)
        return [own] if piece.has_master else []
    # In its place among the others.
    entries[key] = None
    # Beside fp32 masters state is fp32, see `cut_state`.
    is_cast = piece.has_master and value.dtype.is_floating_point
    dtype = piece.parameter.dtype if is_cast else value.dtype

    def room() -> Tensor:
        entries[key] = torch.zeros_like(piece.parameter, dtype=dtype, requires_grad=False)
        return cast(Tensor, entries[key])

    return [Wanted(piece.start, piece.stop, room)]


def packed(optimizer: Optimizer, state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """`optimizer.state_dict()` as if it had `state` too, by parameter number; its own wins."""
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


def _describe(
    pieces: Iterable[LeftPiece], places: Sequence[int | None], collectives: Collectives
) -> tuple[Described, Sequence[int | None]]:
    """What state there is, on whatever rank, without the sharded values. Collective, blocks.

    And `places`, with None where ranks say different things.
    """
    own = {
        piece.tensor_index: {key: _described(value, piece) for key, value in entries.items()}
        for piece, entries in pieces
        if entries
    }
    everyones = collectives.all_gather_object((own, places))
    merged = {index: entries for one, _ in everyones for index, entries in one.items()}
    said = zip(*(places for _, places in everyones), strict=True)
    return dict(sorted(merged.items())), [one[0] if len(set(one)) == 1 else None for one in said]


def _described(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return PerElement(value.dtype)
    # It is pickled for other ranks, which may not have the device that it is on.
    return Scalar(value.cpu(), value.device.type == "cpu")


def _restored(value: Any, like: Tensor) -> Any:
    """What was described, where it came from; a tensor without values for one that is sharded."""
    if isinstance(value, PerElement):
        return torch.empty_like(like, dtype=value.dtype, device="meta", requires_grad=False)
    if isinstance(value, Scalar):
        return value.value.to("cpu" if value.is_on_cpu else like.device, copy=True)
    return value


def _chunks_of(pieces: Iterable[LeftPiece]) -> defaultdict[tuple[int, str], list[Chunk]]:
    """(Tensor index, state key) -> this rank's chunks of all state with a value per element."""
    chunks: defaultdict[tuple[int, str], list[Chunk]] = defaultdict(list)
    for piece, entries in pieces:
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == (piece.numel,):
                chunks[piece.tensor_index, key].append(Chunk(piece.start, value))
    return chunks
