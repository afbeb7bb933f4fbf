"""Sharded optimizer state back in torch's ordinary format: whole tensors by parameter number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import Piece
from lightning_dear.planning.plan import BucketPlan, BucketSpec
from lightning_dear.sharded_optimizer import ShardedOptimizer
from lightning_dear.work import Collectives

Described = dict[int, dict[str, Any]]
"""Tensor index -> state key -> `_PerElement`, `_Scalar`, or a value that is no tensor."""


@dataclass(frozen=True)
class _PerElement:
    """Stands for a tensor with one value per element, of which each rank has its pieces."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Scalar:
    """A tensor that all ranks have alike (`step`), on the CPU, and whether it came from there."""

    value: Tensor
    is_on_cpu: bool


def consolidate(
    sharded: ShardedOptimizer,
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    collectives: Collectives,
) -> dict[str, Any]:
    """The optimizer's `state_dict()` as if it had never been sharded, on every rank.

    Collective: all ranks call. Blocks. Needs memory for the whole state on each rank.
    """
    state = whole_state(sharded, plan, parameters, collectives)
    optimizer = sharded.optimizer
    own, optimizer.state = optimizer.state, defaultdict(dict, {**optimizer.state, **state})
    try:
        packed = optimizer.state_dict()
        return {**packed, "state": dict(sorted(packed["state"].items()))}
    finally:
        optimizer.state = own


@torch.no_grad()
def whole_state(
    sharded: ShardedOptimizer,
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    collectives: Collectives,
) -> dict[Tensor, dict[str, Any]]:
    """Parameter -> its whole state; parameters never stepped are left out. Collective, blocks."""
    described = _agree(_describe(sharded), collectives)
    whole: dict[int, dict[str, Any]] = {
        index: {
            key: _unpack(value, parameters[index], sharded.device) for key, value in entries.items()
        }
        for index, entries in described.items()
    }
    for number, spec in enumerate(plan.buckets):
        for key, dtype in _cut_entries(spec, described):
            shard = _fill_shard(sharded, number, spec, key, dtype)
            collectives.launch_all_gather(shard, number).wait()
            for part in spec.slices:
                target = whole.get(part.tensor, {}).get(key)
                if isinstance(target, Tensor) and target.dtype == dtype:
                    flat = target.as_strided((target.numel(),), (1,))
                    flat[part.start : part.stop] = shard[part.offset : part.offset + part.numel]
    return {parameters[index]: entries for index, entries in whole.items()}


def _pack(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return _PerElement(value.dtype)
    return _Scalar(value.cpu(), value.device.type == "cpu")


def _unpack(packed: Any, parameter: Parameter, device: torch.device) -> Any:
    if isinstance(packed, _PerElement):
        return torch.empty_like(parameter, dtype=packed.dtype, requires_grad=False)
    if isinstance(packed, _Scalar):
        return packed.value if packed.is_on_cpu else packed.value.to(device)
    return packed


def _describe(sharded: ShardedOptimizer) -> Described:
    described: Described = {}
    for piece in sharded.pieces:
        entries = sharded.state_of(piece)
        if entries:
            described[piece.tensor_index] = {
                key: _pack(value, piece) for key, value in entries.items()
            }
    return described


def _agree(described: Described, collectives: Collectives) -> Described:
    merged: Described = {}
    for one in collectives.all_gather_object(described):
        merged.update(one)
    return dict(sorted(merged.items()))


def _cut_entries(spec: BucketSpec, described: Described) -> Iterator[tuple[str, torch.dtype]]:
    entries = {
        (key, value.dtype): None
        for part in spec.slices
        for key, value in described.get(part.tensor, {}).items()
        if isinstance(value, _PerElement)
    }
    yield from entries


def _fill_shard(
    sharded: ShardedOptimizer, number: int, spec: BucketSpec, key: str, dtype: torch.dtype
) -> Tensor:
    """A buffer as long as the bucket whose own shard holds this rank's values of `key`."""
    buffer = torch.zeros(spec.padded_numel, dtype=dtype, device=sharded.device)
    for piece in sharded.pieces_in(number):
        value = sharded.state_of(piece).get(key)
        if isinstance(value, Tensor) and value.dtype == dtype:
            buffer[piece.offset : piece.offset + piece.numel] = value
    return buffer
