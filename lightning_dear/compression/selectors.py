"""Finds the k values of largest magnitude: exactly, or about k of them by a threshold.

Comparing with a threshold costs a fraction of the time of `torch.topk`, which has to sort. The
price is that about k values are found, not exactly k. In a row that a codec encodes, only the first
k values found are taken, in the order of their places; if fewer are found, slots stay empty. (A row
has k slots, each for a value and its place.) In a whole bucket of a sparse all-reduce about k
values are sent, and the threshold is used for several steps.

A place is the index of a value in its row or bucket. In most functions nan counts as the largest
value, so that a gradient of nan reaches other ranks.
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
    """Finds up to k values of large magnitude in each row.

    What is found in a row does not depend on the other rows.

    Args:
        selector: A name in `SELECTORS`.
        rows: [R, numel] fp32, finite; not mutated.
        k: Number of slots of a row, from 1 to numel.

    Returns:
        [R, k] int64: for each row the places of the values found, in any order and all distinct,
        and numel in empty slots. In a row that is not all zeros at least one value is found.
    """
    find = SELECTORS[selector]
    if rows.is_cpu:
        # Row by row, since the number of values that a selector finds differs from row to row.
        return torch.cat([find(row, k) for row in torch.split(rows, 1)])
    return find(rows, k)


def exact(rows: Tensor, k: int) -> Tensor:
    """Returns the places of the k largest |x| of each row, [R, k] int64, in any order.

    No slot stays empty: zeros are taken if too few values are not 0. On a CPU R must be 1 if rows
    have more than `TILE_ELEMENTS` elements.
    """
    if rows.is_cpu and rows.shape[1] > TILE_ELEMENTS:
        # A threshold leaves out most values before `topk` sorts the others. It is so low that fewer
        # than k are found very rarely (five standard deviations). Then the whole row is sorted.
        places = all_above(rows[0], float(sampled_floor(rows, k, num_deviations=5.0)))
        if len(places) >= k:
            return places[rows[0, places].abs().topk(k, sorted=False).indices][None]
    return rows.abs().topk(k, sorted=False).indices


def sampled(rows: Tensor, k: int) -> Tensor:
    """Returns places of about k values above a threshold that is estimated from a sample.

    DGC selects so, too (Lin et al. 2018, section 5). The result is that of `first_above` with this
    threshold.
    """
    # If all values are wanted, a sample cannot tell the smallest of them. A threshold of 0 takes
    # all values except zeros.
    floor = torch.zeros_like(rows[:, :1]) if k == rows.shape[1] else sampled_floor(rows, k)
    return first_above(rows, floor, k)


SELECTORS = {selector.__name__: selector for selector in (exact, sampled)}
"""Name -> function (rows, k) that finds k or about k large values of each row; see `select`."""


def first_above(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Returns the places of the first k values of each row with |x| > floor; nan is taken, too.

    Args:
        rows: [R, numel] fp32; on a CPU R must be 1. Not mutated.
        floor: [R, 1] fp32, thresholds of at least 0, so that a zero is never taken. nan as a
            threshold counts as 0. Not mutated.
        k: Number of slots of a row.

    Returns:
        [R, k] int64, ascending in each row. If fewer than k values are found, the last slots hold
        numel.
    """
    # `x <= nan` is false for all x, so that zeros would be taken, too, if a threshold were nan.
    floor = floor.nan_to_num(nan=0.0)
    if rows.is_cpu:
        places = rows.new_full((1, k), rows.shape[1], dtype=torch.int64)
        found = all_above(rows[0], float(floor), k)[:k]
        places[0, : len(found)] = found
        return places
    return first_above_static(rows, floor, k)


def first_above_static(rows: Tensor, floor: Tensor, k: int) -> Tensor:
    """Does what `first_above` does, for any R and without making the host wait for a device.

    But `floor` must not be nan. The number of values above the floor is counted along each row.
    Slot j gets the place at which the count reaches j + 1, which is found by bisection.
    """
    # Counts are int32, since int64 would take twice the memory. `not <=` instead of `>` takes nan,
    # too.
    taken = (rows.abs() <= floor).logical_not_().cumsum(1, dtype=torch.int32)
    slots = torch.arange(1, k + 1, dtype=torch.int32, device=rows.device)
    # Made contiguous, since torch would otherwise do that with a warning.
    return torch.searchsorted(taken, slots.expand(len(rows), k).contiguous())


