"""The ranks of a training, and which of them share a host."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

RankPlace = tuple[tuple[str, str], tuple[int, int]]
"""Where one rank runs: (machine, network) as the rank sees them, and (node rank, local rank) as its
launcher says. All processes on one kernel see the same machine name. Node rank and local rank are
both 0 unless a launcher sets them."""


@dataclass(frozen=True)
class World:
    """All ranks of a training, the number of this rank, and the host of each rank.

    If there are several hosts, all with the same number of ranks, at least two, and the ranks of
    each host are numbered consecutively, the ranks form a grid: a row for each host, a column for
    each place on a host.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks, the world size.
        hosts: For each rank the number of its host. A host has the number of its first rank. Empty
            means that the hosts are not known.
    """

    rank: int = 0
    size: int = 1
    hosts: tuple[int, ...] = ()

    @cached_property
    def ranks_a_host(self) -> int:
        """Number of ranks on each host if the ranks form a grid of hosts; else 1."""
        num_ranks = len(self.hosts)
        count = num_ranks // max(1, len(set(self.hosts)))
        is_grid = bool(count) and list(self.hosts) == [r - r % count for r in range(num_ranks)]
        return count if is_grid and count < num_ranks else 1

    @cached_property
    def fewest_on_a_host(self) -> int:
        """Number of ranks on the host that has the fewest; 1 with one host, or none known."""
        counts = Counter(self.hosts).values()
        return min(counts) if len(counts) > 1 else 1

    @property
    def num_hosts(self) -> int:
        """Number of hosts in the grid. Without a grid it is the world size, whatever hosts are."""
        return self.size // self.ranks_a_host

    @property
    def host(self) -> int:
        """Row of this rank's host in the grid; the rank's number if there is no grid."""
        return self.rank // self.ranks_a_host

    @property
    def place_on_host(self) -> int:
        """Column of this rank in the grid, its place on its host; 0 if there is no grid."""
        return self.rank % self.ranks_a_host

    def with_place(self, rank: int) -> range:
        """Returns the ranks that have the same place on their hosts as `rank`, one for each host.

        Without a grid that is all ranks.
        """
        return range(rank % self.ranks_a_host, self.size, self.ranks_a_host)

    @property
    def description(self) -> str:
        """Text for messages, such as "2 hosts with 4 ranks each". `hosts` must not be empty."""
        counts = Counter(self.hosts).values()
        least, most = min(counts), max(counts)
        if most == 1:
            return "one rank a host"
        if len(counts) == 1:
            return f"one host with {most} ranks"
        each = f"{most} ranks each" if least == most else f"{least} to {most} ranks"
        return f"{len(counts)} hosts with {each}"


def hosts_of(places: Sequence[RankPlace]) -> tuple[tuple[int, ...], str]:
    """Finds out which ranks share a host. Local.

    Usually the node ranks decide, so that all containers of one node count as one host. Node ranks
    are not used if they contradict what the ranks see, or if two ranks have the same node rank and
    local rank. Then ranks share a host if they see the same network of the same machine.

    Args:
        places: Places of all ranks, in rank order.

    Returns:
        `World.hosts`, and the reason why the node ranks are not used, for a warning. The reason is
        empty if they are used, if all node ranks are equal, or if the networks give the same hosts.
    """
    columns = zip(*[(seen[0], seen, said[0]) for seen, said in places], strict=True)
    # For each rank the number of the first rank that has the same name.
    machines, networks, nodes = (tuple(map(names.index, names)) for names in columns)
    if len({said for _, said in places}) < len(places):
        wrong = "two ranks have the same node rank and local rank"
    elif _are_parted(nodes, machines):
        wrong = "two machines have the same node rank"
    elif _are_parted(networks, nodes):
        wrong = "ranks that see one network of one machine have different node ranks"
    else:
        return nodes, ""
    return networks, wrong if any(nodes) and nodes != networks else ""


def _are_parted(numbers: Sequence[int], others: Sequence[int]) -> bool:
    """Returns whether two ranks with equal entries in `numbers` have different ones in `others`."""
    return len({*zip(numbers, others, strict=True)}) > len({*numbers})
