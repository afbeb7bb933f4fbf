"""Sharded optimizer state back in torch's ordinary format: whole tensors by parameter number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_dear.bucket import Piece
from lightning_dear.collectives.work import STATE_NUMBERS, Collectives
from lightning_dear.optimizers.sharded import OptimizerShards
from lightning_dear.planning.plan import BucketPlan, BucketSpec

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

    def on(self, device: torch.device) -> Tensor:
        """The tensor where it came from: on the CPU or on `device`."""
        return self.value if self.is_on_cpu else self.value.to(device)


def consolidate(
    sharded: OptimizerShards,
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    collectives: Collectives,
) -> dict[str, Any]:
    """The optimizer's `state_dict()` as if it had never been sharded, on every rank.

    Collective: all ranks call. Blocks. Needs memory for the whole state on each rank.
    """
    return pack(sharded.optimizer, whole_state(sharded, plan, parameters, collectives))


def pack(optimizer: Optimizer, state: Mapping[Tensor, Any]) -> dict[str, Any]:
    """`optimizer.state_dict()` as if it had `state` too, ordered by parameter number."""
    # torch numbers parameters inside `state_dict` alone, so that it is lent the state.
    own, optimizer.state = optimizer.state, defaultdict(dict, {**optimizer.state, **state})
    try:
        packed = optimizer.state_dict()
        return {**packed, "state": dict(sorted(packed["state"].items()))}
    finally:
        optimizer.state = own


@torch.no_grad()
def whole_state(
    sharded: OptimizerShards,
    plan: BucketPlan,
    parameters: Sequence[Parameter],
    collectives: Collectives,
) -> dict[Tensor, dict[str, Any]]:
    """Parameter -> its whole state; parameters never stepped are left out. Collective, blocks."""
    described = describe(sharded, collectives)
    whole: dict[int, dict[str, Any]] = {
        index: {
            key: _undescribed(value, parameters[index], sharded.device)
            for key, value in entries.items()
        }
        for index, entries in described.items()
    }
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


def _described(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == (piece.numel,):
        return PerElement(value.dtype)
    # It is pickled for other ranks, which may not have the device that it is on.
    return Scalar(value.cpu(), value.device.type == "cpu")


def _undescribed(described: Any, parameter: Parameter, device: torch.device) -> Any:
    if isinstance(described, PerElement):
        return torch.empty_like(parameter, dtype=described.dtype, requires_grad=False)
    return described.on(device) if isinstance(described, Scalar) else described


def describe(sharded: OptimizerShards, collectives: Collectives) -> Described:
    """What state there is, on whatever rank, without the sharded values. Collective, blocks."""
    own: Described = {}
    for piece in sharded.pieces:
        entries = sharded.state_of(piece)
        if entries:
            own[piece.tensor_index] = {
                key: _described(value, piece) for key, value in entries.items()
            }
    merged: Described = {}
    for one in collectives.all_gather_object(own):
        merged.update(one)
    return dict(sorted(merged.items()))


def _cut_entries(spec: BucketSpec, described: Described) -> Iterator[tuple[str, torch.dtype]]:
    entries = {
        (key, value.dtype): None
        for part in spec.slices
        for key, value in described.get(part.tensor, {}).items()
        if isinstance(value, PerElement)
    }
    yield from entries


def _fill_shard(
    sharded: OptimizerShards, number: int, spec: BucketSpec, key: str, dtype: torch.dtype
) -> Tensor:
    """A buffer as long as the bucket whose own shard holds this rank's values of `key`."""
    buffer = torch.zeros(spec.padded_numel, dtype=dtype, device=sharded.device)
    for piece in sharded.pieces_in(number):
        value = sharded.state_of(piece).get(key)
        if isinstance(value, Tensor) and value.dtype == dtype:
            buffer[piece.offset : piece.offset + piece.numel] = value
    return buffer
