"""Which region of a bucket belongs to which rank, so that all owners get about as many numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_BINS = 256
"""Of a histogram of places: a KiB, which for 10,000 numbers is little beside them."""


def equal_regions(numel: int, num_regions: int) -> list[int]:
    """Where each region begins, and the end: all as long, but for rounding."""
    return [numel * region // num_regions for region in range(num_regions + 1)]


def summary_of(kind: str, places: Tensor, numel: int, num_regions: int) -> Tensor:
    """What is to be added up over ranks, for `regions_of`.

    Args:
        kind: "histogram" or "mean": see `OkTopk.boundaries`.
        places: [n] int64, ascending: what this rank has selected.
        numel: Of the bucket.
        num_regions: One for each rank.

    Returns:
        [NUM_BINS or num_regions] int64.
    """
    if kind == "histogram":
        return torch.bincount(places * NUM_BINS // numel, minlength=NUM_BINS)
    if not len(places):
        return torch.tensor(equal_regions(numel, num_regions)[1:])
    ends = [len(places) * region // num_regions for region in range(1, num_regions)]
    return torch.cat([places[ends], torch.tensor([numel])])


def regions_of(kind: str, total: Sequence[int], numel: int, num_regions: int) -> list[int]:
    """Boundaries as `equal_regions`, from the sum of all ranks' summaries; integers only."""
    if kind == "mean":
        return [0, *(position // num_regions for position in total[:-1]), numel]
    if not sum(total):
        return equal_regions(numel, num_regions)
    boundaries, before, number = [0], 0, 0
    for region in range(1, num_regions):
        # Both sides times num_regions, so that nothing is rounded before the end.
        wanted = sum(total) * region
        while (before + total[number]) * num_regions < wanted:
            before, number = before + total[number], number + 1
        begin, end = (-(-numel * edge // NUM_BINS) for edge in (number, number + 1))
        part, whole = wanted - before * num_regions, total[number] * num_regions
        boundaries.append(begin + (end - begin) * part // whole)
    return [*boundaries, numel]
