"""What all owners together keep of what they have summed, where they have to agree on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dear.collectives.work import SELECTION_NUMBERS, Collectives, as_metadata
from lightning_dear.exchange.sparse.entries import Entries

FILLED = 2
"""Where one number in so many is not 0, all of them travel in no more words than those alone, as
each of these has a place besides. (SparCML's own rule is a third.)"""


def are_filled(
    sums: Sequence[Entries], numels: Sequence[int], collectives: Collectives, first_number: int
) -> list[bool]:
    """Whether all owners' sums are so many that they travel as they are. All call; blocks.

    Args:
        sums: Of each bucket, this owner's.
        numels: Elements of each bucket.
        collectives: What moves counts.
        first_number: See `Exchange`.
    """
    with as_metadata(collectives):
        own = [(len(entries.places), 0) for entries in sums]
        told = _tell(own, collectives, SELECTION_NUMBERS + first_number)
    counts = (sum(count for count, _ in counts) for counts in told)
    return [FILLED * count >= numel for count, numel in zip(counts, numels, strict=True)]


def _tell(
    own: Sequence[tuple[int, int]], collectives: Collectives, number: int
) -> list[list[tuple[int, int]]]:
    """For each bucket all ranks' pairs of counts, in rank order. All ranks call; blocks."""
    if not own:
        return []
    world_size, rank = collectives.world_size, collectives.rank
    counts = torch.zeros((world_size, len(own), 2), dtype=torch.int32)
    counts[rank] = torch.tensor(own)
    collectives.launch_all_gather(counts.view(-1), number).wait()
    return [[(a, b) for a, b in of_bucket] for of_bucket in counts.transpose(0, 1).tolist()]


def largest_of_all(
    sums: Sequence[Entries], ks: Sequence[int], collectives: Collectives, first_number: int
) -> list[Tensor]:
    """Finds the k largest sums of each bucket, of equal ones the first. All ranks call; blocks.

    In all buckets of a step at once, so that ranks wait for each other but seven times. Equal sums
    stand in the order of the ranks, as regions do.

    Args:
        sums: Of each bucket, what this owner may keep at most.
        ks: How many of each bucket are wanted.
        collectives: What moves counts and histograms.
        first_number: See `Exchange`.

    Returns:
        For each bucket [n] int64, ascending: which of this owner's are among them.
    """
    if not sums:
        return []
    number, rank = SELECTION_NUMBERS + first_number, collectives.rank
    sizes = [own.numbers.abs() for own in sums]
    with as_metadata(collectives):
        # Caps may leave fewer than k: then the smallest, as a threshold of 0 would say nothing.
        thresholds = kth_largest(
            sizes,
            ks,
            lambda sums: collectives.launch_all_reduce(sums.view(-1), number).wait(),
        )
        equal = [(own == at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        above = [(own > at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        own = [(len(a), len(e)) for a, e in zip(above, equal, strict=True)]
        told = _tell(own, collectives, number)
    kept = []
    for at, (k, counts) in enumerate(zip(ks, told, strict=True)):
        # The first ranks' equal sums come before this one's.
        room = k - sum(num_above for num_above, _ in counts)
        room -= sum(num_equal for _, num_equal in counts[:rank])
        kept.append(torch.cat([above[at], equal[at][: max(0, room)]]).sort().values)
    return kept


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
    # Bits of numbers above 0, read as integers, are in the order of the numbers.
    bits = [one.view(torch.int32) for one in sizes]
    prefixes, wanted, shift = [0] * len(ks), list(ks), sum(DIGITS)
    for width in DIGITS:
        shift -= width
        histograms = torch.zeros((len(ks), 1 << width), dtype=torch.int32)
        for number, (own, prefix) in enumerate(zip(bits, prefixes, strict=True)):
            known = own[own >> (shift + width) == prefix]
            digits = (known >> shift) & ((1 << width) - 1)
            histograms[number] = torch.bincount(digits, minlength=1 << width)
        # All buckets in one message: ranks wait for each other once a digit.
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
