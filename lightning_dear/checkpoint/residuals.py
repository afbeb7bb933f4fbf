"""Residuals by parameter instead of by bucket, and their format in an optimizer's state dict.

A residual is what encoding has left out so far, kept for the next steps. Each rank keeps residuals
of the gradients that it encodes. The owner of a shard may keep further residuals of the shard's
mean. A state dict holds both beside the optimizer's state:

    residuals: worker:  name -> parameter index -> [E, *shape]. E is the number of ranks that encode
                        each element: the world size, or the number of hosts if the ranks of a host
                        encode the host's sum together.
               owner:   name -> parameter index -> [*shape]
               factors: parameter index -> low-rank factor, equal on all ranks
               counts:  "reduce" or "gather" -> how often a bucket was encoded in that half
               seed:    seed of the codecs' random numbers: rank 0's seed when training began
               rates:   parameter index -> rate of its error feedback. A saved "residual" is the
                        unsent error times this rate.
               steering: index of a bucket's first parameter -> [world size, n] fp64. The thresholds
                        and regions by which each rank selects elements of that bucket.

A resumed run uses the saved seed and not its own. State of earlier versions has no seed. A run that
resumes from such state draws random numbers without a seed, as that version did.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_dear.bucket import Chunk, as_flat, storage_strides
from lightning_dear.collectives.world import World
from lightning_dear.exchange import NO_SEED

RESIDUALS_KEY = "residuals"
"""Key of the residuals in an optimizer's state dict."""

ResidualKind = tuple[str, str]
"""Kind of a residual: ("worker", name) or ("owner", name), with a name of `Memory.names` such as
"residual", or `FACTORS` or `STEERING`."""

FACTORS, STEERING = ("factors", ""), ("steering", "")
"""Kinds without a name: low-rank factors, and the thresholds and regions of sparse selection."""

OF_ALL = ("owner", "factors")
"""First words of the kinds that are equal on all ranks. Other kinds differ by rank or by host, and
have a row for each in a state dict."""

T = TypeVar("T")


