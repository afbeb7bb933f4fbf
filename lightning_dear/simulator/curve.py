"""What a collective takes by its size, as it was measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Curve:
    """Seconds of messages of several sizes, with straight lines between them.

    For what is no alpha and beta: gloo's all-gather takes the same up to some size, and loses a
    third of its rate above another. Below the smallest size it takes what that one takes, above
    the largest it goes on at that one's rate.

    Attributes:
        sizes: Bytes that a rank sends, rising.
        seconds: Of each.
        least_s: What every message takes at least.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    least_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"A curve needs seconds for each of its sizes, got {len(self.seconds)} for"
                f" {len(self.sizes)}."
            )
        if self.sizes[0] <= 0 or any(one >= other for one, other in pairwise(self.sizes)):
            raise ValueError(f"Sizes must be positive and rise, got {list(self.sizes)}.")
        if not all(0 <= one < math.inf for one in (*self.sizes, *self.seconds, self.least_s)):
            raise ValueError(
                f"Seconds must be finite and not negative, got {[*self.seconds, self.least_s]}."
            )

    def message_s(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes`."""
        return max(self.least_s, self._measured_s(nbytes))

    def _measured_s(self, nbytes: float) -> float:
        place = bisect_left(self.sizes, nbytes)
        if place == 0:
            return self.seconds[0]
        if place == len(self.sizes):
            return self.seconds[-1] * nbytes / self.sizes[-1]
        low, high = self.sizes[place - 1 : place + 1]
        low_s, high_s = self.seconds[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (nbytes - low) / (high - low)


def rising(sizes: list[float], seconds: list[float]) -> Curve:
    """The rising curve nearest to measured seconds, by the squares of what they differ by.

    A longer message takes no less than a shorter one: where one did, both count as their mean.
    """
    pools: list[tuple[float, int]] = []
    for one in seconds:
        total, count = one, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return Curve(tuple(sizes), tuple(means))
