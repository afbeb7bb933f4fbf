"""The k-th largest number of all ranks' numbers, to the bit, by sums of short histograms.

The bits of a float that is not negative, read as an integer, order as the numbers do. So a radix
select finds them digit by digit: what travels does not depend on how many numbers there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

DIGITS = (6, 5, 5, 5, 5, 5)
"""Bits of each digit, 31 in all. Longer ones would be fewer messages, and twice the bytes each."""


def kth_largest(
    sizes: Sequence[Tensor], ks: Sequence[int], add_up: Callable[[Tensor], None]
) -> list[float]:
    """Of several sets at once.

    Args:
        sizes: This rank's part of each set: [n] fp32 on a CPU, above 0.
        ks: Which number of each is asked for, from 1.
        add_up: Sums an int32 tensor over ranks, in place. Blocks.

    Returns:
        The k-th largest of each set, its smallest where it has fewer than k, 0 where it has none.
        Equal on all ranks.
    """
    bits = [one.view(torch.int32) for one in sizes]
    prefixes, wanted, shift = [0] * len(ks), list(ks), sum(DIGITS)
    for width in DIGITS:
        shift -= width
        histograms = torch.zeros((len(ks), 1 << width), dtype=torch.int32)
        for number, (own, prefix) in enumerate(zip(bits, prefixes, strict=True)):
            known = own[own >> (shift + width) == prefix]
            digits = (known >> shift) & ((1 << width) - 1)
            histograms[number] = torch.bincount(digits, minlength=1 << width)
        add_up(histograms)
        for number, histogram in enumerate(histograms.tolist()):
            digit, wanted[number] = _digit(histogram, wanted[number])
            prefixes[number] = prefixes[number] << width | digit
    return torch.tensor(prefixes, dtype=torch.int32).view(torch.float32).tolist()


def _digit(histogram: Sequence[int], wanted: int) -> tuple[int, int]:
    """The digit of the wanted-th largest, or of the smallest, and which one it is of that digit."""
    from_above = list(accumulate(reversed(histogram)))
    wanted = min(wanted, from_above[-1])
    if not wanted:
        return 0, 0
    place = bisect_left(from_above, wanted)
    digit = len(histogram) - 1 - place
    return digit, wanted - (from_above[place] - histogram[digit])
