"""Ranks that compute more slowly than others, drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Stragglers:
    """How many times as long as planned forward and backward take on each rank, in each step.

    Attributes:
        sigma: Standard deviation of the factor's logarithm, drawn anew for each rank and step; the
            median of the factors is 1.
        slow_share: Share of the ranks that are slower in all steps, 0..1.
        slow_factor: How many times as long these take.
        seed: Of the random numbers.
    """

    sigma: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < math.inf and 1 <= self.slow_factor < math.inf):
            raise ValueError(
                "sigma must be finite and not negative and slow_factor finite and at least 1, got"
                f" {self.sigma} and {self.slow_factor}."
            )
        if not 0 <= self.slow_share <= 1:
            raise ValueError(f"slow_share must be between 0 and 1, got {self.slow_share}.")

        if (self.slow_share > 0) != (self.slow_factor > 1):
            raise ValueError(
                "slow_share and slow_factor go together: give the share of slow ranks and how many"
                f" times as long they take; got {self.slow_share} and {self.slow_factor}."
            )

    @property
    def are_none(self) -> bool:
        """Whether all ranks take as long as planned."""
        return self.sigma == 0 and self.slow_share == 0

    def factors(self, world_size: int, num_steps: int) -> Floats:
        """Of each step and rank; of one rank that stands for all, where all are alike."""
        if self.are_none:
            return np.ones((num_steps, 1))
        generator = np.random.default_rng(self.seed)
        factors = np.exp(generator.normal(0.0, self.sigma, (num_steps, world_size)))
        num_slow = math.ceil(self.slow_share * world_size)
        factors[:, generator.permutation(world_size)[:num_slow]] *= self.slow_factor
        return factors


NO_STRAGGLERS = Stragglers()
