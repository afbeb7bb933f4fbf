"""What collectives cost on a cluster: alpha-beta links within a node and between nodes.

Formulas are the usual ones (Thakur, Rabenseifner, Gropp, IJHPCA 2005; NCCL's double binary trees).
A cost in seconds is of all ranks at once, which begin together; n is the size of the whole buffer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from lightning_dear.names import check_name

Algorithm = Literal["pairwise", "two_hops", "ring", "tree", "best"]
"""How a collective goes about it.

pairwise: every rank sends to every other one at once; for both halves of an all-reduce, as ours
    with hops=1. Gloo's all-reduces take a ring.
two_hops: every rank sends to every other one of its node at once, then those with the same place in
    their nodes to each other; as ours with gloo. All-reduces take a ring.
ring: P - 1 steps for a half, each after the one before.
tree: two binary trees that share the bytes, for all-reduces; half of one takes a ring.
best: as NCCL: rings for halves; for all-reduces a ring or trees, whichever is faster for a size.
"""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Attributes:
        alpha_s: Seconds that a message takes however small it is.
        beta_s: Seconds for a byte.
    """

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_s < math.inf and 0 <= self.beta_s < math.inf):
            raise ValueError(
                f"alpha_s and beta_s must be finite and not negative, got {self.alpha_s} and"
                f" {self.beta_s}."
            )

    def message_s(self, nbytes: float, num_messages: float = 1) -> float:
        """Seconds for so many messages, one after the other, of `nbytes` in all."""
        return num_messages * self.alpha_s + nbytes * self.beta_s


@dataclass(frozen=True)
class Curve:
    """Seconds of messages of several sizes, as measured, with straight lines between them.

    For what is no alpha and beta: gloo's all-gather takes the same up to some size, and loses a
    third of its rate above another. Below the smallest size it takes what that one takes, above
    the largest it goes on at that one's rate.

    Attributes:
        sizes: Bytes that a rank sends, rising.
        seconds: Of each.
        least_s: What every message takes at least.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    least_s: float = 0.0

    def __post_init__(self) -> None:
        is_rising = all(one < other for one, other in pairwise((0.0, *self.sizes)))
        if not self.sizes or not is_rising or len(self.sizes) != len(self.seconds):
            raise ValueError(
                "A curve needs sizes that are positive and rise, and seconds for each; got"
                f" {list(self.sizes)} and {list(self.seconds)}."
            )

    def message_s(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes`."""
        beyond = max(nbytes / self.sizes[-1], 1.0)
        return max(self.least_s, beyond * float(np.interp(nbytes, self.sizes, self.seconds)))


