"""Which k numbers are large: exactly, or nearly, by a threshold.

`torch.topk` sorts what a threshold only has to compare, so a threshold costs a fraction of it. The
price is that about k numbers are found, not exactly k. Of a row that is encoded, what is beyond k
is dropped in the order of the places, and slots that are left stay empty. Of a whole bucket about
k are sent, and the threshold is used again from step to step.
"""

import math
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dear.compression.blocks import TILE_ELEMENTS

_kept = threading.local()


def select(selector: str, rows: Tensor, k: int) -> Tensor:
    """Find k entries of each row whose |x| is large. Places depend on the row alone.

    Args:
        selector: A name in `SELECTORS`.
        rows: [R, numel] fp32, finite; not mutated.
        k: From 1 to numel.

    Returns:
        [R, k] int64: places, all distinct, in any order, but for empty slots, which hold numel.
        A row that is not zero has at least one place.
    """
    find = SELECTORS[selector]
    if rows.is_cpu:
        # Row by row: on a CPU it is looked up how many numbers are found, which differs by row.
        return torch.cat([find(row, k) for row in torch.split(rows, 1)])
    return find(rows, k)


def exact(rows: Tensor, k: int) -> Tensor:
    """Returns places of the k largest |x|; no slot stays empty."""
    if rows.is_cpu and rows.shape[1] > TILE_ELEMENTS:
        return _exact_in_blocks(rows, k)
    return rows.abs().topk(k, sorted=False).indices


def sampled(rows: Tensor, k: int) -> Tensor:
    """Returns those above a strided sample's threshold, as in DGC (Lin et al. 2018, 5)."""
    # Where all are wanted, no sample knows the smallest.
    floor = torch.zeros_like(rows[:, :1]) if k == rows.shape[1] else sampled_floor(rows, k)
    return first_above(rows, floor, k)


SELECTORS = {one.__name__: one for one in (exact, sampled)}


