"""Which ranks there are, and which of them share a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

RankPlace = tuple[tuple[str, str], tuple[int, int]]
"""What a rank knows of its place: (machine, network) as it sees them, and (node rank, local rank)
as its launcher says. All processes on one kernel see the same machine name. Both numbers are 0
unless a launcher sets them.
"""


@dataclass(frozen=True)
class World:
    """All ranks of a training, and this one's place among them.

    Attributes:
        rank: This rank's number, from 0.
        size: Number of ranks, the world size.
        hosts: For each rank the number of its host, which is the number of the host's first rank.
            Empty if the hosts are not known.
    """

    rank: int = 0
    size: int = 1
    hosts: tuple[int, ...] = ()

    @cached_property
    def ranks_a_host(self) -> int:
        """How many ranks each host has, where ranks form a grid of hosts; else 1.

        A grid: there are several hosts, all have the same number of ranks, and a host's ranks are
        numbered one after the other.
        """
        num_ranks = len(self.hosts)
        count = num_ranks // max(1, len(set(self.hosts)))
        is_grid = bool(count) and list(self.hosts) == [r - r % count for r in range(num_ranks)]
        return count if is_grid and count < num_ranks else 1

    @cached_property
    def fewest_on_a_host(self) -> int:
        """How many ranks the host with the fewest ranks has; 1 if there is only one host."""
        counts = Counter(self.hosts).values()
        return min(counts) if len(counts) > 1 else 1

    @property
    def num_hosts(self) -> int:
        """Rows of the grid of hosts; the world size if there is no grid."""
        return self.size // self.ranks_a_host

    @property
    def host(self) -> int:
        """This rank's row in the grid of hosts."""
        return self.rank // self.ranks_a_host

    @property
    def place_on_host(self) -> int:
        """This rank's column in the grid of hosts."""
        return self.rank % self.ranks_a_host

    def with_place(self, rank: int) -> range:
        """The ranks that have the same place on their hosts as `rank`, one for each host."""
        return range(rank % self.ranks_a_host, self.size, self.ranks_a_host)

    @property
    def description(self) -> str:
        """For messages, such as "2 hosts with 4 ranks each". The hosts must be known."""
        counts = Counter(self.hosts).values()
        least, most = min(counts), max(counts)
        if most == 1:
            return "one rank a host"
        if len(counts) == 1:
            return f"one host with {most} ranks"
        each = f"{most} ranks each" if least == most else f"{least} to {most} ranks"
        return f"{len(counts)} hosts with {each}"


def hosts_of(places: Sequence[RankPlace]) -> tuple[tuple[int, ...], str]:
    """Finds out which ranks share a host.

    Usually by node ranks, so that the containers of one node count as one host. Where node ranks
    cannot be right, ranks share a host if they see the same network of the same machine.

    Args:
        places: Of all ranks, in rank order.

    Returns:
        `World.hosts`, and what is wrong with the node ranks. The latter is empty if they are used,
        if all of them are equal, or if networks tell the same hosts apart.
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


def _numbered(names: Sequence[Any]) -> tuple[int, ...]:
    """For each rank the first rank that has the same name."""
    return tuple(names.index(name) for name in names)


def _are_parted(ones: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two ranks with the same number in `ones` have different numbers in `others`."""
    return len({*zip(ones, others, strict=True)}) > len({*ones})
