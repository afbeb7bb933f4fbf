"""What encoding has left to be sent, across plans, checkpoints and numbers of ranks.

Each rank keeps something of its own for every element of every parameter, and owners keep
something besides for their shards. In a state dict both stand beside the optimizer's state:

    residuals: worker:  name -> parameter number -> [number of ranks, *shape]
               owner:   name -> parameter number -> [*shape]
               factors: parameter number -> the low-rank factor that all ranks have
               counts:  half -> how often a bucket was encoded
               seed:    of what codecs draw at random; rank 0's, when training began
               rates:   parameter number -> of its feedback: a "residual" is what is still to be
                        sent, times this
               steering: number of a bucket's first parameter -> [number of ranks, n] fp64: by what
                        each rank selects numbers in that bucket

Whoever goes on from that draws by its seed, whatever his own is. Earlier versions saved none, and
drew without: what goes on from theirs does so too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import as_flat, storage_strides
from lightning_dear.checkpoint.by_parameter import ByParameter, Residuals
from lightning_dear.checkpoint.sharded_state import Chunk
from lightning_dear.collectives.work import STATE_NUMBERS, Collectives
from lightning_dear.compression.signs import RunningMean
from lightning_dear.exchange import NO_SEED, CompressedBucket
from lightning_dear.planning.plan import Slice

KEY = "residuals"
"""In an optimizer's state dict."""


@torch.no_grad()
def take_out(
    coded: Sequence[CompressedBucket], parameters: Sequence[Parameter], collectives: Collectives
) -> Residuals:
    """Copies what is kept in `coded`, none of which may be pending. Collective, blocks."""
    taken = common_to_all(coded, parameters)
    taken.factors = {one: factor.clone() for one, factor in taken.factors.items()}
    for one in coded:
        for name, flat in one.worker.kept.items():
            _spread(one, flat, taken.worker.setdefault(name, {}), parameters)
        for name, shard in one.owner.kept.items():
            flat = shard.new_zeros(one.spec.padded_numel)
            flat[one.own] = shard
            number = STATE_NUMBERS + one.number
            collectives.launch_all_gather(flat, number).wait()
            _spread(one, flat, taken.owner.setdefault(name, {}), parameters)
    return taken


def common_to_all(coded: Sequence[CompressedBucket], parameters: Sequence[Parameter]) -> Residuals:
    """What all ranks have alike: factors, the buckets' own, counts, rates and the seed. Local.

    And by what this rank selects, which is as long on all of them.
    """
    halves = coded[0].counts if coded else ()
    return Residuals(
        factors={parameters[at]: own for one in coded for at, own in one.factors.items()},
        # The most, as some buckets may travel as they are.
        counts={half: max(one.counts[half] for one in coded) for half in halves},
        rates={parameters[part.tensor]: one.rate for one in coded for part in one.spec.slices},
        seed=coded[0].seed if coded else None,
        steering={parameters[_first(one)]: own for one, own in _steered(coded)},
    )


def _steered(coded: Sequence[CompressedBucket]) -> list[tuple[CompressedBucket, Tensor]]:
    pairs = ((one, one.steering) for one in coded)
    return [(one, own) for one, own in pairs if own is not None]


def _first(one: CompressedBucket) -> int:
    """Number of the tensor that a bucket is known by."""
    return one.spec.slices[0].tensor


@torch.no_grad()
def put_in(
    coded: Sequence[CompressedBucket], residuals: Residuals, parameters: Sequence[Parameter]
) -> None:
    """Overwrites what is kept in `coded`; what `residuals` do not know becomes 0. Local.

    A factor that they do not know, or of another rank, becomes what it was at the start. Numbers of
    which they do not know the rate count as of this training's, as earlier versions took all of
    them.
    """
    for one in coded:
        one.start_anew(residuals.seed)
        one.counts.update(residuals.counts)
        if parameters[_first(one)] in residuals.steering:
            one.steer(residuals.steering[parameters[_first(one)]])
        for number, own in one.factors.items():
            factor = residuals.factors.get(parameters[number], own)
            if factor.shape == own.shape:
                own.copy_(factor)
        for name in one.worker.names:
            flat = _collected(one, name, residuals.worker, residuals.rates, parameters)
            one.worker.load(name, flat)
        for name in one.owner.names:
            flat = _collected(one, name, residuals.owner, residuals.rates, parameters)
            one.owner.load(name, flat[one.own])


def _spread(
    one: CompressedBucket, flat: Tensor, target: ByParameter, parameters: Sequence[Parameter]
) -> None:
    for part in one.spec.slices:
        parameter = parameters[part.tensor]
        if parameter not in target:
            target[parameter] = flat.new_zeros(parameter.numel())
        own = target[parameter][part.start : part.start + part.numel]
        own.copy_(flat[part.offset : part.offset + part.numel])


