"""What collectives cost: by hand, at one rank, and in the limits in which formulas must agree."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator import ALGORITHMS, Link, Network

FAST, SLOW = Link(1.0, 1.0), Link(10.0, 5.0)

sizes = st.integers(0, 1000).map(float)
links = st.builds(Link, st.integers(0, 10).map(float), st.integers(0, 10).map(float))
shapes = st.sampled_from([(2, 1), (3, 1), (8, 1), (4, 2), (8, 2), (8, 8), (64, 4)])
networks = st.builds(
    lambda between, within, shape, algorithm: Network(
        between, *shape, within=within, algorithm=algorithm
    ),
    links,
    links,
    shapes,
    st.sampled_from(ALGORITHMS),
)


def eight_ranks(algorithm: str) -> Network:
    """Two nodes of four."""
    return Network(SLOW, 8, ranks_per_node=4, within=FAST, algorithm=algorithm)


@pytest.mark.parametrize(
    ("algorithm", "half_s", "all_reduce_s"),
    [
        # Of 80 bytes each of a node's 4 ranks sends 10 to each of the other node's 4: 160.
        ("pairwise", 10 + 5 * 160, 2 * (10 + 5 * 160)),
        # 7 steps of 10 bytes over the node's link.
        ("ring", 7 * (10 + 5 * 10), 2 * 7 * (10 + 5 * 10)),
        # 3 steps of 20 bytes within; one step between, of 10 bytes for each of 4 ranks.
        ("hierarchical", 3 * (1 + 20) + 10 + 5 * 40, 2 * (3 * 21 + 210)),
        # Up and down: one step between nodes and three within; the bytes once each way.
        ("tree", 7 * (10 + 5 * 10), 2 * (10 + 3 * 1) + 2 * 80 * 5),
    ],
)
def test_by_hand(algorithm: str, half_s: float, all_reduce_s: float) -> None:
    network = eight_ranks(algorithm)
    assert network.half_s(80.0) == half_s
    assert network.all_reduce_s(80.0) == all_reduce_s


def test_messages_to_all_take_what_leaves_a_node() -> None:
    assert eight_ranks("pairwise").messages_s(70.0) == eight_ranks("pairwise").half_s(80.0)


@given(links, sizes, st.sampled_from(ALGORITHMS))
def test_one_rank_sends_nothing(link: Link, nbytes: float, algorithm: str) -> None:
    alone = Network(link, 1, algorithm=algorithm, all_reduce=Link(5.0, 5.0))
    assert alone.half_s(nbytes) == alone.all_reduce_s(nbytes) == alone.sent_bytes(nbytes) == 0
    assert alone.messages_s(0) == 0


@given(networks, sizes)
def test_best_is_at_least_as_fast_as_each(network: Network, nbytes: float) -> None:
    best = replace(network, algorithm="best")
    for name in ("ring", "tree", "hierarchical"):
        other = replace(network, algorithm=name)
        assert best.half_s(nbytes) <= other.half_s(nbytes)
        assert best.all_reduce_s(nbytes) <= other.all_reduce_s(nbytes)


@given(networks, sizes, sizes)
def test_more_bytes_never_take_less(network: Network, one: float, more: float) -> None:
    assert network.half_s(one) <= network.half_s(one + more)
    assert network.all_reduce_s(one) <= network.all_reduce_s(one + more)


@given(networks, sizes)
def test_no_half_beats_the_nodes_link(network: Network, nbytes: float) -> None:
    inside, nodes = network.ranks_in_node, network.num_nodes
    least = nbytes * (nodes - 1) / network.world_size * network.between.beta_s
    assert network.half_s(nbytes) >= least * (1 - 1e-9)
    assert inside * nodes == network.world_size


@given(links, sizes)
def test_a_ring_of_single_ranks_is_hierarchical(link: Link, nbytes: float) -> None:
    ring = Network(link, 4, algorithm="ring")
    assert replace(ring, algorithm="hierarchical").half_s(nbytes) == ring.half_s(nbytes)


def test_a_measured_all_reduce_counts() -> None:
    network = Network(SLOW, 2, all_reduce=Link(3.0, 2.0))
    assert network.all_reduce_s(10.0) == 2 * 10
    assert network.all_reduce_s(1.0) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"world_size": 8, "ranks_per_node": 0}, "ranks_per_node must be at least 1"),
        ({"world_size": 6, "ranks_per_node": 4, "within": FAST}, "do not fill nodes of 4"),
        ({"world_size": 8, "ranks_per_node": 4}, "need the link within one: within=Link(...)"),
        ({"world_size": 8, "algorithm": "rings"}, "valid ones: pairwise, ring, tree"),
    ],
)
def test_impossible_networks_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Network(SLOW, **options)


@pytest.mark.parametrize("values", [(-1.0, 0.0), (0.0, float("inf")), (float("nan"), 0.0)])
def test_impossible_links_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        Link(*values)
