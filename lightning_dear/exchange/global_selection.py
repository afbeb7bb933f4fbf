"""What all owners together keep of what they have summed: about k numbers of each bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dear.compression.thresholds import FEWEST, MOST, STEADINESS
from lightning_dear.device_work import device_work
from lightning_dear.exchange.entries import Entries
from lightning_dear.exchange.kth_largest import kth_largest
from lightning_dear.exchange.owned_bucket import OwnedBucket
from lightning_dear.exchange.region_bucket import RegionBucket
from lightning_dear.work import SELECTION_NUMBERS, Collectives, as_metadata

FILLED = 2
"""Where one number in so many is not 0, all of them travel in no more words than those alone, as
each of these has a place besides. (SparCML's own rule is a third.)"""


def keep_all(buckets: Sequence[RegionBucket], collectives: Collectives, first_number: int) -> None:
    """Keeps all sums of all owners, and tells ranks how many there are. All ranks call; blocks."""
    with device_work():
        found = [one.candidates(0.0)[0] for one in buckets]
    with as_metadata(collectives):
        own = [(len(entries.places), 0) for entries in found]
        told = tell(own, collectives, SELECTION_NUMBERS + first_number)
    for one, entries, counts in zip(buckets, found, told, strict=True):
        one.keep(entries)
        one.is_filled = FILLED * sum(count for count, _ in counts) >= one.numel


def tell(
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


def add_up_summaries(buckets: Sequence[OwnedBucket], collectives: Collectives, number: int) -> None:
    """Tells those buckets of which new regions are due what all ranks have selected. All call."""
    due = [one for one in buckets if one.are_regions_due]
    if not due:
        return
    summaries = [one.summary for one in due]
    # Positions of many ranks add up to more than 32 bits hold.
    is_narrow = all(one.ok.boundaries == "histogram" for one in due)
    total = torch.cat(summaries).to(torch.int32 if is_narrow else torch.int64)
    collectives.launch_all_reduce(total, number).wait()
    parts = torch.split(total, [len(one) for one in summaries])
    for one, part in zip(due, parts, strict=True):
        one.note_total(part.long())


class GlobalSelection:
    """Chooses in all buckets of a step at once, so that ranks wait for each other but once.

    In all ranks alike, and blocks. Exactly k numbers where a bucket's exact threshold is due, or
    its last one would keep fewer than 2 k / 3 or more than 4 k / 3; else what reaches the last
    threshold. Owners' caps come first.

    Args:
        buckets: Sparse ones, summed.
        collectives: What moves counts and histograms.
        first_number: See `DenseExchange`.
        scale: What sums are multiplied by.
    """

    def __init__(
        self,
        buckets: Sequence[RegionBucket],
        collectives: Collectives,
        first_number: int,
        scale: float,
    ) -> None:
        self._buckets, self._scale = buckets, scale
        self._collectives, self._number = collectives, SELECTION_NUMBERS + first_number

    def choose(self) -> None:
        """Leaves in each bucket's mean what this rank's region keeps."""
        with as_metadata(self._collectives):
            exact = [one for one in self._buckets if self._is_due(one)]
            reused = [one for one in self._buckets if not self._is_due(one)]
            exact += self._choose_by_threshold(reused)
            self._choose_exactly(exact)
            add_up_summaries(self._buckets, self._collectives, self._number)

    def _is_due(self, one: RegionBucket) -> bool:
        return one.global_threshold <= 0 or one.is_due(one.ok.tau_prime)

    # --- by the last threshold --------------------------------------------------------------------

    def _choose_by_threshold(self, buckets: Sequence[RegionBucket]) -> list[RegionBucket]:
        """Returns those in which too few or too many reach it, where nothing was chosen."""
        with device_work():
            found = [one.candidates(one.global_threshold * self._scale) for one in buckets]
        told = self._tell([(len(own.places), count) for own, count in found])
        left = []
        for one, (own, _), counts in zip(buckets, found, told, strict=True):
            kept, reached = (sum(column) for column in zip(*counts, strict=True))
            if not FEWEST * one.k <= reached <= MOST * one.k:
                left.append(one)
                continue
            one.tally.num_reached = reached
            one.keep(self._of_all(own, kept, one))
            one.note_threshold(one.global_threshold * (reached / one.k) ** STEADINESS)
        return left

    def _of_all(self, own: Entries, num_all: int, one: RegionBucket) -> Entries:
        """At most k of all that owners keep: of each owner's as many as are its share of k."""
        if num_all <= one.k or one.ok.owner_cap == math.inf:
            return own
        return own.largest(len(own.places) * one.k // num_all)

    # --- exactly ----------------------------------------------------------------------------------

    def _choose_exactly(self, buckets: Sequence[RegionBucket]) -> None:
        """The k largest, of equal ones the first: regions stand in the order of the ranks."""
        if not buckets:
            return
        with device_work():
            found = [one.candidates(0.0)[0] for one in buckets]
        sizes = [own.numbers.abs() for own in found]
        # Caps may leave fewer than k: then the smallest, as a threshold of 0 would say nothing.
        thresholds = kth_largest(sizes, [one.k for one in buckets], self._add_up)
        equal = [(own == at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        above = [(own > at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        told = self._tell([(len(a), len(e)) for a, e in zip(above, equal, strict=True)])
        rank = self._collectives.rank
        for number, (one, counts) in enumerate(zip(buckets, told, strict=True)):
            room = one.k - sum(num_above for num_above, _ in counts)
            room -= sum(num_equal for _, num_equal in counts[:rank])
            kept = torch.cat([above[number], equal[number][: max(0, room)]]).sort().values
            one.keep(found[number].at(kept))
            if thresholds[number]:
                one.note_threshold(thresholds[number] / self._scale)

    # --- what ranks tell each other ---------------------------------------------------------------

    def _tell(self, own: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        return tell(own, self._collectives, self._number)

    def _add_up(self, numbers: Tensor) -> None:
        self._collectives.launch_all_reduce(numbers.view(-1), self._number).wait()