@dataclass(frozen=True)
class Network:
    """A cluster of equal nodes, each with one link that its ranks share.

    Attributes:
        between: A node's link to the others.
        world_size: Ranks in all.
        ranks_per_node: At most; they fill one node after the other.
        within: A rank's link to others of its node; None: what is in one node travels as if each
            rank were a node of its own.
        algorithm: How halves and all-reduces go about it.
        all_reduce: The backend's own all-reduce as measured, by bytes that a rank sends. Gloo's
            takes alpha or the bytes' time, whichever is longer, as its dependent steps hide behind
            the bytes of another one; others' take both. None: by `algorithm`.
        all_gather: The backend's own all-gather as measured when it is waited for, by bytes that a
            rank sends, which ours is not on gloo. None: as any half.
        reduce_scatter: The backend's own reduce-scatter alike, by bytes that a rank sends in a
            half, twice of which are on the way where it is an all-reduce. None: as any half, or as
            an all-reduce.
        has_reduce_scatter: Whether the backend has a reduce-scatter, and streams on which it takes
            place. Gloo has neither: a reduce-scatter that is not ours is an all-reduce, FSDP2
            stands still for each exchange, and all-reduces take a ring whatever `algorithm` says.
        sharded_tensor_s: Seconds of a step that a host takes for each tensor that is sharded by
            itself, as FSDP2's are. Nothing hides them; 0 where hosts run ahead of their devices.
        host_growth: How many times as long hosts take for what was measured of a workload
            (`copies_s`, `sharding_s`), as more ranks than there were share their cores.
    """

    between: Link
    world_size: int
    ranks_per_node: int = 1
    within: Link | None = None
    algorithm: Algorithm = "best"
    all_reduce: Link | None = None
    all_gather: Curve | None = None
    reduce_scatter: Curve | None = None
    has_reduce_scatter: bool = True
    sharded_tensor_s: float = 0.0
    host_growth: float = 1.0

    def __post_init__(self) -> None:
        for name in ("world_size", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        check_name("algorithm", self.algorithm, ALGORITHMS)
        if self.num_nodes > 1 and self.world_size % self.ranks_in_node:
            raise ValueError(
                f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node}; let all nodes"
                " have as many."
            )
        if self.ranks_in_node > 1 and self.num_nodes > 1 and self.within is None:
            raise ValueError("Nodes of several ranks need the link within one: within=Link(...).")

    @property
    def ranks_in_node(self) -> int:
        """Ranks of a node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that are used."""
        return -(-self.world_size // self.ranks_in_node)

    @property
    def outer_link(self) -> Link:
        """The link between nodes; of one node's ranks the one within it."""
        return self.between if self.num_nodes > 1 or self.within is None else self.within

    def sent_bytes(self, nbytes: float) -> float:
        """What a rank sends in one half, whatever the algorithm: n(P-1)/P."""
        return nbytes * (self.world_size - 1) / self.world_size

    def half_s(self, nbytes: float, starts: float | None = None) -> float:
        """Seconds for a reduce-scatter, or an all-gather, of `nbytes`; 0 at one rank.

        Args:
            nbytes: Of the whole buffer.
            starts: Messages that begin one after the other; None: as many as the algorithm takes.
        """
        if self.world_size == 1:
            return 0.0
        ways = {"pairwise": self._pairwise_s, "two_hops": self._two_hops_s}
        # Trees are for all-reduces, and NCCL has nothing but rings for halves.
        way = ways.get(self.algorithm, self._ring_s)
        return way(nbytes) if starts is None else self._started_s(way, nbytes, starts)

    def _started_s(self, way: Callable[[float], float], nbytes: float, starts: float) -> float:
        """What the bytes take some way, after so many starts."""
        return starts * self._slowest.alpha_s + way(nbytes) - way(0.0)

    def all_to_all_s(
        self, nbytes: float, starts: float | None = None, summed_nbytes: float | None = None
    ) -> float:
        """Seconds for what everybody has for everybody, of `nbytes` a rank; 0 at one rank.

        As a half, but that nothing is summed on its way: of a node with R of P ranks R (P - R) / P
        of the bytes leave it, and not (P - 1) / P. In two hops `summed_nbytes` are summed within
        nodes first, if they are given, and `nbytes` travel between them.
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
        """Seconds for an all-reduce of `nbytes`; 0 at one rank."""
        if self.world_size == 1:
            return 0.0
        if self.all_reduce is not None:
            if self.has_reduce_scatter:
                return self.all_reduce.message_s(2 * self.sent_bytes(nbytes))
            seconds = 2 * self.sent_bytes(nbytes) * self.all_reduce.beta_s
            return max(self.all_reduce.alpha_s, seconds)
        if self.algorithm == "two_hops" or not self.has_reduce_scatter:
            # Gloo's is a ring over all ranks, however our own halves travel.
            return 2 * self._ring_s(nbytes)
        if self.algorithm == "tree":
            return self._tree_s(nbytes)
        if self.algorithm == "best":
            return min(2 * self.half_s(nbytes), self._tree_s(nbytes))
        return 2 * self.half_s(nbytes)

    def all_gather_s(self, nbytes: float) -> float:
        """Seconds for the backend's own all-gather of `nbytes`; 0 at one rank."""
        if self.world_size == 1 or self.all_gather is None:
            return self.half_s(nbytes)
        return self.all_gather.message_s(self.sent_bytes(nbytes))

    def reduce_scatter_s(self, nbytes: float) -> float:
        """Seconds for the backend's own reduce-scatter of `nbytes`; 0 at one rank."""
        if self.world_size > 1 and self.reduce_scatter is not None:
            return self.reduce_scatter.message_s(self.sent_bytes(nbytes))
        return self.half_s(nbytes) if self.has_reduce_scatter else self.all_reduce_s(nbytes)

    # --- one half, by algorithm -----------------------------------------------------------------

    def _pairwise_s(self, nbytes: float) -> float:
        """All messages at once: one start, and every byte that leaves a node over its link."""
        piece, inside = nbytes / self.world_size, self.ranks_in_node
        outside = self.world_size - inside
        between_s = self.between.message_s(inside * outside * piece) if outside else 0.0
        return max(between_s, self._local.message_s((inside - 1) * piece) if inside > 1 else 0.0)

    def _two_hops_s(self, nbytes: float, between_nbytes: float | None = None) -> float:
        """All of a node's messages at once, then all of those between nodes."""
        inside, nodes = self.ranks_in_node, self.num_nodes
        if inside == 1 or nodes == 1:
            return self._pairwise_s(nbytes if between_nbytes is None else between_nbytes)
        outer_nbytes = nbytes if between_nbytes is None else between_nbytes
        within_s = self._local.message_s(nbytes * (inside - 1) / inside)
        return within_s + self.between.message_s(outer_nbytes * (nodes - 1) / nodes)

    def _ring_s(self, nbytes: float) -> float:
        """A block passes P - 1 links, of which a node's is one, and bytes wait for the slowest.

        Starts add up along the ring, as in NCCL's own model (its tuning.cc): while a block is on
        its way over one link, the next link is free.
        """
        nodes = self.num_nodes - 1
        starts_s = nodes * self.between.alpha_s
        starts_s += (self.world_size - 1 - nodes) * self._local.alpha_s
        return starts_s + self.sent_bytes(nbytes) * self._slowest.beta_s

    def _tree_s(self, nbytes: float) -> float:
        """Up and down two trees over the nodes, each with half of the bytes; chains in nodes."""
        depth = math.ceil(math.log2(self.num_nodes)) if self.num_nodes > 1 else 0
        inside = self.ranks_in_node - 1
        starts_s = 2 * (depth * self.between.alpha_s + inside * self._local.alpha_s)
        return starts_s + 2 * nbytes * self._slowest.beta_s

    @property
    def _slowest(self) -> Link:
        """Of the links that are used, in either respect."""
        used = [self._local] if self.ranks_in_node > 1 else []
        used += [self.between] if self.num_nodes > 1 else []
        return Link(max(one.alpha_s for one in used), max(one.beta_s for one in used))

    @property
    def _local(self) -> Link:
        return self.within if self.within is not None else self.between
