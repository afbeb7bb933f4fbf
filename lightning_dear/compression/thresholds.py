"""Which about k numbers are large, by a threshold that is used again from step to step."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_dear.compression.selectors import (
    all_above,
    all_reaching,
    sampled_floor,
    true_places,
)

FEWEST, MOST = 2 / 3, 4 / 3
"""Of k: with fewer or more numbers above a threshold it is set anew."""

FEW = 4
"""Of so many times as many numbers as are looked for a sample says nothing that helps."""


def largest(numbers: Tensor, count: int) -> Tensor:
    """Find the largest |x|: those other than 0, of equal ones the first, nan before all.

    For a CPU: how many there are is looked up.

    Args:
        numbers: [numel] fp32; not mutated.
        count: How many, at least 0.

    Returns:
        [count, or as many as are not 0] int64: places, ascending.
    """
    if count >= len(numbers):
        return true_places(numbers != 0)
    if not count:
        return torch.empty(0, dtype=torch.int64)
    places = _candidates(numbers, count)
    return places[_largest(numbers.index_select(0, places).abs(), count)]


def _candidates(numbers: Tensor, count: int) -> Tensor:
    """Places, ascending, of all that may be among the largest, and of no 0."""
    if len(numbers) > FEW * count:
        # With five deviations more than enough, nearly always.
        floor = float(sampled_floor(numbers[None], count, num_deviations=5.0))
        places = all_above(numbers, floor)
        if len(places) >= count:
            return places
    return true_places(numbers != 0)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Places among `sizes`, all above 0 or nan, ascending."""
    if count >= len(sizes):
        return torch.arange(len(sizes))
    # The smallest of those but nan, if any: nan counts as the largest.
    floor = float(sizes.topk(count, sorted=False).values.nan_to_num_(nan=math.inf).amin())
    own = sizes.numpy()
    is_kept = ~(own <= floor)
    room = count - np.count_nonzero(is_kept)
    if room > 0:
        is_kept[np.flatnonzero(own == floor)[:room]] = True
    # More than these may be nan.
    return torch.from_numpy(np.flatnonzero(is_kept)[:count])


def corrected(threshold: float, sizes: Tensor, k: int) -> float:
    """What k numbers would have reached, if the tail is a power law: Hill's estimate.

    Args:
        threshold: Above 0.
        sizes: [n] fp32, n at least 1: what has reached it.
        k: How many should have.
    """
    slope = float(sizes.log().mean()) - math.log(threshold)
    return threshold * math.pow(len(sizes) / k, slope)


class LocalThreshold:
    """Finds about k numbers: exactly k every so often, and else those that reach a threshold.

    Attributes:
        value: What numbers have to reach; 0: not known.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._next = value

    def find(self, numbers: Tensor, k: int, *, is_exact: bool) -> tuple[Tensor, Tensor]:
        """Places of what is large, ascending, and what stands there; `commit` makes it count.

        Args:
            numbers: [numel] fp32, on a CPU; not mutated.
            k: How many to look for, at least 1.
            is_exact: Whether exactly k (fewer if the others are 0).

        Returns:
            [n] int64 and [n] fp32, n from 2 k / 3 to 4 k / 3, or all that are not 0; zeros are not.
        """
        self._next = self.value
        if not is_exact and self.value > 0:
            places = all_reaching(numbers, self.value)
            found = numbers.index_select(0, places)
            if FEWEST * k <= len(places) <= MOST * k:
                self._next = corrected(self.value, found.abs(), k)
                return places, found
            if len(places) > k:
                kept = largest(found, k)
                return self._note(places[kept], found[kept])
        places = largest(numbers, k)
        return self._note(places, numbers.index_select(0, places))

    def _note(self, places: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        self._next = float(found.abs().min()) if len(found) else 0.0
        return places, found

    def commit(self) -> None:
        """The threshold that was last used is the next one's, too: its step is made."""
        self.value = self._next

    def discard(self) -> None:
        """That step is not made."""
        self._next = self.value
