"""What all owners together keep of what they have summed, where they have to agree on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dear.collectives.work import SELECTION_NUMBERS, Collectives, as_metadata
from lightning_dear.exchange.kth_largest import kth_largest
from lightning_dear.exchange.region_bucket import RegionBucket
from lightning_dear.telemetry.device_work import device_work

FILLED = 2
"""Where one number in so many is not 0, all of them travel in no more words than those alone, as
each of these has a place besides. (SparCML's own rule is a third.)"""


def keep_all(buckets: Sequence[RegionBucket], collectives: Collectives, first_number: int) -> None:
    """Keeps all sums of all owners, and tells ranks how many there are. All ranks call; blocks."""
    with device_work():
        found = [one.sums() for one in buckets]
    with as_metadata(collectives):
        own = [(len(entries.places), 0) for entries in found]
        told = tell(own, collectives, SELECTION_NUMBERS + first_number)
    for one, entries, counts in zip(buckets, found, told, strict=True):
        with device_work():
            one.keep(entries, 1.0)
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


def keep_largest(
    buckets: Sequence[RegionBucket], collectives: Collectives, first_number: int, scale: float
) -> None:
    """Keeps the k largest sums of each bucket, of equal ones the first. All ranks call; blocks.

    In all buckets of a step at once, so that ranks wait for each other but seven times. What owners
    may keep at most comes first. Equal sums stand in the order of the ranks, as regions do.

    Args:
        buckets: Sparse ones, summed.
        collectives: What moves counts and histograms.
        first_number: See `DenseExchange`.
        scale: What sums are multiplied by.
    """
    if not buckets:
        return
    number, rank = SELECTION_NUMBERS + first_number, collectives.rank
    with device_work():
        found = [one.sums().largest(one.most_owned) for one in buckets]
    sizes = [own.numbers.abs() for own in found]
    with as_metadata(collectives):
        # Caps may leave fewer than k: then the smallest, as a threshold of 0 would say nothing.
        thresholds = kth_largest(
            sizes,
            [one.k for one in buckets],
            lambda sums: collectives.launch_all_reduce(sums.view(-1), number).wait(),
        )
        equal = [(own == at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        above = [(own > at).nonzero().view(-1) for own, at in zip(sizes, thresholds, strict=True)]
        own = [(len(a), len(e)) for a, e in zip(above, equal, strict=True)]
        told = tell(own, collectives, number)
    for at, (one, counts) in enumerate(zip(buckets, told, strict=True)):
        room = one.k - sum(num_above for num_above, _ in counts)
        room -= sum(num_equal for _, num_equal in counts[:rank])
        kept = torch.cat([above[at], equal[at][: max(0, room)]]).sort().values
        with device_work():
            one.keep(found[at].at(kept), scale)