def first_above(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Returns places of the first k with |x| > floor, or nan, since rows of nan are to arrive.

    Args:
        rows: [R, numel] fp32; on a CPU R = 1.
        floor: [R, 1] fp32, at least 0, so that a zero is never taken; nan counts as 0.
        k: Slots.

    Returns:
        [R, k] int64, ascending; numel in empty slots.
    """
    # Nothing is below nan, so that zeros would be taken too.
    floor = floor.nan_to_num(nan=0.0)
    if rows.is_cpu:
        places = rows.new_full((1, k), rows.shape[1], dtype=torch.int64)
        found = all_above(rows[0], float(floor), k)[:k]
        places[0, : len(found)] = found
        return places
    return first_above_static(rows, floor, k)


def first_above_static(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Does as `first_above` for any R, on a device that must not be waited for.

    Slot j is found by bisection, as the first place up to which j + 1 entries were taken.
    """
    # torch would count in int64, twice the memory; places travel in 32 bits anyway. Not `>`, which
    # nan is not.
    taken = (rows.abs() <= floor).logical_not_().cumsum(1, dtype=torch.int32)
    slots = torch.arange(1, k + 1, dtype=torch.int32, device=rows.device)
    # torch warns of slots that are expanded, and copies them all the same.
    return torch.searchsorted(taken, slots.expand(len(rows), k).contiguous())


def sample_stride(k: int) -> int:
    """Returns the distance of sampled entries: 1 % of a row, but 64 of its k largest.

    A stride that shares a factor with a matrix' width sees few of its columns; widths are mostly
    products of 2, 3, 5 and 7.
    """
    stride = max(1, min(100, k // 64))
    while math.gcd(stride, 2 * 3 * 5 * 7) != 1:
        stride -= 1
    return stride


def sampled_floor(rows: Tensor, k: int, num_deviations: float = 0.0) -> Tensor:
    """Returns [R, 1], just below what about k reach; `num_deviations` asks for more."""
    sample = rows[:, :: sample_stride(k)].abs()
    size = sample.shape[1]
    share = size * k / rows.shape[1]
    wanted = min(size, max(1, round(share + num_deviations * math.sqrt(share))))
    found = sample.topk(wanted, sorted=False).values
    threshold = found.amin(1, keepdim=True)
    # Just below it, so that > takes the sampled number itself. But where more are as large, the
    # first of these would keep larger numbers behind them waiting, perhaps for ever.
    is_shared = (sample >= threshold).sum(1, keepdim=True) > wanted
    is_shared &= found.amax(1, keepdim=True) > threshold
    return torch.where(is_shared, threshold, just_below(threshold))


def just_below(threshold: Tensor) -> Tensor:
    """Returns the next float towards 0, so that > means >= for all but 0."""
    return threshold.nextafter(torch.zeros_like(threshold))


def _exact_in_blocks(row: Tensor, k: int) -> Tensor:
    """[1, k] of one row on a CPU: `topk` of the few entries that can be among the k largest."""
    # Five standard deviations of a sample's count beyond k, so that too few are nearly never
    # found. Then the whole row is searched.
    places = all_above(row[0], float(sampled_floor(row, k, num_deviations=5.0)))
    if len(places) < k:
        return row.abs().topk(k, sorted=False).indices
    return places[row[0, places].abs().topk(k, sorted=False).indices][None]


def all_above(numbers: Tensor, floor: float, at_least: int | None = None) -> Tensor:
    """Returns places of |x| > floor, or nan, ascending, up to the first `at_least`'s block.

    For a CPU: how many there are is looked up.

    Args:
        numbers: [numel]; not mutated.
        floor: At least 0.
        at_least: How many are enough; None: all.
    """
    # Of nothing, such as a region between two equal boundaries, there is nothing.
    found = [torch.empty(0, dtype=torch.int64, device=numbers.device)]
    missing = len(numbers) if at_least is None else at_least
    # numpy compares, and tells where, in a fifth of torch's time, but has no bfloat16.
    known = numbers.float() if numbers.dtype.itemsize < 4 else numbers
    sizes, is_below = _scratch_for(known[:TILE_ELEMENTS].numpy())
    for number, block in enumerate(torch.split(known, TILE_ELEMENTS)):
        if missing <= 0:
            break
        own, size = is_below[: len(block)], np.abs(block.numpy(), out=sizes[: len(block)])
        # Not `>`, which nan is not.
        np.logical_not(np.less_equal(size, floor, out=own), out=own)
        found.append(torch.from_numpy(np.flatnonzero(own)) + number * TILE_ELEMENTS)
        missing -= len(found[-1])
    return torch.cat(found)


def _scratch_for(block: Any) -> tuple[Any, Any]:
    """Memory for sizes and a mask of blocks like this one, or shorter; the same in each call.

    New memory would cost as much as comparing. Each thread has its own.
    """
    kept: dict[Any, tuple[Any, Any]] = _kept.__dict__
    if block.dtype.name not in kept:
        numel = TILE_ELEMENTS
        kept[block.dtype.name] = np.empty(numel, block.dtype), np.empty(numel, dtype=bool)
    return kept[block.dtype.name]


def all_reaching(numbers: Tensor, threshold: float) -> Tensor:
    """Returns places of |x| >= threshold, or nan, ascending; for 0, all but zeros.

    As `all_above`. Of fp64 numbers also those that fp32 rounds up to the threshold.
    """
    rounded = np.float32(min(threshold, torch.finfo(torch.float32).max))
    return all_above(numbers, float(np.nextafter(rounded, np.float32(0))))


def true_places(mask: Tensor) -> Tensor:
    """Returns where a flat mask on a CPU is true, [n] int64, five times as fast as torch's own."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


# --- about k numbers of a bucket, on a CPU --------------------------------------------------------

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
    return places[_places_of_largest(numbers.index_select(0, places).abs(), count)]


def _candidates(numbers: Tensor, count: int) -> Tensor:
    """Places, ascending, of all that may be among the largest, and of no 0."""
    if len(numbers) > FEW * count:
        # With five deviations more than enough, nearly always.
        floor = float(sampled_floor(numbers[None], count, num_deviations=5.0))
        places = all_above(numbers, floor)
        if len(places) >= count:
            return places
    return true_places(numbers != 0)


def _places_of_largest(sizes: Tensor, count: int) -> Tensor:
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
    """Returns what k numbers would have reached, if the tail is a power law (Hill).

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
        """Returns places of what is large, ascending, and the values; `commit` makes it count.

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
        """Keeps the threshold that was last used for the next step: this step is made."""
        self.value = self._next

    def discard(self) -> None:
        """Forgets the threshold that was last used: that step is not made."""
        self._next = self.value