def _collected(
    one: CompressedBucket,
    name: str,
    named: Mapping[str, ByParameter],
    rates: Mapping[Tensor, float],
    parameters: Sequence[Parameter],
) -> Tensor:
    """Flat, as the bucket is, at its rate; 0 where `named` has nothing of that name."""
    device = parameters[0].device
    flat = torch.zeros(one.spec.padded_numel, dtype=torch.float32, device=device)
    source = named.get(name, {})
    for part in one.spec.slices:
        parameter = parameters[part.tensor]
        if parameter not in source:
            continue
        own = flat[part.offset : part.offset + part.numel]
        own.copy_(source[parameter][part.start : part.start + part.numel])
        rate = rates.get(parameter, one.rate)
        if name == "residual" and rate != one.rate:
            own.mul_(one.rate / rate)
    return flat


def unknown_names(
    coded: Sequence[CompressedBucket], residuals: Residuals, parameters: Sequence[Parameter]
) -> list[str]:
    """Names of what `residuals` have, not zero, of a parameter of which `coded` keep no such."""
    known = {
        (whose + name, parameters[part.tensor])
        for one in coded
        for whose, memory in (("", one.worker), ("owner's ", one.owner))
        for name in memory.names
        for part in one.spec.slices
    }
    return [
        whose + name
        for whose, named in (("", residuals.worker), ("owner's ", residuals.owner))
        for name, numbers in named.items()
        if any((whose + name, one) not in known and bool(own.any()) for one, own in numbers.items())
    ]


# --- in state dicts -----------------------------------------------------------------------------


@torch.no_grad()
def packed(
    residuals: Residuals, number_of: Mapping[Tensor, int], collectives: Collectives
) -> dict[str, Any]:
    """`residuals` as they stand in a whole state dict, on every rank. Collective, blocks.

    Needs memory for every rank's residuals.
    """
    rank, world_size = collectives.rank, collectives.world_size

    def of_all_ranks(parameter: Tensor, own: Tensor) -> Tensor:
        rows = own.new_empty((world_size, own.numel()))
        rows[rank] = own
        collectives.launch_all_gather(rows.view(-1), STATE_NUMBERS).wait()
        return rows.as_strided(*_shape(parameter, world_size))

    def steering(own: Tensor) -> Tensor:
        rows = own.new_empty((world_size, len(own)))
        rows[rank] = own
        collectives.launch_all_gather(rows.view(-1), STATE_NUMBERS).wait()
        return rows

    def of_owners(parameter: Tensor, whole: Tensor) -> Tensor:
        return whole.as_strided(*_shape(parameter))

    return {
        "worker": _numbered(residuals.worker, number_of, of_all_ranks),
        "owner": _numbered(residuals.owner, number_of, of_owners),
        "factors": {number_of[one]: factor for one, factor in residuals.factors.items()},
        "counts": residuals.counts,
        "seed": residuals.seed,
        "rates": {number_of[one]: rate for one, rate in residuals.rates.items()},
        "steering": {number_of[one]: steering(own) for one, own in residuals.steering.items()},
    }