def sample_stride(k: int) -> int:
    """Returns the stride of a sample of a row, from 1 to 100.

    The sample is about 1 % of the row, or more if 1 % would contain fewer than about 64 of the k
    largest values. The row may be a flattened matrix. A stride that has a common factor with the
    width of the matrix would sample only some of its columns. Widths are mostly products of 2, 3, 5
    and 7. So the stride has none of these factors.
    """
    longest = max(1, min(100, k // 64))
    return next(one for one in range(longest, 0, -1) if math.gcd(one, 2 * 3 * 5 * 7) == 1)


def sampled_floor(rows: Tensor, k: int, num_deviations: float = 0.0) -> Tensor:
    """Returns thresholds such that about k values of each row are larger in magnitude.

    The thresholds are estimated from every `sample_stride(k)`-th value.

    Args:
        rows: [R, numel]; not mutated.
        k: Number of values wanted.
        num_deviations: Lowers the thresholds, so that more than k values are found: by this many
            standard deviations of the number of sampled values that are among the k largest.

    Returns:
        [R, 1], of the dtype of `rows`.
    """
    sample = rows[:, :: sample_stride(k)].abs()
    size = sample.shape[1]
    share = size * k / rows.shape[1]
    wanted = min(size, max(1, round(share + num_deviations * math.sqrt(share))))
    found = sample.topk(wanted, sorted=False).values
    threshold = found.amin(1, keepdim=True)
    # The threshold is just below the smallest value in `found`, so that > takes this value. But if
    # further sampled values are equal to it, the first of them would fill the slots, and larger
    # values behind them could wait for ever. Then the threshold is this value itself, so that >
    # leaves out the equal values, unless `found` contains no larger one.
    is_shared = (sample >= threshold).sum(1, keepdim=True) > wanted
    is_shared &= found.amax(1, keepdim=True) > threshold
    # Just below is the next float towards 0. Of a threshold of 0 that is 0 itself.
    return torch.where(is_shared, threshold, threshold.nextafter(torch.zeros_like(threshold)))


def all_above(values: Tensor, floor: float, at_least: int | None = None) -> Tensor:
    """Returns the places of values with |x| > floor, and of nan, ascending. For a CPU only.

    Args:
        values: [numel]; not mutated.
        floor: Threshold, at least 0. If it is nan, all places are returned.
        at_least: Number of places that are enough. The search ends after the `TILE_ELEMENTS`
            elements in which it is reached, so that more may be returned. None means all places.

    Returns:
        [n] int64.
    """
    # `torch.cat` needs at least one tensor, and `values` may be empty, such as an empty region.
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
    """Returns memory for the magnitudes of `TILE_ELEMENTS` values, and for a bool mask of them.

    Each call of a thread with the same dtype returns the same memory, since allocating it would
    take as long as comparing. Different threads get different memory.

    Args:
        block: numpy array with the dtype of the values.
    """
    kept: dict[Any, tuple[Any, Any]] = _kept.__dict__
    if block.dtype.name not in kept:
        kept[block.dtype.name] = np.empty(TILE_ELEMENTS, block.dtype), np.empty(TILE_ELEMENTS, bool)
    return kept[block.dtype.name]


def all_reaching(values: Tensor, threshold: float) -> Tensor:
    """Returns the places of values with |x| >= threshold, and of nan, ascending. For a CPU only.

    A threshold of 0 takes all values except zeros. fp64 values that would be rounded up to the
    threshold in fp32 are taken, too.

    Args:
        values: [numel]; not mutated.
        threshold: At least 0.
    """
    rounded = np.float32(min(threshold, torch.finfo(torch.float32).max))
    return all_above(values, float(np.nextafter(rounded, np.float32(0))))


def true_places(mask: Tensor) -> Tensor:
    """Returns the places where a flat mask is true, [n] int64, ascending. For a CPU only.

    It takes a fifth of the time of `torch.nonzero`.
    """
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


# --- about k values of a bucket, on a CPU --------------------------------------------------------

FEWEST, MOST = 2 / 3, 4 / 3
"""Fewest and most values that may reach a kept threshold, as shares of k. If fewer or more values
reach it, `LocalThreshold` sets it anew."""

FEW = 4
"""`largest` uses a sampled threshold only if there are more than FEW x count values. Among fewer
values, the threshold would leave out too few to save time."""


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` largest |x|. For a CPU only.

    If not all of several equal values can be taken, the first of them are.

    Args:
        values: [numel] fp32; not mutated. nan counts as the largest value; zeros are never taken.
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
    """Returns places, ascending, of values among which are the `count` largest, but no zeros.

    If fewer than `count` values are not 0, returns the places of all values that are not 0.
    """
    if len(values) > FEW * count:
        # The threshold is so low that too few values are found very rarely (five standard
        # deviations). Then all values are candidates.
        floor = float(sampled_floor(values[None], count, num_deviations=5.0))
        places = all_above(values, floor)
        if len(places) >= count:
            return places
    return true_places(values != 0)


def _places_of_largest(sizes: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` largest of `sizes`, ascending; of equal ones the first.

    Args:
        sizes: [n] fp32 magnitudes, each above 0 or nan; not mutated.
        count: Number of places wanted, at least 1. If it is n or more, all places are returned.
    """
    if count >= len(sizes):
        return torch.arange(len(sizes))
    # The smallest of the `count` largest magnitudes. A nan counts as inf.
    floor = float(sizes.topk(count, sorted=False).values.nan_to_num_(nan=math.inf).amin())
    own = sizes.numpy()
    is_kept = ~(own <= floor)
    room = count - np.count_nonzero(is_kept)
    if room > 0:
        is_kept[np.flatnonzero(own == floor)[:room]] = True
    # If there are more than `count` nan, all of them are kept so far.
    return torch.from_numpy(np.flatnonzero(is_kept)[:count])


def corrected(threshold: float, sizes: Tensor, k: int) -> float:
    """Returns the threshold that k values would have reached.

    Assumes that the number of values beyond a threshold is a power of the threshold. The exponent
    is Hill's estimate, from the values that have reached the used threshold.

    Args:
        threshold: Threshold that was used, above 0.
        sizes: [n] fp32, n at least 1: magnitudes of the values that have reached it.
        k: Number of values that should have reached it.
    """
    slope = float(sizes.log().mean()) - math.log(threshold)
    return threshold * math.pow(len(sizes) / k, slope)


class LocalThreshold:
    """Finds about k values of a bucket with a threshold that is kept from step to step.

    A rank of a sparse all-reduce selects with it what it sends. At times exactly k values are
    looked for, which sets the threshold anew.

    Attributes:
        value: Magnitude that values have to reach in the next step. 0 means that it is not known,
            so that the next step looks for exactly k values.
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = self._next = value

    def find(self, values: Tensor, k: int, *, is_exact: bool) -> tuple[Tensor, Tensor]:
        """Returns the places of large values, ascending, and these values.

        Also computes the threshold for the next step, which `commit` makes `value`.

        Args:
            values: [numel] fp32, on a CPU; not mutated.
            k: Number of values to look for, at least 1.
            is_exact: True means that the k largest values are returned. False means that all values
                that reach the threshold are returned, if these are between 2 k / 3 and 4 k / 3
                values, and otherwise the k largest.

        Returns:
            [n] int64 places and [n] fp32 values, none of them 0. n is k, or between 2 k / 3 and
            4 k / 3, or the number of values other than 0 if that is less.
        """
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
        """Makes the smallest magnitude of `found` the next threshold; returns both arguments."""
        self._next = float(found.abs().min()) if len(found) else 0.0
        return places, found

    def commit(self) -> None:
        """Makes the threshold that the last `find` computed the one of the next step.

        To be called once the optimizer has stepped.
        """
        self.value = self._next

    def discard(self) -> None:
        """Drops the threshold that the last `find` computed, because its step is left out."""
        self._next = self.value
