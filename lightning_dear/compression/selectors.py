"""Finds the k values of largest magnitude: exactly, or about k of them by a threshold.

Comparing with a threshold costs a fraction of the time of `torch.topk`, which has to sort. The
price is that about k values are found, not exactly k. In a row that a codec encodes, values beyond
k are dropped in the order of their places, and slots without a value stay empty. In a whole bucket
of a sparse all-reduce about k values are sent, and the threshold is used for several steps.

A place is the index of a value in its row or bucket. nan counts as the largest value, so that a
gradient of nan reaches other ranks.
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
    """Finds k values of each row whose magnitude is large; depends on the row alone.

    Args:
        selector: A name in `SELECTORS`.
        rows: [R, numel] fp32, finite; not mutated.
        k: Number of slots, from 1 to numel.

    Returns:
        [R, k] int64: places, in any order and all distinct, and numel in empty slots. A row that
        is not all zeros has at least one place.
    """
    find = SELECTORS[selector]
    if rows.is_cpu:
        # Row by row, since the number of values that a selector finds differs from row to row.
        return torch.cat([find(row, k) for row in torch.split(rows, 1)])
    return find(rows, k)


def exact(rows: Tensor, k: int) -> Tensor:
    """Returns the places of the k largest |x|, [R, k] int64; no slot stays empty."""
    if rows.is_cpu and rows.shape[1] > TILE_ELEMENTS:
        return _exact_in_blocks(rows, k)
    return rows.abs().topk(k, sorted=False).indices


def sampled(rows: Tensor, k: int) -> Tensor:
    """Returns places of about k values above a threshold that is estimated from a sample.

    As in DGC (Lin et al. 2018, section 5); see `first_above`.
    """
    # If all values are wanted, a sample cannot tell the smallest one.
    floor = torch.zeros_like(rows[:, :1]) if k == rows.shape[1] else sampled_floor(rows, k)
    return first_above(rows, floor, k)


SELECTORS = {selector.__name__: selector for selector in (exact, sampled)}


def first_above(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Returns the places of the first k values with |x| > floor, or nan.

    Args:
        rows: [R, numel] fp32; on a CPU R must be 1.
        floor: [R, 1] fp32, at least 0, so that a zero is never taken. nan counts as 0.
        k: Number of slots.

    Returns:
        [R, k] int64, ascending; numel in empty slots.
    """
    # `x <= nan` is false for all x, so that zeros would be taken, too.
    floor = floor.nan_to_num(nan=0.0)
    if rows.is_cpu:
        places = rows.new_full((1, k), rows.shape[1], dtype=torch.int64)
        found = all_above(rows[0], float(floor), k)[:k]
        places[0, : len(found)] = found
        return places
    return first_above_static(rows, floor, k)


