"""Costs of collectives on a cluster: alpha-beta links within a node and between nodes.

Formulas are the usual ones (Thakur, Rabenseifner, Gropp, IJHPCA 2005; NCCL's double binary trees).
A cost is the seconds from the moment when all ranks begin to the end of the last one; n is the size
of the whole buffer, and P the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from lightning_dear.names import check_name

Algorithm = Literal["pairwise", "two_hops", "ring", "tree", "nccl"]
"""Algorithm of the collectives. A half is a reduce-scatter or an all-gather.

pairwise: In a half every rank sends to every other rank at once, as `strategy="dear"` does with
    hops=1. Gloo's all-reduces use a ring.
two_hops: In a half every rank sends to all ranks of its node at once, and then to the ranks with
    the same local rank on the other nodes, as `strategy="dear"` does with hops=2. All-reduces are
    the backend's own: a ring with gloo, as with "nccl" otherwise.
ring: A half has P - 1 steps, one after the other.
tree: All-reduces use two binary trees, each for half of the bytes. Halves use a ring.
nccl: As NCCL chooses, which is not always the fastest. Halves use a ring, all-reduces a ring or
    trees, whichever is faster for the size.
"""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

_MEASURED = ("all_reduce", "all_gather", "reduce_scatter")
"""Names of measured costs of a `Network`."""

BACKENDS = ("nccl", "gloo", "staged")
"""Names of backends. "staged" is gloo between GPUs, whose messages pass through the host."""


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Attributes:
        alpha_s: Seconds that every message takes, whatever its size.
        beta_s: Seconds for each byte.
    """

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s_per_byte", self.beta_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} of a link is not valid. Set 0 or more, finite.")

    def message_s(self, nbytes: float) -> float:
        """Return the seconds for a message of `nbytes`."""
        return self.alpha_s + nbytes * self.beta_s

    def scaled(self, factor: float) -> "Link":
        """Return the link with `factor` times the seconds of a byte."""
        return Link(self.alpha_s, factor * self.beta_s)