@dataclass
class Residuals:
    """Residuals of whole parameters, whatever bucket a parameter is in.

    Attributes:
        kept: Kind -> parameter -> tensor. Tensors of "worker" and "owner" kinds are flat, in the
            order of the parameter's storage. "worker": residuals of this rank, or of its host if
            the host's ranks encode together. "owner": residuals of the owners of the parameter's
            shards, equal on all ranks. `FACTORS`: the parameter's low-rank factor, equal on all
            ranks. `STEERING`: this rank's `CompressedBucket.steering` of the bucket that begins
            with the parameter.
        rates: Parameter -> `CompressedBucket.rate` of the bucket that its residuals come from.
        counts: "reduce" or "gather" -> how often a bucket was encoded in that half.
        seed: `CompressedBucket.seed` of all buckets. None means that no seed is known.
    """

    kept: dict[ResidualKind, dict[Tensor, Tensor]] = field(default_factory=dict)
    rates: dict[Tensor, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seed: int | None = None

    @property
    def is_of_nothing(self) -> bool:
        """Tells whether no parameter has a residual or a factor. Steering and seed do not count."""
        return not any(own for kind, own in self.kept.items() if kind != STEERING)

    def get(self, kind: ResidualKind, parameter: Tensor) -> Tensor | None:
        """Returns a parameter's tensor of a kind. None means that it has none."""
        return self.kept.get(kind, {}).get(parameter)

    def moved(self, to: Mapping[Tensor, Tensor]) -> "Residuals":
        """Returns the residuals of the parameters that are keys of `to`, as those of its values.

        The result has the same counts and seed. Tensors are shared, not copied.
        """

        def own(by_parameter: Mapping[Tensor, T]) -> dict[Tensor, T]:
            return {to[one]: value for one, value in by_parameter.items() if one in to}

        kept = {kind: left for kind, all_own in self.kept.items() if (left := own(all_own))}
        return replace(self, kept=kept, rates=own(self.rates), counts=dict(self.counts))

    def of(self, belongs: Callable[[Tensor], bool]) -> "Residuals":
        """Returns the residuals of the parameters for which `belongs` returns True; see `moved`."""
        parameters = {*chain(self.rates, *self.kept.values())}
        return self.moved({one: one for one in parameters if belongs(one)})

    def joined(self, other: "Residuals") -> "Residuals":
        """Returns the union of these residuals and `other`'s. Tensors are shared, not copied.

        Where both have an entry, the entry of `self` is used.
        """
        kinds, seed = other.kept | self.kept, other.seed if self.seed is None else self.seed
        kept = {kind: other.kept.get(kind, {}) | self.kept.get(kind, {}) for kind in kinds}
        return Residuals(kept, other.rates | self.rates, other.counts | self.counts, seed)


class RowLayout(NamedTuple):
    """Says which row of a saved residual belongs to which rank.

    Attributes:
        world: The ranks of the training.
        together: Number of ranks of a host that encode together and so share a row, as
            `ExchangeOptions.ranks_together` returns it. 1 means a row for each rank.
    """

    world: World
    together: int = 1

    def of(self, kind: ResidualKind) -> tuple[int, int]:
        """Returns (index of this rank's row, number of rows) for a kind that has rows."""
        together = self.together if kind[0] == "worker" else 1
        return self.world.rank // together, self.world.size // together


ResidualChunk = tuple[ResidualKind, Tensor, Chunk]
"""Kind, parameter, and this rank's chunk of the parameter's residual, which may be empty."""


def sharded(
    parts: Iterable[ResidualChunk], whole: Residuals, numbers: Mapping[Tensor, int], rows: RowLayout
) -> tuple[dict[str, Any], list[tuple[Tensor, list[Chunk]]]]:
    """Converts residuals to a state dict's entry with stand-ins, and chunks for them. Local.

    Args:
        parts: This rank's chunks of the residuals in buckets. All ranks name the same kinds and
            parameters.
        whole: Residuals of whole parameters outside buckets. Also counts, rates, factors, steering
            and seed of all.
        numbers: Parameter -> its index in the optimizer's state dict.
        rows: Which rows of the residuals are this rank's.

    Returns:
        The entry under `RESIDUALS_KEY`, with a stand-in on the meta device for each tensor, and
        (stand-in, this rank's chunks of the tensor) for each of them.
    """
    chunks: dict[ResidualKind, dict[Tensor, list[Chunk]]] = {}
    # Ranks that share a row hold equal whole residuals, and the first of them saves them.
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
    rates = {numbers[one]: rate for one, rate in whole.rates.items()}
    state |= {"counts": dict(whole.counts), "seed": whole.seed, "rates": rates, "steering": {}}
    stand_ins: list[tuple[Tensor, list[Chunk]]] = []
    for kind, of_kind in chunks.items():
        of, name = kind
        place = state[of].setdefault(name, {}) if name else state[of]
        for parameter, own in of_kind.items():
            # Kinds with a name have a value for each element of the parameter. `own` may be chunks.
            values = own[0].values
            like = parameter if name else values
            stand_in = torch.empty_like(like, dtype=values.dtype, device="meta")
            if of not in OF_ALL:
                size, strides = (rows.of(kind)[1], *like.shape), (like.numel(), *stand_in.stride())
                stand_in = stand_in.new_empty_strided(size, strides)
            place[numbers[parameter]] = stand_in
            stand_ins.append((stand_in, own))
    return state, stand_ins


def unpacked(
    state: Mapping[str, Any], parameter_of: Mapping[int, Tensor], rows: RowLayout
) -> Residuals:
    """Converts a state dict's entry to this rank's residuals, on the parameters' device. Local.

    If another number of rows was saved than there are now, each row gets an equal share of the sum
    of the saved rows. Steering that was saved at another world size is dropped.

    Args:
        state: The entry under `RESIDUALS_KEY`, with whole tensors.
        parameter_of: Parameter index in the state dict -> parameter.
        rows: Which rows are this rank's.
    """
    number, count = rows.of(("worker", ""))

    def own(saved: Tensor) -> Tensor:
        # Receivers sum what the ranks send, so only the sum of the rows matters.
        return saved[number] if len(saved) == count else saved.sum(0) / count

    def copied(parameter: Tensor, values: Tensor) -> Tensor:
        # In storage order, as in a bucket, and on the device that collectives send from.
        return as_flat(values, storage_strides(parameter)).to(parameter.device, copy=True)

    def by_parameter(saved: Mapping[int, T]) -> Iterator[tuple[Tensor, T]]:
        return ((parameter_of[index], value) for index, value in saved.items())

    kept: dict[ResidualKind, dict[Tensor, Tensor]] = {}
    for name, saved in state["worker"].items():
        kept["worker", name] = {one: copied(one, own(every)) for one, every in by_parameter(saved)}
    for name, saved in state["owner"].items():
        kept["owner", name] = {one: copied(one, values) for one, values in by_parameter(saved)}
    # `get`, because earlier versions have saved no factors, rates, seed and steering.
    factors = by_parameter(state.get("factors", {}))
    kept[FACTORS] = {one: factor.to(one.device, copy=True) for one, factor in factors}
    kept[STEERING] = {
        one: saved[rows.world.rank].to(one.device, copy=True)
        for one, saved in by_parameter(state.get("steering", {}))
        # A bucket has one region for each rank, so another world size needs other regions.
        if len(saved) == rows.world.size
    }
    rates: dict[Tensor, float] = dict(by_parameter(state.get("rates", {})))
    return Residuals(kept, rates, dict(state["counts"]), state.get("seed", NO_SEED))
