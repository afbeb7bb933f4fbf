"""What encoding has left to be sent, across plans, checkpoints and numbers of ranks.

Each rank keeps something of its own for every element of every parameter, and owners keep
something besides for their shards. In a state dict both stand beside the optimizer's state:

    residuals: worker: name -> parameter number -> [number of ranks, elements]
               owner:  name -> parameter number -> [elements]
               counts: half -> how often a bucket was encoded

Elements are in the order of the parameter's storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.checkpoint.sharded_state import Chunk
from lightning_dear.exchange import CodedBucket
from lightning_dear.planning.plan import Slice
from lightning_dear.work import STATE_NUMBERS, Collectives

KEY = "residuals"
"""In an optimizer's state dict."""

ByParameter = dict[Tensor, Tensor]


@dataclass
class Residuals:
    """What lies here, whole parameters each.

    Attributes:
        worker: Name -> parameter -> this rank's own numbers, flat.
        owner: Name -> parameter -> what owners keep, flat, the same on all ranks.
        counts: Half -> how often it was encoded.
    """

    worker: dict[str, ByParameter] = field(default_factory=dict)
    owner: dict[str, ByParameter] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@torch.no_grad()
def take_out(
    coded: Sequence[CodedBucket], parameters: Sequence[Parameter], collectives: Collectives
) -> Residuals:
    """Copies what is kept in `coded`, none of which may be pending. Collective, blocks."""
    taken = Residuals()
    for one in coded:
        taken.counts = dict(one.counts)
        for name, flat in one.worker.kept.items():
            _spread(one, flat, taken.worker.setdefault(name, {}), parameters)
        for name, shard in one.owner.kept.items():
            flat = shard.new_zeros(one.spec.padded_numel)
            flat[one.own] = shard
            number = STATE_NUMBERS + one.number
            collectives.launch_all_gather(flat, number).wait()
            _spread(one, flat, taken.owner.setdefault(name, {}), parameters)
    return taken


@torch.no_grad()
def put_in(
    coded: Sequence[CodedBucket], residuals: Residuals, parameters: Sequence[Parameter]
) -> None:
    """Overwrites what is kept in `coded`; what `residuals` do not know becomes 0. Local."""
    for one in coded:
        one.counts.update(residuals.counts)
        for name, flat in one.worker.kept.items():
            _collect(one, flat, residuals.worker.get(name, {}), parameters)
        for name, shard in one.owner.kept.items():
            flat = shard.new_zeros(one.spec.padded_numel)
            _collect(one, flat, residuals.owner.get(name, {}), parameters)
            shard.copy_(flat[one.own])


def _spread(
    one: CodedBucket, flat: Tensor, target: ByParameter, parameters: Sequence[Parameter]
) -> None:
    for part in one.spec.slices:
        parameter = parameters[part.tensor]
        if parameter not in target:
            target[parameter] = flat.new_zeros(parameter.numel())
        own = target[parameter][part.start : part.start + part.numel]
        own.copy_(flat[part.offset : part.offset + part.numel])


def _collect(
    one: CodedBucket, flat: Tensor, source: ByParameter, parameters: Sequence[Parameter]
) -> None:
    flat.zero_()
    for part in one.spec.slices:
        numbers = source.get(parameters[part.tensor])
        if numbers is not None:
            own = flat[part.offset : part.offset + part.numel]
            own.copy_(numbers[part.start : part.start + part.numel])


# --- in state dicts -----------------------------------------------------------------------------


@torch.no_grad()
def packed(
    residuals: Residuals, number_of: Mapping[Tensor, int], collectives: Collectives
) -> dict[str, Any]:
    """`residuals` as they stand in a whole state dict, on every rank. Collective, blocks.

    Needs memory for every rank's residuals.
    """
    rank, world_size = collectives.rank, collectives.world_size

    def of_all_ranks(own: Tensor) -> Tensor:
        rows = own.new_empty((world_size, own.numel()))
        rows[rank] = own
        collectives.launch_all_gather(rows.view(-1), STATE_NUMBERS).wait()
        return rows

    return {
        "worker": _numbered(residuals.worker, number_of, of_all_ranks),
        "owner": _numbered(residuals.owner, number_of, lambda whole: whole),
        "counts": residuals.counts,
    }


def _numbered(
    named: Mapping[str, ByParameter],
    number_of: Mapping[Tensor, int],
    change: Callable[[Tensor], Tensor],
) -> dict[str, dict[int, Tensor]]:
    return {
        name: {number_of[parameter]: change(numbers) for parameter, numbers in own.items()}
        for name, own in named.items()
    }


def unpacked(
    state: Mapping[str, Any], parameter_of: Mapping[int, Parameter], rank: int, world_size: int
) -> Residuals:
    """This rank's part of what stands in a state dict. Local.

    With another number of ranks than saved it, each gets an equal share of all that workers kept.
    """

    def own(rows: Tensor) -> Tensor:
        return rows[rank] if len(rows) == world_size else rows.sum(0) / world_size

    def by_parameter(
        named: Mapping[str, Mapping[int, Tensor]], change: Callable[[Tensor], Tensor]
    ) -> dict[str, ByParameter]:
        return {
            name: {parameter_of[number]: change(numbers) for number, numbers in of.items()}
            for name, of in named.items()
        }

    return Residuals(
        by_parameter(state["worker"], own),
        by_parameter(state["owner"], lambda whole: whole),
        dict(state["counts"]),
    )


def sharded(
    coded: Sequence[CodedBucket],
    parameters: Sequence[Parameter],
    number_of: Mapping[Tensor, int],
    rank: int,
    world_size: int,
) -> tuple[dict[str, Any], list[tuple[Tensor, Sequence[Chunk]]]]:
    """As `packed`, with tensors on the meta device, and this rank's chunks of these. Local."""
    chunks: dict[tuple[str, str, int], list[Chunk]] = defaultdict(list)
    counts: dict[str, int] = {}
    for one in coded:
        counts = dict(one.counts)
        for part in one.spec.slices:
            before = rank * parameters[part.tensor].numel()
            for name, flat in one.worker.kept.items():
                values = flat[part.offset : part.offset + part.numel]
                chunks["worker", name, part.tensor].append(Chunk(before + part.start, values))
            for name, shard in one.owner.kept.items():
                chunks["owner", name, part.tensor] += _owned(one, part, shard)
    state: dict[str, Any] = {"worker": {}, "owner": {}, "counts": counts}
    stand_ins: list[tuple[Tensor, Sequence[Chunk]]] = []
    for (kind, name, index), own in chunks.items():
        parameter = parameters[index]
        shape = (world_size, parameter.numel()) if kind == "worker" else (parameter.numel(),)
        stand_in = torch.empty(shape, device="meta")
        state[kind].setdefault(name, {})[number_of[parameter]] = stand_in
        stand_ins.append((stand_in, own))
    return state, stand_ins


def _owned(one: CodedBucket, part: Slice, shard: Tensor) -> list[Chunk]:
    own = one.own
    begin, end = max(part.offset, own.start), min(part.offset + part.numel, own.stop)
    if begin >= end:
        return []
    values = shard[begin - own.start : end - own.start]
    return [Chunk(part.start + begin - part.offset, values)]
