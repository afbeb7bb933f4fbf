"""What all compressors that send a few of many numbers have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Self, override

from lightning_dear.compression.codec import Compressor


@dataclass(frozen=True, kw_only=True)
class FewOfMany(Compressor):
    """Sends k = max(1, ceil(density numel)) of some numbers; none of none.

    Args:
        density: Share of the numbers that travel, in (0, 1].

    Raises:
        ValueError: For another one.
    """

    has_density: ClassVar[bool] = True

    density: float = 0.01

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}.")

    def entries(self, numel: int) -> int:
        """How many of `numel` numbers travel (k)."""
        # 0.07 * 100 is a little more than 7 in floating point.
        return max(1, math.ceil(round(self.density * numel, 6))) if numel else 0

    @override
    def at_density(self, density: float) -> Self:
        """The same compressor with another density in (0, 1]."""
        return replace(self, density=density)
