"""Which ranks share a host, and how many each host has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Place = tuple[tuple[str, str], tuple[int, int]]
"""What a rank sees: its machine, by a name that all processes on one kernel give it, and a network
there; and what its launcher says: node rank and local rank, which are 0 unless somebody sets them.
"""


def hosts_of(places: Sequence[Place]) -> tuple[list[int], str]:
    """The number of each rank's host, that of its first rank; and what is wrong with node ranks.

    Nodes are hosts, so that containers of one node are one host. If node ranks cannot be right, a
    host is the ranks that see one network of one machine.

    Args:
        places: Of all ranks, in order.

    Returns:
        The second is empty if all node ranks are equal, or tell hosts apart as networks do.
    """
    columns = zip(*[(seen[0], seen, said[0]) for seen, said in places], strict=True)
    machines, networks, nodes = map(_numbered, columns)
    if len({said for _, said in places}) < len(places):
        wrong = "two ranks have the same node rank and local rank"
    elif _are_parted(nodes, machines):
        wrong = "two machines have the same node rank"
    elif _are_parted(networks, nodes):
        wrong = "ranks that see one network of one machine have different node ranks"
    else:
        return nodes, ""
    return networks, wrong if any(nodes) and nodes != networks else ""


def _numbered(names: Sequence[Any]) -> list[int]:
    """The first rank with each one's name."""
    return [names.index(name) for name in names]


def _are_parted(ones: list[int], others: list[int]) -> bool:
    """Whether two ranks with the same number in `ones` have different ones in `others`."""
    return len({*zip(ones, others, strict=True)}) > len({*ones})


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


def described(hosts: Sequence[int]) -> str:
    """Such as "2 hosts with 4 ranks each".

    Args:
        hosts: See `Collectives`; of one rank at least.
    """
    counts = Counter(hosts).values()
    least, most = min(counts), max(counts)
    if most == 1:
        return "one rank a host"
    if len(counts) == 1:
        return f"one host with {most} ranks"
    each = f"{most} ranks each" if least == most else f"{least} to {most} ranks"
    return f"{len(counts)} hosts with {each}"
