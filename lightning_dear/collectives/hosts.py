"""How many ranks each host has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def ranks_on_each_host(hosts: Sequence[int]) -> int:
    """How many ranks each of several hosts has, if all have as many, one after the other; else 1.

    Args:
        hosts: See `Collectives`.
    """
    size = len(hosts) // max(1, len(set(hosts)))
    is_grid = list(hosts) == [rank - rank % size for rank in range(len(hosts))] if size else False
    return size if is_grid and size < len(hosts) else 1


def ranks_on_a_host(hosts: Sequence[int]) -> int:
    """How many ranks there are on the host that has the fewest; 1 if there is only one host.

    Args:
        hosts: See `Collectives`.
    """
    counts = Counter(hosts).values()
    return min(counts) if len(counts) > 1 else 1
