"""What encoding has left to be sent, parameter by parameter; and how it stands in state dicts.

Each rank keeps something of its own for every element that it encodes, and owners keep something
besides for their shards. In a state dict both stand beside the optimizer's state:

    residuals: worker:  name -> parameter number -> [E, *shape], E being how many encode an element:
                        every rank, or on hosts of several ranks one of each host
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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dear.bucket import Chunk, as_flat, storage_strides
from lightning_dear.collectives.world import World
from lightning_dear.exchange import NO_SEED

RESIDUALS_KEY = "residuals"
"""In an optimizer's state dict."""

ResidualKind = tuple[str, str]
"""("worker" or "owner", name of what is kept), `FACTORS` or `STEERING`."""

FACTORS, STEERING = ("factors", ""), ("steering", "")

OF_ALL = ("owner", "factors")
"""Of these all ranks have the same, of others each its own, or each host."""

T = TypeVar("T")


@dataclass
class Residuals:
    """Holds what lies here, whole parameters each, whatever bucket they are in, or none.

    Attributes:
        kept: Kind -> parameter -> numbers. Of "worker": this rank's own, or what the ranks of its
            host have together, flat, in the order of its storage; of "owner": what owners keep,
            likewise, the same on all ranks; `FACTORS`: its low-rank factor, the same on all ranks;
            `STEERING`: `CompressedBucket.steering` of the bucket of which it is the first
            parameter, this rank's.
        rates: Parameter -> `CompressedBucket.rate` of where its numbers come from.
        counts: Half -> how often it was encoded.
        seed: `CompressedBucket.seed` of all of them; None: not known.
    """

    kept: dict[ResidualKind, dict[Tensor, Tensor]] = field(default_factory=dict)
    rates: dict[Tensor, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seed: int | None = None

    @property
    def is_of_nothing(self) -> bool:
        """Tells whether no parameter has anything here."""
        return not any(own for kind, own in self.kept.items() if kind != STEERING)

    def get(self, kind: ResidualKind, parameter: Tensor) -> Tensor | None:
        """Returns what a parameter has of a kind, if anything."""
        return self.kept.get(kind, {}).get(parameter)

    def of(self, belongs: Callable[[Tensor], bool]) -> Residuals:
        """Returns what parameters have for which `belongs` holds, the counts and the seed.

        Tensors are shared.
        """

        def own(numbers: Mapping[Tensor, T]) -> dict[Tensor, T]:
            return {one: number for one, number in numbers.items() if belongs(one)}

        kept = {kind: left for kind, all_own in self.kept.items() if (left := own(all_own))}
        return replace(self, kept=kept, rates=own(self.rates), counts=dict(self.counts))

    def joined(self, other: Residuals) -> Residuals:
        """Returns this and what `other` has besides; tensors are shared."""
        return Residuals(
            {
                kind: {**other.kept.get(kind, {}), **self.kept.get(kind, {})}
                for kind in {**other.kept, **self.kept}
            },
            {**other.rates, **self.rates},
            {**other.counts, **self.counts},
            other.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class RowLayout:
    """Says who has which row in a state dict.

    Attributes:
        world: The ranks.
        together: How many ranks of a host share a row, see `ExchangeOptions.ranks_together`. They
            have alike what is held in whole.
    """

    world: World
    together: int = 1

    def of(self, kind: ResidualKind) -> tuple[int, int]:
        """Returns (number of this rank's row, number of rows)."""
        together = self.together if kind[0] == "worker" else 1
        return self.world.rank // together, self.world.size // together


ResidualChunk = tuple[ResidualKind, Tensor, Chunk]
"""Kind, parameter, and what lies here of it, perhaps nothing."""


def sharded(
    parts: Iterable[ResidualChunk],
    whole: Residuals,
    number_of: Mapping[Tensor, int],
    rows: RowLayout,
) -> tuple[dict[str, Any], list[tuple[Tensor, list[Chunk]]]]:
    """Returns residuals as in a state dict, on the meta device, and this rank's chunks. Local.

    Args:
        parts: Of what lies here in parts; every rank names the same kinds and parameters.
        whole: What lies here in whole, and what all ranks have alike.
        number_of: Parameter -> its number in the optimizer's state dict.
        rows: Which of them are this rank's.
    """
    chunks: dict[ResidualKind, dict[Tensor, list[Chunk]]] = {}
    # Of what a host's ranks have alike, one of them says it.
    is_first = rows.world.rank % rows.together == 0
    others = (
        (kind, one, Chunk(0, values if is_first or kind[0] != "worker" else values[:0]))
        for kind, own in whole.kept.items()
        for one, values in own.items()
    )
    for kind, parameter, chunk in chain(parts, others):
        numel = parameter.numel() if kind[1] else chunk.values.numel()
        before = 0 if kind[0] in OF_ALL else rows.of(kind)[0] * numel
        all_own = chunks.setdefault(kind, {}).setdefault(parameter, [])
        all_own.append(Chunk(before + chunk.start, chunk.values))
    state: dict[str, Any] = {"worker": {}, "owner": {}, "factors": {}}
    state["counts"], state["seed"] = dict(whole.counts), whole.seed
    state["rates"] = {number_of[one]: rate for one, rate in whole.rates.items()}
    state["steering"] = {}
    stand_ins: list[tuple[Tensor, list[Chunk]]] = []
    for kind, of_kind in chunks.items():
        of, name = kind
        place = state[of].setdefault(name, {}) if name else state[of]
        for parameter, own in of_kind.items():
            values = own[0].values
            layout = _layout(kind, parameter, values, rows)
            stand_in = torch.empty_strided(*layout, dtype=values.dtype, device="meta")
            place[number_of[parameter]] = stand_in
            stand_ins.append((stand_in, own))
    return state, stand_ins


def _layout(
    kind: ResidualKind, parameter: Tensor, own: Tensor, rows: RowLayout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in a state dict; with rows, where ranks have their own."""
    shape, strides = own.shape, own.stride()
    if kind[1]:
        # However much of it lies here, there is a number for each of the parameter's elements.
        shape, strides = parameter.shape, storage_strides(parameter)
    if kind[0] in OF_ALL:
        return shape, strides
    return (rows.of(kind)[1], *shape), (shape.numel(), *strides)


def unpacked(
    state: Mapping[str, Any], parameter_of: Mapping[int, Tensor], rows: RowLayout
) -> Residuals:
    """Returns this rank's row of a state dict's entry, on the parameters' device. Local.

    With another number of rows than were saved, each is an equal share of all that workers kept.
    """
    number, count = rows.of(("worker", ""))

    def own(saved: Tensor) -> Tensor:
        # Ranks' gradients are added up, so that a sum in equal shares is still sent in whole.
        return saved[number] if len(saved) == count else saved.sum(0) / count

    def copied(parameter: Tensor, numbers: Tensor) -> Tensor:
        # In the order of the parameter's storage, where collectives need it.
        flat = as_flat(numbers, storage_strides(parameter))
        return flat.to(parameter.device, copy=True)

    def by_parameter(saved: Mapping[int, T]) -> Iterator[tuple[Tensor, T]]:
        return ((parameter_of[number], one) for number, one in saved.items())

    kept: dict[ResidualKind, dict[Tensor, Tensor]] = {}
    for name, saved in state["worker"].items():
        kept["worker", name] = {
            one: copied(one, own(all_own)) for one, all_own in by_parameter(saved)
        }
    for name, saved in state["owner"].items():
        kept["owner", name] = {one: copied(one, numbers) for one, numbers in by_parameter(saved)}
    # Earlier versions have saved no factors, no rates, no seed and no steering.
    kept[FACTORS] = {
        one: factor.to(one.device, copy=True)
        for one, factor in by_parameter(state.get("factors", {}))
    }
    kept[STEERING] = {
        # Where collectives need it, too.
        one: saved[rows.world.rank].to(one.device, copy=True)
        for one, saved in by_parameter(state.get("steering", {}))
        # Regions are of as many ranks.
        if len(saved) == rows.world.size
    }
    rates: dict[Tensor, float] = dict(by_parameter(state.get("rates", {})))
    return Residuals(kept, rates, dict(state["counts"]), state.get("seed", NO_SEED))
