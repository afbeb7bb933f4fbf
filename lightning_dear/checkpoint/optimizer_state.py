"""Sharded optimizer state in torch's ordinary format: by parameter number, whole or as it lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.bucket import Piece
from lightning_dear.collectives.work import STATE_NUMBERS, Collectives
from lightning_dear.optimizers.sharded import OptimizerShards
from lightning_dear.planning.plan import BucketPlan, BucketSpec

CLASS = "optimizer_class"
"""Key in a state dict: the name of the class that has written it."""

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


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of a tensor, in storage order.

    Attributes:
        start: Number of the first one.
        values: The elements; of any shape, without gaps.
    """

    start: int
    values: Tensor


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
            "This optimizer state is sharded and cannot be pickled or copied: save it with"
            " trainer.save_checkpoint, or leave out save_distributed_checkpoint=True."
        )


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
def whole_state(
    sharded: OptimizerShards,
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    collectives: Collectives,
) -> dict[Tensor, dict[str, Any]]:
    """Parameter -> its whole state; parameters never stepped are left out. Collective, blocks.

    Needs memory for the whole state on each rank.
    """
    described = _describe(sharded, collectives)
    whole = _undescribed(described, parameters)
    for number, spec in enumerate(plan.buckets):
        for key, dtype in _cut_entries(spec, described):
            shard = _fill_shard(sharded, number, spec, key, dtype)
            if number not in plan.all_reduced:
                collectives.launch_all_gather(shard, STATE_NUMBERS + number).wait()
            for part in spec.slices:
                target = whole.get(part.tensor, {}).get(key)
                if isinstance(target, Tensor) and target.dtype == dtype:
                    flat = target.as_strided((target.numel(),), (1,))
                    flat[part.start : part.stop] = shard[part.offset : part.offset + part.numel]
    return {parameters[index]: entries for index, entries in whole.items()}


@torch.no_grad()
def sharded_state(
    sharded: OptimizerShards, parameters: Sequence[Parameter], collectives: Collectives
) -> ShardedState:
    """The optimizer's state as it lies. Collective, blocks; moves descriptions, no state.

    The chunks are views of the state that the optimizer works on: save before the next step.

    Args:
        sharded: With its state adopted.
        parameters: The engine's list, by `Piece.tensor_index`.
        collectives: Of the pipeline.
    """
    described = _describe(sharded, collectives)
    state = _undescribed(described, parameters, place="meta")
    chunks: dict[tuple[int, str], list[Chunk]] = {
        (index, key): []
        for index, entries in described.items()
        for key, value in entries.items()
        if isinstance(value, PerElement)
    }
    for piece in sharded.pieces:
        for key, value in sharded.state_of(piece).items():
            if (piece.tensor_index, key) in chunks:
                chunks[piece.tensor_index, key].append(Chunk(piece.start, value))
    own_state = packed(sharded.optimizer, {parameters[index]: own for index, own in state.items()})
    stand_ins = [(state[index][key], own) for (index, key), own in chunks.items()]
    return ShardedState(own_state, stand_ins, parameters)


def packed(optimizer: Optimizer, state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """`optimizer.state_dict()` as if it had `state` too, ordered by parameter number."""
    # torch numbers parameters inside `state_dict` alone, so that it is lent the state.
    whole = {**optimizer.state, **state}
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


def _describe(sharded: OptimizerShards, collectives: Collectives) -> Described:
    """What state there is, on whatever rank, without the sharded values. Collective, blocks."""
    own = {
        piece.tensor_index: {key: _described(value, piece) for key, value in entries.items()}
        for piece in sharded.pieces
        if (entries := sharded.state_of(piece))
    }
    everyones = collectives.all_gather_object(own)
    merged = {index: entries for one in everyones for index, entries in one.items()}
    return dict(sorted(merged.items()))


def _described(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return PerElement(value.dtype)
    # It is pickled for other ranks, which may not have the device that it is on.
    return Scalar(value.cpu(), value.device.type == "cpu")


def _undescribed(
    described: Described, parameters: Sequence[Parameter], place: str | None = None
) -> Described:
    """What is described, where it came from. Tensors with a value per element are without values.

    `place` is where those are made; None: where their parameters are.
    """

    def made(value: Any, like: Parameter) -> Any:
        if isinstance(value, PerElement):
            return torch.empty_like(like, dtype=value.dtype, device=place, requires_grad=False)
        if isinstance(value, Scalar):
            return value.value if value.is_on_cpu else value.value.to(like.device)
        return value

    return {
        index: {key: made(value, parameters[index]) for key, value in entries.items()}
        for index, entries in described.items()
    }


def _cut_entries(spec: BucketSpec, described: Described) -> Iterable[tuple[str, torch.dtype]]:
    """Key and dtype of all state with a value per element that a bucket's tensors have; once."""
    return dict.fromkeys(
        (key, value.dtype)
        for part in spec.slices
        for key, value in described.get(part.tensor, {}).items()
        if isinstance(value, PerElement)
    )


def _fill_shard(
    sharded: OptimizerShards, number: int, spec: BucketSpec, key: str, dtype: torch.dtype
) -> Tensor:
    """A buffer as long as the bucket whose own shard holds this rank's values of `key`."""
    buffer = torch.zeros(spec.padded_numel, dtype=dtype, device=sharded.device)
    for piece in sharded.shards.in_bucket[number]:
        value = sharded.state_of(piece).get(key)
        if isinstance(value, Tensor) and value.dtype == dtype:
            buffer[piece.offset : piece.offset + piece.numel] = value
    return buffer