@dataclass(frozen=True)
class Curve:
    """Measured seconds of messages of several sizes, with linear interpolation between them.

    For costs that alpha and beta do not fit: gloo's all-gather takes the same time up to some size,
    and loses a third of its rate above another one. A message smaller than the smallest size takes
    that size's time. A larger one than the largest size has that size's rate.

    Attributes:
        sizes: Bytes that a rank sends, rising.
        seconds: Measured seconds for each size.
        least_s: Least seconds of any message.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    least_s: float = 0.0

    def __post_init__(self) -> None:
        is_rising = all(one < other for one, other in pairwise((0.0, *self.sizes)))
        if not self.sizes or not is_rising or len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"sizes={list(self.sizes)} and seconds={list(self.seconds)} are no curve. Give"
                " sizes that are positive and rise, and seconds for each size."
            )

    def message_s(self, nbytes: float) -> float:
        """Return the seconds for a message of `nbytes`."""
        beyond = max(nbytes / self.sizes[-1], 1.0)
        return max(self.least_s, beyond * float(np.interp(nbytes, self.sizes, self.seconds)))

    def scaled(self, factor: float) -> "Curve":
        """Return the curve with `factor` times the seconds beyond those of the smallest message."""
        first_s = self.seconds[0]
        return replace(self, seconds=tuple(first_s + factor * (s - first_s) for s in self.seconds))


@dataclass(frozen=True)
class Network:
    """A cluster of equal nodes, each with one link that its ranks share.

    Attributes:
        between: Link from a node to the other nodes.
        world_size: Number of ranks.
        ranks_per_node: Most ranks on a node; ranks fill one node after the other.
        within: Link from a rank to the other ranks of its node. None means that these ranks use
            links like `between`.
        algorithm: Algorithm of halves and all-reduces.
        all_reduce: Measured cost of the backend's own all-reduce, by bytes that a rank sends. With
            gloo an all-reduce takes the maximum of alpha and the bytes' time, because its
            dependent steps overlap with the bytes of another all-reduce; otherwise their sum. None
            means that the cost follows from `algorithm`.
        all_gather: Measured cost of the backend's own all-gather, waited for one by one, by bytes
            that a rank sends. On gloo `strategy="dear"` does not use it. None means the cost of a
            half by `algorithm`.
        reduce_scatter: Measured cost of the backend's own reduce-scatter, likewise. If it is an
            all-reduce (gloo), a rank sends twice these bytes. None means the cost of a half, or on
            gloo of an all-reduce.
        has_reduce_scatter: Whether the backend has a reduce-scatter and runs it on a stream. Gloo
            has neither: its reduce-scatter is an all-reduce, FSDP2 waits for each exchange, and
            all-reduces use a ring whatever `algorithm` says.
        sharded_tensor_s: Seconds in a step that the host needs for each tensor that FSDP2 shards.
            No computation hides them. 0 if hosts run ahead of their devices.
        host_growth: Factor on measured host times of a workload (`copies_s`, `sharding_s`), for
            more ranks on the same cores than were measured.
        bus: Link between a device and its host, if messages of devices travel through the host. It
            carries both directions at once. None means that no message does.
        sum_s: Seconds in which a host adds one byte of such messages to a sum.
    """

    between: Link
    world_size: int
    ranks_per_node: int = 1
    within: Link | None = None
    algorithm: Algorithm = "nccl"
    all_reduce: Link | None = None
    all_gather: Curve | None = None
    reduce_scatter: Curve | None = None
    has_reduce_scatter: bool = True
    sharded_tensor_s: float = 0.0
    host_growth: float = 1.0
    bus: Link | None = None
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("world_size", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not valid. Choose 1 or more.")
        check_name("algorithm", self.algorithm, ALGORITHMS)
        if self.num_nodes > 1 and self.world_size % self.ranks_in_node:
            raise ValueError(
                f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node}. Set"
                f" world_size to a multiple of {self.ranks_per_node}."
            )
        if self.ranks_in_node > 1 and self.num_nodes > 1 and self.within is None:
            raise ValueError("Nodes of several ranks need a link within. Add within=Link(...).")

    @property
    def ranks_in_node(self) -> int:
        """Number of ranks on a full node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Number of nodes with a rank."""
        return -(-self.world_size // self.ranks_in_node)

    @property
    def outer_link(self) -> Link:
        """The link between nodes. If all ranks are on one node, the link within it."""
        return self.between if self.num_nodes > 1 or self.within is None else self.within

    @property
    def has_nccl_hosts(self) -> bool:
        """Whether hops=2 makes a difference that must be asked for: NCCL, several ranks a node."""
        return self.has_reduce_scatter and min(self.ranks_in_node, self.num_nodes) > 1

    def at_rate(self, bits_per_s: float) -> "Network":
        """Return the network with another rate of `outer_link`; starts of messages stay.

        Times of measured collectives change by the same factor, except those of their starts. A
        link within nodes changes only if it has the same figures, as one of which nothing is known.

        Args:
            bits_per_s: The rate. Infinity means that bytes take no time.
        """
        own, outer = self.outer_link, Link(self.outer_link.alpha_s, 8 / bits_per_s)
        factor = outer.beta_s / own.beta_s if own.beta_s else 1.0
        changed = {name: one.scaled(factor) for name in _MEASURED if (one := getattr(self, name))}
        changed |= {name: outer for name in ("between", "within") if getattr(self, name) == own}
        return replace(self, **changed)

    def sent_bytes(self, nbytes: float) -> float:
        """Return the bytes that a rank sends in one half, by any algorithm: n(P-1)/P."""
        return nbytes * (self.world_size - 1) / self.world_size

    def half_s(self, nbytes: float, starts: float | None = None) -> float:
        """Return the seconds for a reduce-scatter, or an all-gather; 0 at one rank.

        Args:
            nbytes: Bytes of the whole buffer.
            starts: Number of messages that begin one after the other, each with its alpha. None
                means as many as the algorithm needs.
        """
        if self.world_size == 1:
            return 0.0
        ways = {"pairwise": self._pairwise_s, "two_hops": self._two_hops_s}
        # "tree" is for all-reduces only, and NCCL uses rings for halves.
        way = ways.get(self.algorithm, self._ring_s)
        return way(nbytes) if starts is None else self._started_s(way, nbytes, starts)

    def _started_s(self, way: Callable[[float], float], nbytes: float, starts: float) -> float:
        """Return the time of the algorithm `way`, with `starts` alphas instead of its own."""
        return starts * self._slowest.alpha_s + way(nbytes) - way(0.0)

    def all_to_all_s(
        self, nbytes: float, starts: float | None = None, summed_nbytes: float | None = None
    ) -> float:
        """Return the seconds of an all-to-all of `nbytes` a rank; 0 at one rank.

        Differs from a half in that messages are not summed on the way. So a node with R of P ranks
        sends R (P - R) / P of `nbytes`, and not (P - 1) / P.

        Args:
            nbytes: Bytes that each rank has for all ranks together.
            starts: Same as in `half_s`.
            summed_nbytes: Bytes that are summed within nodes first, with algorithm "two_hops"; only
                then `nbytes` travel between nodes. None means that nothing is summed first.
        """
        if self.world_size == 1:
            return 0.0
        if self.algorithm == "two_hops" and summed_nbytes is not None:
            more_s = max((starts or 1) - 1, 0) * self.between.alpha_s
            return self._two_hops_s(summed_nbytes, nbytes) + more_s
        if starts is not None:
            return self._started_s(self._pairwise_s, nbytes, starts)
        if self.algorithm == "pairwise":
            return self._pairwise_s(nbytes)
        return self.half_s(0.0) + self._pairwise_s(nbytes) - self._pairwise_s(0.0)

    def all_reduce_s(self, nbytes: float) -> float:
        """Return the seconds for an all-reduce of `nbytes`; 0 at one rank."""
        if self.world_size == 1:
            return 0.0
        if self.all_reduce is not None:
            if self.has_reduce_scatter:
                return self.all_reduce.message_s(2 * self.sent_bytes(nbytes))
            seconds = 2 * self.sent_bytes(nbytes) * self.all_reduce.beta_s
            return max(self.all_reduce.alpha_s, seconds)
        if not self.has_reduce_scatter:
            # Gloo's all-reduce is a ring over all ranks, whatever algorithm our halves use.
            return 2 * self._ring_s(nbytes)
        if self.algorithm == "tree":
            return self._tree_s(nbytes)
        if self.algorithm in ("nccl", "two_hops"):
            return min(2 * self._ring_s(nbytes), self._tree_s(nbytes))
        return 2 * self.half_s(nbytes)

    def all_gather_s(self, nbytes: float) -> float:
        """Return the seconds for the backend's own all-gather of `nbytes`; 0 at one rank."""
        if self.world_size == 1 or self.all_gather is None:
            return self.half_s(nbytes)
        return self.all_gather.message_s(self.sent_bytes(nbytes))

    def reduce_scatter_s(self, nbytes: float) -> float:
        """Return the seconds for the backend's own reduce-scatter of `nbytes`; 0 at one rank."""
        if self.world_size > 1 and self.reduce_scatter is not None:
            return self.reduce_scatter.message_s(self.sent_bytes(nbytes))
        return self.half_s(nbytes) if self.has_reduce_scatter else self.all_reduce_s(nbytes)

    def through_host(
        self, seconds: float, down: float, up: float, added: float
    ) -> tuple[float, float]:
        """Return for how long a collective keeps later ones waiting, and what it takes after that.

        Copies and sums of one collective overlap with those of others. So the slowest part of the
        way sets the rate: the network, the bus in one direction, or the sums.

        Args:
            seconds: Seconds of the collective on the network.
            down: Bytes that are copied from the device to the host.
            up: Bytes that are copied from the host to the device.
            added: Bytes that the host adds to a sum.
        """
        if self.bus is None or self.world_size == 1:
            return seconds, 0.0
        copies = self.bus.message_s(down), self.bus.message_s(up), added * self.sum_s
        longest = max(seconds, *copies)
        return longest, seconds + sum(copies) - longest

    # --- one half, by algorithm -----------------------------------------------------------------

    def _pairwise_s(self, nbytes: float) -> float:
        """All messages at once: one alpha, and all bytes that leave a node share its link."""
        piece, inside = nbytes / self.world_size, self.ranks_in_node
        outside = self.world_size - inside
        between_s = self.between.message_s(inside * outside * piece) if outside else 0.0
        return max(between_s, self._local.message_s((inside - 1) * piece) if inside > 1 else 0.0)

    def _two_hops_s(self, nbytes: float, between_nbytes: float | None = None) -> float:
        """All messages within nodes at once, and then all messages between nodes at once."""
        inside, nodes = self.ranks_in_node, self.num_nodes
        if inside == 1 or nodes == 1:
            return self._pairwise_s(nbytes if between_nbytes is None else between_nbytes)
        outer_nbytes = nbytes if between_nbytes is None else between_nbytes
        within_s = self._local.message_s(nbytes * (inside - 1) / inside)
        return within_s + self.between.message_s(outer_nbytes * (nodes - 1) / nodes)

    def _ring_s(self, nbytes: float) -> float:
        """A block passes P - 1 links, one of them for each further node; the slowest sets the rate.

        The alphas of all links add up, as in NCCL's own model (its tuning.cc), because a link can
        begin with a block only when the block has passed the link before.
        """
        outer, inner = self.num_nodes - 1, self.world_size - self.num_nodes
        starts_s = outer * self.between.alpha_s + inner * self._local.alpha_s
        return starts_s + self.sent_bytes(nbytes) * self._slowest.beta_s

    def _tree_s(self, nbytes: float) -> float:
        """Up and down two trees of nodes, half of the bytes each; a node's ranks form a chain."""
        depth, inside = math.ceil(math.log2(self.num_nodes)), self.ranks_in_node - 1
        starts_s = 2 * (depth * self.between.alpha_s + inside * self._local.alpha_s)
        return starts_s + 2 * nbytes * self._slowest.beta_s

    @property
    def _slowest(self) -> Link:
        """A link with the largest alpha and the largest beta of the links in use."""
        used = [self._local] if self.ranks_in_node > 1 else []
        used += [self.between] if self.num_nodes > 1 else []
        return Link(max(one.alpha_s for one in used), max(one.beta_s for one in used))

    @property
    def _local(self) -> Link:
        return self.within if self.within is not None else self.between