def _shape(parameter: Tensor, *rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of numbers that lie as the parameter's elements do, in `rows` if any."""
    strides = storage_strides(parameter)
    return (*rows, *parameter.shape), (*(parameter.numel() for _ in rows), *strides)


def _numbered(
    named: Mapping[str, ByParameter],
    number_of: Mapping[Tensor, int],
    change: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, dict[int, Tensor]]:
    return {
        name: {number_of[one]: change(one, numbers) for one, numbers in own.items()}
        for name, own in named.items()
    }


def unpacked(
    state: Mapping[str, Any], parameter_of: Mapping[int, Parameter], rank: int, world_size: int
) -> Residuals:
    """This rank's part of what stands in a state dict, copied to the parameters' device. Local.

    With another number of ranks than saved it, each gets an equal share of all that workers kept.
    """

    def own(rows: Tensor) -> Tensor:
        # Ranks' gradients are added up, so that a sum in equal shares is still sent in whole.
        return rows[rank].clone() if len(rows) == world_size else rows.sum(0) / world_size

    def by_parameter(
        named: Mapping[str, Mapping[int, Tensor]], change: Callable[[Tensor], Tensor]
    ) -> dict[str, ByParameter]:
        return {
            name: {
                parameter_of[number]: _beside(parameter_of[number], change(numbers))
                for number, numbers in of.items()
            }
            for name, of in named.items()
        }

    # Earlier versions have saved no factors, no rates, no seed and no steering.
    factors, rates = state.get("factors", {}), state.get("rates", {})
    return Residuals(
        by_parameter(_as_named_now(state["worker"]), own),
        by_parameter(state["owner"], Tensor.clone),
        {
            parameter_of[number]: factor.to(parameter_of[number].device, copy=True)
            for number, factor in factors.items()
        },
        dict(state["counts"]),
        {parameter_of[number]: rate for number, rate in rates.items()},
        state.get("seed", NO_SEED),
        {
            parameter_of[number]: rows[rank].cpu()
            for number, rows in state.get("steering", {}).items()
            # Regions are of as many ranks.
            if len(rows) == world_size
        },
    )


def _beside(parameter: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` in the order of the parameter's storage, on its device, as collectives need it."""
    return as_flat(numbers, storage_strides(parameter)).to(parameter.device)


def _as_named_now(worker: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Mapping[int, Tensor]]:
    """Earlier versions called signum's running mean momentum; dgc's comes with a residual."""
    is_signums = "residual" not in worker
    return {
        RunningMean.names[0] if is_signums and name == "momentum" else name: of
        for name, of in worker.items()
    }


Part = tuple[str, str, Tensor, "Chunk | None"]
"""("worker" or "owner", name, parameter, what lies here of it), in the order of its storage."""


def parts_of(coded: Sequence[CompressedBucket], parameters: Sequence[Parameter]) -> Iterator[Part]:
    """What lies in the buckets; every rank names the same, whatever it has of it."""
    for one in coded:
        worker, owner = one.worker.kept, one.owner.kept
        for part in one.spec.slices:
            parameter = parameters[part.tensor]
            for name, flat in worker.items():
                values = flat[part.offset : part.offset + part.numel]
                yield "worker", name, parameter, Chunk(part.start, values)
            for name, shard in owner.items():
                yield "owner", name, parameter, _owned(one, part, shard)


def parts_held(residuals: Residuals) -> Iterator[Part]:
    """The same of what is held of parameters that are in no bucket."""
    for kind, named in (("worker", residuals.worker), ("owner", residuals.owner)):
        for name, own in named.items():
            for parameter, numbers in own.items():
                yield kind, name, parameter, Chunk(0, numbers)


def _owned(one: CompressedBucket, part: Slice, shard: Tensor) -> Chunk | None:
    own = one.own
    begin, end = max(part.offset, own.start), min(part.offset + part.numel, own.stop)
    if begin >= end:
        return None
    values = shard[begin - own.start : end - own.start]
    return Chunk(part.start + begin - part.offset, values)


def sharded(
    parts: Iterable[Part],
    common: Residuals,
    number_of: Mapping[Tensor, int],
    rank: int,
    world_size: int,
) -> tuple[dict[str, Any], list[tuple[Tensor, Sequence[Chunk]]]]:
    """As `packed`, with tensors on the meta device, and this rank's chunks of these. Local.

    `common`: what all ranks have alike; the rest of it is not looked at.
    """
    chunks: dict[tuple[str, str, Tensor], list[Chunk]] = defaultdict(list)
    for kind, name, parameter, chunk in parts:
        own = chunks[kind, name, parameter]
        if chunk is not None:
            before = rank * parameter.numel() if kind == "worker" else 0
            own.append(Chunk(before + chunk.start, chunk.values))
    state: dict[str, Any] = {"worker": {}, "owner": {}, "factors": {}}
    state["counts"], state["seed"] = dict(common.counts), common.seed
    state["rates"] = {number_of[one]: rate for one, rate in common.rates.items()}
    stand_ins: list[tuple[Tensor, Sequence[Chunk]]] = []
    for (kind, name, parameter), own in chunks.items():
        rows = (world_size,) if kind == "worker" else ()
        stand_in = torch.empty_strided(*_shape(parameter, *rows), device="meta")
        state[kind].setdefault(name, {})[number_of[parameter]] = stand_in
        stand_ins.append((stand_in, own))
    for parameter, factor in common.factors.items():
        stand_in = state["factors"][number_of[parameter]] = factor.to("meta")
        stand_ins.append((stand_in, [Chunk(0, factor.view(-1))] if rank == 0 else []))
    state["steering"] = {}
    for parameter, own_steering in common.steering.items():
        shape = world_size, len(own_steering)
        stand_in = torch.empty(shape, dtype=own_steering.dtype, device="meta")
        state["steering"][number_of[parameter]] = stand_in
        stand_ins.append((stand_in, [Chunk(rank * len(own_steering), own_steering)]))
    return state, stand_ins
