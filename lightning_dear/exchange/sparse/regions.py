"""Which region of a bucket belongs to which rank, so that all owners get about as many numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def added_up(slices: Tensor) -> Tensor:
    """[words] int32: the same part of all ranks' summaries, [num_regions, words], added up."""
    return slices.sum(0, dtype=torch.int32)


def put_together(slices: Tensor) -> Tensor:
    """[NUM_BINS] int64: the total, of [num_regions, words] int32 parts."""
    return slices.flatten().long()[:NUM_BINS]


def regions_of(total: Tensor, numel: int, num_regions: int) -> Tensor:
    """Where each region begins, and the end, from all ranks' summaries; integers only.

    Args:
        total: [NUM_BINS] int64, their sum.
        numel: Of the bucket.
        num_regions: One for each rank.

    Returns:
        [num_regions + 1] int64, on the device of `total`, which is not waited for.
    """
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


FEWEST_REACHED = 1 / 2
"""Of k: with fewer sums above the last threshold shares stay as they are."""


@dataclass(frozen=True)
class Report:
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

    def after(self, reports: Sequence[Report], k: int, cap: int, *, is_exact: bool) -> Shares:
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
