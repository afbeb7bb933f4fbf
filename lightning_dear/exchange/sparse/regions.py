"""Which region of a bucket belongs to which rank, and how many of its sums each owner keeps.

Regions are such that all owners get about as many numbers. What owners keep follows from what they
have told each other in the step before, but where they have to agree on it, and wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dear.collectives.work import SELECTION_TAGS, Collectives, as_metadata
from lightning_dear.compression.selectors import true_places
from lightning_dear.exchange.sparse.entries import Entries

NUM_BINS = 256
"""Of a histogram of places: a KiB, which for 10,000 numbers is little beside them."""


def equal_regions(numel: int, num_regions: int) -> list[int]:
    """Where each region begins, and the end: all as long, but for rounding."""
    return [numel * region // num_regions for region in range(num_regions + 1)]


def summary_of(places: Tensor, numel: int, weights: Tensor | None = None) -> Tensor:
    """A histogram of places, to be added up over ranks, for `regions_of`.

    Args:
        places: [n] int64: what this rank has selected.
        numel: Of the bucket.
        weights: [n] int64, so that no device is waited for; None: 1 each.

    Returns:
        [NUM_BINS] int64.
    """
    bins = places * NUM_BINS // numel
    if weights is None:
        return torch.bincount(bins, minlength=NUM_BINS)
    return weights.new_zeros(NUM_BINS).index_add_(0, bins, weights)


def words_of_slice(num_regions: int) -> int:
    """Words of 4 bytes of each part into which `sliced` cuts a summary."""
    return -(-NUM_BINS // num_regions)


def sliced(summary: Tensor, num_regions: int) -> Tensor:
    """[num_regions, words] int32: a summary in as many parts, each for a rank that adds it up."""
    width = words_of_slice(num_regions)
    filled = summary.new_zeros(num_regions * width, dtype=torch.int32)
    filled[:NUM_BINS] = summary
    return filled.view(num_regions, width)


def regions_of(total: Tensor, numel: int, num_regions: int) -> Tensor:
    """Where each region begins, and the end, from all ranks' summaries; integers only.

    Args:
        total: Their sum, integers: [NUM_BINS], or the slices of `sliced`, added up.
        numel: Of the bucket.
        num_regions: One for each rank.

    Returns:
        [num_regions + 1] int64, on the device of `total`, which is not waited for.
    """
    total = total.flatten()[:NUM_BINS].long()
    equal = numel * torch.arange(num_regions + 1, device=total.device) // num_regions
    # Both sides times num_regions, so that nothing is rounded before the end.
    reached = total.cumsum(0)
    wanted = reached[-1:] * torch.arange(1, num_regions, device=total.device)
    number = torch.searchsorted(reached * num_regions, wanted)
    inside = total[number]
    begin, end = (-(-numel * edge // NUM_BINS) for edge in (number, number + 1))
    part = wanted - (reached[number] - inside) * num_regions
    inner = begin + (end - begin) * part // (inside * num_regions).clamp_(min=1)
    # Where nobody has selected anything, quantiles say nothing.
    return torch.where(reached[-1:] > 0, torch.cat([equal[:1], inner, equal[-1:]]), equal)


# --- each owner's share of k ----------------------------------------------------------------------

FEWEST_REACHED = 1 / 2
"""Of k: with fewer sums above the last threshold shares stay as they are."""

REPORT_WORDS = 2
"""Words of 4 bytes in which an owner reports, besides how many numbers it sends."""


@dataclass(frozen=True)
class OwnerReport:
    """What one owner has told all ranks.

    Attributes:
        num_kept: Sums that it has sent.
        num_reached: Sums that have reached the threshold; of an exact step those that it has sent.
        smallest: The smallest |sum| that it has sent, without a loss scale; 0 if none.
    """

    num_kept: int
    num_reached: int
    smallest: float


@dataclass(frozen=True)
class Shares:
    """How one bucket's owners select in the next step, alike on all ranks.

    Attributes:
        threshold: Of the k largest sums, as of the last step; 0: not known.
        quotas: Most numbers that each owner keeps.
    """

    threshold: float
    quotas: tuple[int, ...]

    @classmethod
    def unknown(cls, num_owners: int) -> Shares:
        """Before the first step: it is to be an exact one."""
        return cls(0.0, (0,) * num_owners)

    def after(self, reports: Sequence[OwnerReport], k: int, cap: int, *, is_exact: bool) -> Shares:
        """What follows from a step.

        The threshold is the smallest number of the k largest. Where owners kept what were their
        shares it is the mean of their smallest ones, as all are the same if shares are right.

        Args:
            reports: Each owner's.
            k: How many all of them are to keep.
            cap: Most that one of them may keep.
            is_exact: Whether they have kept the k largest of all.
        """
        kept = [one for one in reports if one.num_kept]
        if not kept:
            return Shares(0.0, self.quotas)
        if is_exact:
            threshold = min(one.smallest for one in kept)
        else:
            total = sum(one.num_kept for one in kept)
            threshold = math.fsum(one.num_kept * one.smallest for one in kept) / total
        weights = [one.num_reached for one in reports]
        # Of a few sums that are left above a threshold, as after a spike, nothing can be learned.
        says_enough = is_exact or FEWEST_REACHED * k <= sum(weights)
        quotas = tuple(divided(k, weights, cap)) if says_enough else self.quotas
        return Shares(threshold if any(quotas) else 0.0, quotas)


def divided(total: int, weights: Sequence[int], cap: int) -> list[int]:
    """Divides `total` by weights, in integers; nobody gets more than `cap`.

    What is beyond somebody's cap goes to the others, by their weights; if these are 0, equally.

    Returns:
        For each weight a part, together at most `total`, less what is rounded off.
    """
    parts, open_ones = [0] * len(weights), list(range(len(weights)))
    while open_ones:
        own = [weights[one] for one in open_ones]
        own = own if any(own) else [1] * len(open_ones)
        wanted = [total * weight // sum(own) for weight in own]
        full = [one for one, part in zip(open_ones, wanted, strict=True) if part >= cap]
        if not full:
            for one, part in zip(open_ones, wanted, strict=True):
                parts[one] = part
            break
        for one in full:
            parts[one] = cap
        total -= cap * len(full)
        open_ones = [one for one in open_ones if one not in full]
    return parts


# --- what owners have to agree on -----------------------------------------------------------------

FILLED = 2
"""Where one number in so many is not 0, all of them travel in no more words than those alone, as
each of these has a place besides. (SparCML's own rule is a third.)"""


def are_filled(
    sums: Sequence[Entries], numels: Sequence[int], collectives: Collectives, first_tag: int
) -> list[bool]:
    """Whether all owners' sums are so many that they travel as they are. All call; blocks.

    Args:
        sums: Of each bucket, this owner's.
        numels: Elements of each bucket.
        collectives: What moves counts.
        first_tag: See `Exchange`.
    """
    with as_metadata(collectives):
        told = _told([(len(own.places), 0) for own in sums], collectives, first_tag)
    counts = told[:, :, 0].sum(1).tolist()
    return [FILLED * count >= numel for count, numel in zip(counts, numels, strict=True)]


def _told(own: Sequence[tuple[int, int]], collectives: Collectives, first_tag: int) -> Tensor:
    """[buckets, ranks, 2] int32: all ranks' pairs of counts. All ranks call; blocks."""
    counts = torch.zeros((collectives.world.size, len(own), 2), dtype=torch.int32)
    counts[collectives.world.rank] = torch.tensor(own)
    tag = SELECTION_TAGS + first_tag
    collectives.launch_all_gather(counts.view(-1), tag).wait()
    return counts.transpose(0, 1)


def largest_of_all(
    sums: Sequence[Entries], ks: Sequence[int], collectives: Collectives, first_tag: int
) -> list[Entries]:
    """Finds the k largest sums of each bucket, of equal ones the first. All ranks call; blocks.

    In all buckets of a step at once, so that ranks wait for each other but seven times. Equal sums
    stand in the order of the ranks, as regions do.

    Args:
        sums: Of each bucket, what this owner may keep at most.
        ks: How many of each bucket are wanted.
        collectives: What moves counts and histograms.
        first_tag: See `Exchange`.

    Returns:
        Of each bucket this owner's that are among them.
    """
    sizes = [own.numbers.abs() for own in sums]
    with as_metadata(collectives):

        def add_up(histograms: Tensor) -> None:
            tag = SELECTION_TAGS + first_tag
            collectives.launch_all_reduce(histograms.view(-1), tag).wait()

        # Caps may leave fewer than k: then the smallest, as a threshold of 0 would say nothing.
        thresholds = kth_largest(sizes, ks, add_up)
        above = [own > at for own, at in zip(sizes, thresholds, strict=True)]
        equal = [own == at for own, at in zip(sizes, thresholds, strict=True)]
        pairs = zip(above, equal, strict=True)
        counts = [(int(one.count_nonzero()), int(other.count_nonzero())) for one, other in pairs]
        told = _told(counts, collectives, first_tag)
    # The first ranks' equal sums come before this one's.
    rooms = torch.tensor(ks) - told[:, :, 0].sum(1) - told[:, : collectives.world.rank, 1].sum(1)
    kept = zip(sums, above, equal, rooms.tolist(), strict=True)
    return [
        own.at(true_places(is_above | (is_equal & (is_equal.cumsum(0) <= room))))
        for own, is_above, is_equal, room in kept
    ]


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
