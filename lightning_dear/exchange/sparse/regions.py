"""How a bucket is cut into regions, one for each rank, and how many sums each owner keeps.

With Ok-Topk regions are cut so that all owners get about the same number of entries. How many sums
owners keep follows from the reports of the step before, except in exact steps: there owners wait
for each other, to agree on the k largest of all sums. TopkDSA has equal regions and keeps all sums.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dear.collectives.work import SELECTION_TAGS, Collectives, as_metadata
from lightning_dear.compression.selectors import true_places
from lightning_dear.exchange.sparse.entries import Entries

NUM_BINS = 256
"""Number of bins in a histogram of places: 1 KiB, which is little beside 10,000 entries."""


def equal_regions(numel: int, num_regions: int) -> list[int]:
    """Returns the begins of `num_regions` regions, equal up to rounding, and the end."""
    return [numel * region // num_regions for region in range(num_regions + 1)]


def summary_of(places: Tensor, numel: int, weights: Tensor | None = None) -> Tensor:
    """Returns a histogram of places. Its sum over ranks is the argument `total` of `regions_of`.

    Args:
        places: [n] int64: places that this rank has selected.
        numel: Length of the bucket.
        weights: [n] int64: weight of each place, with which the host waits for no device. None
            means a weight of 1 each; only for a CPU.

    Returns:
        [NUM_BINS] int64: sum of the weights in each of NUM_BINS equal ranges of the bucket.
    """
    bins = places * NUM_BINS // numel
    if weights is None:
        return torch.bincount(bins, minlength=NUM_BINS)
    return weights.new_zeros(NUM_BINS).index_add_(0, bins, weights)


def words_of_slice(num_regions: int) -> int:
    """Returns the number of 4-byte words in each slice that `sliced` cuts."""
    return -(-NUM_BINS // num_regions)


def sliced(summary: Tensor, num_regions: int) -> Tensor:
    """Returns the histogram as [num_regions, words] int32: row r is the slice that rank r sums."""
    width = words_of_slice(num_regions)
    filled = summary.new_zeros(num_regions * width, dtype=torch.int32)
    filled[:NUM_BINS] = summary
    return filled.view(num_regions, width)


def regions_of(total: Tensor, numel: int, num_regions: int) -> Tensor:
    """Returns the begins of all regions, and the end, with about equally many entries in each.

    If there are no entries, regions are equal. Uses integers only, so that all ranks get the same.

    Args:
        total: Sum of the summaries of all ranks, integers: [NUM_BINS], or the slices of `sliced`.
        numel: Length of the bucket.
        num_regions: Number of regions, one for each rank.

    Returns:
        [num_regions + 1] int64, on the device of `total`, for which the host does not wait.
    """
    total = total.flatten()[:NUM_BINS].long()
    equal = numel * torch.arange(num_regions + 1, device=total.device) // num_regions
    # Both sides of the search are multiplied by num_regions, so that only the result is rounded.
    reached = total.cumsum(0)
    wanted = reached[-1:] * torch.arange(1, num_regions, device=total.device)
    number = torch.searchsorted(reached * num_regions, wanted)
    inside = total[number]
    begin, end = (-(-numel * edge // NUM_BINS) for edge in (number, number + 1))
    part = wanted - (reached[number] - inside) * num_regions
    inner = begin + (end - begin) * part // (inside * num_regions).clamp_(min=1)
    # If no rank has selected anything, there are no quantiles, and regions are equal.
    return torch.where(reached[-1:] > 0, torch.cat([equal[:1], inner, equal[-1:]]), equal)


# --- each owner's share of k ----------------------------------------------------------------------

FEWEST_REACHED = 1 / 2
"""Share of k: if fewer sums than that reach the threshold, quotas stay (not in exact steps)."""

REPORT_WORDS = 2
"""Number of 4-byte words of an owner's report in the notes of its message. `num_kept` is no part of
them, since each message begins with it."""


class OwnerReport(NamedTuple):
    """What one owner tells all ranks about the sums that it has kept in a step.

    Attributes:
        num_kept: Number of sums that it has kept and sent.
        num_reached: Number of sums that reached the threshold. In an exact step that is `num_kept`.
        smallest: Smallest magnitude that it has sent, without a loss scale; 0 if it sent none.
    """

    num_kept: int
    num_reached: int
    smallest: float


class Shares(NamedTuple):
    """How the owners of one bucket select sums in the next step. Equal on all ranks.

    Attributes:
        threshold: Smallest magnitude among the k largest sums, as of the last step. 0 means that it
            is not known, so that the next step is an exact one.
        quotas: For each owner the largest number of sums that it keeps; unused in an exact step.
    """

    threshold: float
    quotas: tuple[int, ...]

    @classmethod
    def unknown(cls, num_owners: int) -> "Shares":
        """Returns the shares before the first step: nothing is known."""
        return cls(0.0, (0,) * num_owners)

    def after(
        self, reports: Sequence[OwnerReport], k: int, cap: int, *, is_exact: bool
    ) -> "Shares":
        """Returns the shares for the next step, from the owners' reports on this one.

        After an exact step the threshold is the smallest sum that was kept. In other steps each
        owner keeps its own largest sums. The threshold is then the mean of the owners' smallest
        ones, weighted by the number of sums kept. If no sum was kept it is 0, and quotas stay.

        Args:
            reports: Report of each owner.
            k: Number of sums that all owners together keep.
            cap: Largest number of sums that one owner may keep.
            is_exact: Whether owners have kept the k largest of all sums.
        """
        kept = [report for report in reports if report.num_kept]
        if not kept:
            return Shares(0.0, self.quotas)
        if is_exact:
            threshold = min(report.smallest for report in kept)
        else:
            total = sum(report.num_kept for report in kept)
            threshold = math.fsum(report.num_kept * report.smallest for report in kept) / total
        weights = [report.num_reached for report in reports]
        # If only a few sums reach the threshold, as after a spike, their distribution over owners
        # says little, and quotas stay.
        says_enough = is_exact or FEWEST_REACHED * k <= sum(weights)
        quotas = tuple(divided(k, weights, cap)) if says_enough else self.quotas
        return Shares(threshold if any(quotas) else 0.0, quotas)


def divided(total: int, weights: Sequence[int], cap: int) -> list[int]:
    """Divides `total` in proportion to `weights`, in integers, with at most `cap` for each.

    What exceeds a cap is divided among the others, in proportion to their weights, or equally if
    these are all 0.

    Returns:
        A part for each weight. Their sum is at most `total`, because parts are rounded down, and
        less if all parts reach the cap.
    """
    parts, unfilled = [0] * len(weights), list(range(len(weights)))
    while unfilled:
        own = [weights[index] for index in unfilled]
        own = own if any(own) else [1] * len(unfilled)
        for index, weight in zip(unfilled, own, strict=True):
            parts[index] = min(total * weight // sum(own), cap)
        full = [index for index in unfilled if parts[index] == cap]
        if not full:
            break
        total -= cap * len(full)
        unfilled = [index for index in unfilled if index not in full]
    return parts


# --- agreement between owners ---------------------------------------------------------------------

FILLED = 2
"""If one element in this many is not 0, all elements are gathered, without places. That needs no
more words than these entries, which have a place beside each value. (SparCML's rule is a third.)"""


def are_filled(
    sums: Sequence[Entries], numels: Sequence[int], collectives: Collectives, first_tag: int
) -> list[bool]:
    """Returns for each bucket whether all elements are gathered, because at least half have sums.

    Collective, blocks. Counts the sums of all owners. Equal on all ranks.

    Args:
        sums: For each bucket this owner's sums.
        numels: For each bucket its number of elements.
        collectives: Moves the counts.
        first_tag: Same as in `Exchange`.
    """
    with as_metadata(collectives):
        told = _told([(len(own.places), 0) for own in sums], collectives, first_tag)
    counts = told[:, :, 0].sum(1).tolist()
    return [FILLED * count >= numel for count, numel in zip(counts, numels, strict=True)]


def _told(own: Sequence[tuple[int, int]], collectives: Collectives, first_tag: int) -> Tensor:
    """Gathers each rank's pair of counts of each bucket. Collective, blocks.

    Returns [buckets, ranks, 2] int32.
    """
    counts = torch.zeros((collectives.world.size, len(own), 2), dtype=torch.int32)
    counts[collectives.world.rank] = torch.tensor(own)
    collectives.launch_all_gather(counts.view(-1), SELECTION_TAGS + first_tag).wait()
    return counts.transpose(0, 1)


def largest_of_all(
    sums: Sequence[Entries], ks: Sequence[int], collectives: Collectives, first_tag: int
) -> list[Entries]:
    """Finds the k largest sums of all owners in each bucket. Collective, blocks.

    Handles all buckets of a step in the same messages, so that ranks wait for each other seven
    times, however many buckets there are. Of sums equal to the k-th largest the first are taken, in
    the order of ranks, which is the order of regions.

    Args:
        sums: For each bucket the sums that this owner may keep.
        ks: For each bucket the number of sums that are wanted.
        collectives: Moves counts and histograms.
        first_tag: Same as in `Exchange`.

    Returns:
        For each bucket those of this owner's sums that are among the k largest.
    """
    sizes = [own.numbers.abs() for own in sums]
    with as_metadata(collectives):

        def add_up(histograms: Tensor) -> None:
            collectives.launch_all_reduce(histograms.view(-1), SELECTION_TAGS + first_tag).wait()

        # Caps may leave fewer than k sums. Then the threshold is the smallest sum, and not 0.
        thresholds = kth_largest(sizes, ks, add_up)
        above = [own > at for own, at in zip(sizes, thresholds, strict=True)]
        equal = [own == at for own, at in zip(sizes, thresholds, strict=True)]
        pairs = zip(above, equal, strict=True)
        counts = [(int(more.count_nonzero()), int(same.count_nonzero())) for more, same in pairs]
        told = _told(counts, collectives, first_tag)
    # Of sums equal to the threshold, those of the ranks before this one are kept first.
    rooms = torch.tensor(ks) - told[:, :, 0].sum(1) - told[:, : collectives.world.rank, 1].sum(1)
    return [
        own.at(true_places(is_above | (is_equal & (is_equal.cumsum(0) <= room))))
        for own, is_above, is_equal, room in zip(sums, above, equal, rooms.tolist(), strict=True)
    ]


DIGITS = (6, 5, 5, 5, 5, 5)
"""Number of bits of each digit into which `kth_largest` cuts the 31 bits of an fp32 value above 0,
from the highest. One bit more in a digit would need twice the bytes in its message."""


def kth_largest(
    sizes: Sequence[Tensor], ks: Sequence[int], add_up: Callable[[Tensor], None]
) -> list[float]:
    """Returns the k-th largest value of each of several sets. Collective, blocks.

    Finds it digit by digit, from the highest, by a histogram of the digit over all ranks.

    Args:
        sizes: This rank's part of each set: [n] fp32 on a CPU, above 0.
        ks: For each set its k, from 1.
        add_up: Sums an int32 tensor over ranks, in place. Blocks.

    Returns:
        For each set, over all ranks, its k-th largest value: the smallest if the set has fewer than
        k values, 0 if it is empty. Equal on all ranks.
    """
    # The bits of floats above 0, read as integers, have the same order as the floats.
    bits = [part.view(torch.int32) for part in sizes]
    prefixes, wanted, shift = [0] * len(ks), list(ks), sum(DIGITS)
    for width in DIGITS:
        shift -= width
        histograms = torch.zeros((len(ks), 1 << width), dtype=torch.int32)
        for number, (own, prefix) in enumerate(zip(bits, prefixes, strict=True)):
            known = own[own >> (shift + width) == prefix]
            digits = (known >> shift) & ((1 << width) - 1)
            histograms[number] = torch.bincount(digits, minlength=1 << width)
        # All sets in one message, so that ranks wait for each other once per digit.
        add_up(histograms)
        for number, histogram in enumerate(histograms.tolist()):
            digit, wanted[number] = _digit(histogram, wanted[number])
            prefixes[number] = prefixes[number] << width | digit
    return torch.tensor(prefixes, dtype=torch.int32).view(torch.float32).tolist()


def _digit(histogram: Sequence[int], wanted: int) -> tuple[int, int]:
    """Returns the digit of the `wanted`-th largest value, and its place among those of that digit.

    Places count from 1, from the largest value. If there are fewer than `wanted` values, the
    smallest counts in its stead. (0, 0) means that there are no values.

    Args:
        histogram: Number of values with each digit.
        wanted: From 1, the largest value.
    """
    from_above = list(accumulate(reversed(histogram)))
    wanted = min(wanted, from_above[-1])
    if not wanted:
        return 0, 0
    place = bisect_left(from_above, wanted)
    digit = len(histogram) - 1 - place
    return digit, wanted - (from_above[place] - histogram[digit])