def first_above_static(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Does what `first_above` does, for any R and without making the host wait for a device.

    The number of values above the floor is counted along the row, and slot j is the place at which
    the count reaches j + 1, found by bisection.
    """
    # int32, as int64 counts would take twice the memory. `not <=` instead of `>` takes nan, too.
    taken = (rows.abs() <= floor).logical_not_().cumsum(1, dtype=torch.int32)
    slots = torch.arange(1, k + 1, dtype=torch.int32, device=rows.device)
    # Made contiguous, as torch would do it, too, with a warning.
    return torch.searchsorted(taken, slots.expand(len(rows), k).contiguous())


def sample_stride(k: int) -> int:
    """Returns the distance of sampled values: for 1 % of a row, but about 64 of its k largest.

    A stride that shares a factor with the width of a matrix would sample few of its columns. Widths
    are mostly products of 2, 3, 5 and 7, so it shares none of these.
    """
    stride = max(1, min(100, k // 64))
    while math.gcd(stride, 2 * 3 * 5 * 7) != 1:
        stride -= 1
    return stride


def sampled_floor(rows: Tensor, k: int, num_deviations: float = 0.0) -> Tensor:
    """Returns [R, 1] thresholds such that about k values of each row are larger.

    Args:
        rows: [R, numel]; not mutated.
        k: Number of values wanted.
        num_deviations: Lowers the threshold so that more than k are found, by this many standard
            deviations of the number of sampled values.
    """
    sample = rows[:, :: sample_stride(k)].abs()
    size = sample.shape[1]
    share = size * k / rows.shape[1]
    wanted = min(size, max(1, round(share + num_deviations * math.sqrt(share))))
    found = sample.topk(wanted, sorted=False).values
    threshold = found.amin(1, keepdim=True)
    # Just below the sampled value, so that > takes the value itself. But if more values are equal
    # to it, the first of them would fill the slots, and larger values behind them could wait for
    # ever: then > must leave out the equal ones.
    is_shared = (sample >= threshold).sum(1, keepdim=True) > wanted
    is_shared &= found.amax(1, keepdim=True) > threshold
    return torch.where(is_shared, threshold, just_below(threshold))


def just_below(threshold: Tensor) -> Tensor:
    """Returns the next float towards 0, so that > this means >= the threshold, unless that is 0."""
    return threshold.nextafter(torch.zeros_like(threshold))


def _exact_in_blocks(row: Tensor, k: int) -> Tensor:
    """Returns [1, k], the places of the k largest of one row on a CPU, by `topk` of a few of them.

    A threshold leaves out most values before `topk` sorts.
    """
    # Five standard deviations beyond k, so that fewer than k are found very rarely. If they are,
    # the whole row is sorted.
    places = all_above(row[0], float(sampled_floor(row, k, num_deviations=5.0)))
    if len(places) < k:
        return row.abs().topk(k, sorted=False).indices
    return places[row[0, places].abs().topk(k, sorted=False).indices][None]


def all_above(values: Tensor, floor: float, at_least: int | None = None) -> Tensor:
    """Returns the places of values with |x| > floor, or nan, ascending. For a CPU only.

    Args:
        values: [numel]; not mutated.
        floor: At least 0.
        at_least: Number of places that are enough: the search ends after the block in which it is
            reached. None means all places.
    """
    # `torch.cat` needs one tensor at least; there may be no values, as between equal boundaries.
    found = [torch.empty(0, dtype=torch.int64, device=values.device)]
    missing = len(values) if at_least is None else at_least
    # numpy compares and finds places in a fifth of torch's time, but has no bfloat16.
    known = values.float() if values.dtype.itemsize < 4 else values
    sizes, is_below = _scratch_for(known[:TILE_ELEMENTS].numpy())
    for number, block in enumerate(torch.split(known, TILE_ELEMENTS)):
        if missing <= 0:
            break
        own, size = is_below[: len(block)], np.abs(block.numpy(), out=sizes[: len(block)])
        # `not <=` instead of `>` takes nan, too.
        np.logical_not(np.less_equal(size, floor, out=own), out=own)
        found.append(torch.from_numpy(np.flatnonzero(own)) + number * TILE_ELEMENTS)
        missing -= len(found[-1])
    return torch.cat(found)


def _scratch_for(block: Any) -> tuple[Any, Any]:
    """Returns memory for magnitudes and a mask of a block; the same in each call of a thread.

    New memory would take as long as comparing. Threads do not share it.
    """
    kept: dict[Any, tuple[Any, Any]] = _kept.__dict__
    if block.dtype.name not in kept:
        numel = TILE_ELEMENTS
        kept[block.dtype.name] = np.empty(numel, block.dtype), np.empty(numel, dtype=bool)
    return kept[block.dtype.name]


def all_reaching(values: Tensor, threshold: float) -> Tensor:
    """Returns the places of |x| >= threshold, or nan, ascending. For a CPU only.

    A threshold of 0 takes all values but zeros. fp64 values that fp32 rounds up to the threshold
    are taken, too.
    """
    rounded = np.float32(min(threshold, torch.finfo(torch.float32).max))
    return all_above(values, float(np.nextafter(rounded, np.float32(0))))


def true_places(mask: Tensor) -> Tensor:
    """Returns the places where a flat mask on a CPU is true, [n] int64; 5 x as fast as torch."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


# --- about k values of a bucket, on a CPU --------------------------------------------------------

FEWEST, MOST = 2 / 3, 4 / 3
"""Fewest and most values that may reach a threshold, as shares of k; otherwise it is set anew."""

FEW = 4
"""A sample is used to look for `count` values only among more than FEW x count values: with fewer
it would not leave out enough to pay."""


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the largest |x|; of equal ones the first count. For a CPU only.

    Args:
        values: [numel] fp32; not mutated. nan counts as largest; zeros are never taken.
        count: Number of places wanted, at least 0.

    Returns:
        [count] int64, ascending; fewer if fewer values are not 0.
    """
    if count >= len(values):
        return true_places(values != 0)
    if not count:
        return torch.empty(0, dtype=torch.int64)
    places = _candidates(values, count)
    return places[_places_of_largest(values.index_select(0, places).abs(), count)]


def _candidates(values: Tensor, count: int) -> Tensor:
    """Returns places, ascending, of values that include the `count` largest, and no zeros."""
    if len(values) > FEW * count:
        # Five standard deviations of the sample's count below it: very rarely too few are found.
        floor = float(sampled_floor(values[None], count, num_deviations=5.0))
        places = all_above(values, floor)
        if len(places) >= count:
            return places
    return true_places(values != 0)


def _places_of_largest(sizes: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` largest of `sizes`, all above 0 or nan, ascending."""
    if count >= len(sizes):
        return torch.arange(len(sizes))
    # The smallest magnitude of the `count` largest, with nan as inf.
    floor = float(sizes.topk(count, sorted=False).values.nan_to_num_(nan=math.inf).amin())
    own = sizes.numpy()
    is_kept = ~(own <= floor)
    room = count - np.count_nonzero(is_kept)
    if room > 0:
        is_kept[np.flatnonzero(own == floor)[:room]] = True
    # There may be more than `count` nan.
    return torch.from_numpy(np.flatnonzero(is_kept)[:count])


def corrected(threshold: float, sizes: Tensor, k: int) -> float:
    """Returns the threshold that k values would have reached, if the tail is a power law.

    The exponent is Hill's estimate.

    Args:
        threshold: Threshold that was used, above 0.
        sizes: [n] fp32, n at least 1: magnitudes of the values that have reached it.
        k: Number of values that should have reached it.
    """
    slope = float(sizes.log().mean()) - math.log(threshold)
    return threshold * math.pow(len(sizes) / k, slope)


class LocalThreshold:
    """Finds about k values of a bucket with a threshold that is kept from step to step.

    Used by a rank of a sparse all-reduce to select what it sends. At times exactly k values are
    looked for, which sets the threshold anew.

    Attributes:
        value: Magnitude that values have to reach. 0 means that it is not known yet.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self._next = value

    def find(self, values: Tensor, k: int, *, is_exact: bool) -> tuple[Tensor, Tensor]:
        """Returns the places of large values, ascending, and these values.

        The threshold for the next step counts only after `commit`.

        Args:
            values: [numel] fp32, on a CPU; not mutated.
            k: Number of values to look for, at least 1.
            is_exact: True means exactly the k largest. False means those that reach the threshold,
                if they are between 2 k / 3 and 4 k / 3.

        Returns:
            [n] int64 places and [n] fp32 values without zeros. n is k, or between the bounds above,
            or the number of values other than 0 if that is less.
        """
        self._next = self.value
        if not is_exact and self.value > 0:
            places = all_reaching(values, self.value)
            found = values.index_select(0, places)
            if FEWEST * k <= len(places) <= MOST * k:
                self._next = corrected(self.value, found.abs(), k)
                return places, found
            if len(places) > k:
                kept = largest(found, k)
                return self._note(places[kept], found[kept])
        places = largest(values, k)
        return self._note(places, values.index_select(0, places))

    def _note(self, places: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        self._next = float(found.abs().min()) if len(found) else 0.0
        return places, found

    def commit(self) -> None:
        """Keeps the threshold of the last `find` for the next step: the optimizer has stepped."""
        self.value = self._next

    def discard(self) -> None:
        """Drops the threshold of the last `find`: its step is left out."""
        self._next = self.value
