"""What encoding has left to be sent of each parameter, whatever bucket it is in, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

ByParameter = dict[Tensor, Tensor]

T = TypeVar("T")


@dataclass
class Residuals:
    """What lies here, whole parameters each.

    Attributes:
        worker: Name -> parameter -> this rank's own numbers, flat, in the order of its storage.
        owner: Name -> parameter -> what owners keep, likewise, the same on all ranks.
        factors: Parameter -> its low-rank factor, the same on all ranks.
        counts: Half -> how often it was encoded.
        rates: Parameter -> `CompressedBucket.rate` of where its numbers come from.
        seed: `CompressedBucket.seed` of all of them; None: not known.
        steering: First parameter of a bucket -> `CompressedBucket.steering` of it, this rank's.
    """

    worker: dict[str, ByParameter] = field(default_factory=dict)
    owner: dict[str, ByParameter] = field(default_factory=dict)
    factors: ByParameter = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    rates: dict[Tensor, float] = field(default_factory=dict)
    seed: int | None = None
    steering: ByParameter = field(default_factory=dict)

    @property
    def is_of_nothing(self) -> bool:
        """Whether no parameter has anything here."""
        return not (self.worker or self.owner or self.factors)

    def of(self, belongs: Callable[[Tensor], bool]) -> Residuals:
        """What parameters have for which `belongs` holds, the counts and the seed.

        Tensors are shared.
        """

        def own(numbers: Mapping[Tensor, T]) -> dict[Tensor, T]:
            return {one: number for one, number in numbers.items() if belongs(one)}

        def named(all_own: Mapping[str, ByParameter]) -> dict[str, ByParameter]:
            kept = {name: own(numbers) for name, numbers in all_own.items()}
            return {name: numbers for name, numbers in kept.items() if numbers}

        return Residuals(
            named(self.worker),
            named(self.owner),
            own(self.factors),
            dict(self.counts),
            own(self.rates),
            self.seed,
            own(self.steering),
        )

    def joined(self, other: Residuals) -> Residuals:
        """This and what `other` has besides; tensors are shared."""

        def named(
            ours: Mapping[str, ByParameter], theirs: Mapping[str, ByParameter]
        ) -> dict[str, ByParameter]:
            names = {**theirs, **ours}
            return {name: {**theirs.get(name, {}), **ours.get(name, {})} for name in names}

        return Residuals(
            named(self.worker, other.worker),
            named(self.owner, other.owner),
            {**other.factors, **self.factors},
            {**other.counts, **self.counts},
            {**other.rates, **self.rates},
            other.seed if self.seed is None else self.seed,
            {**other.steering, **self.steering},
        )
