"""What collectives cost: by hand, at one rank, and in the limits in which formulas must agree."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator import Curve, Link, Network
from lightning_dear.simulator.network import ALGORITHMS

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
        # 60 bytes of each rank within; then 10 to the other node, of each of 4 ranks. A ring.
        ("two_hops", 1 + 60 + 10 + 5 * 40, 2 * (10 + 6 * 1 + 5 * 70)),
        # A block passes one link between and six within; 70 bytes go over the node's link.
        ("ring", 10 + 6 * 1 + 5 * 70, 2 * (10 + 6 * 1 + 5 * 70)),
        # Up and down: one step between nodes and three within; the bytes once each way.
        ("tree", 10 + 6 * 1 + 5 * 70, 2 * (10 + 3 * 1) + 2 * 80 * 5),
    ],
)
def test_by_hand(algorithm: str, half_s: float, all_reduce_s: float) -> None:
    network = eight_ranks(algorithm)
    assert network.half_s(80.0) == half_s
    assert network.all_reduce_s(80.0) == all_reduce_s


def test_the_slower_link_decides_wherever_it_is() -> None:
    inverted = Network(FAST, 8, ranks_per_node=4, within=SLOW, algorithm="ring")
    assert inverted.half_s(80.0) == 1 + 6 * 10 + 5 * 70
    tree = replace(inverted, algorithm="tree")
    assert tree.all_reduce_s(80.0) == 2 * (1 + 3 * 10) + 2 * 80 * 5


@given(links, sizes, st.sampled_from(ALGORITHMS))
def test_one_rank_sends_nothing(link: Link, nbytes: float, algorithm: str) -> None:
    alone = Network(link, 1, algorithm=algorithm, all_reduce=Link(5.0, 5.0))
    assert alone.half_s(nbytes) == alone.all_reduce_s(nbytes) == alone.sent_bytes(nbytes) == 0


def test_nccl_takes_rings_for_halves_and_the_faster_of_both_for_all_reduces() -> None:
    nccl = eight_ranks("nccl")
    assert nccl.half_s(80.0) == eight_ranks("ring").half_s(80.0)
    ring, tree = eight_ranks("ring"), eight_ranks("tree")
    for nbytes in (0.8, 80.0, 8000.0):
        least = min(ring.all_reduce_s(nbytes), tree.all_reduce_s(nbytes))
        assert nccl.all_reduce_s(nbytes) == least
    assert ring.all_reduce_s(8000.0) < tree.all_reduce_s(8000.0)
    assert ring.all_reduce_s(0.8) > tree.all_reduce_s(0.8)


@given(networks, sizes, sizes)
def test_more_bytes_never_take_less(network: Network, one: float, more: float) -> None:
    assert network.half_s(one) <= network.half_s(one + more)
    assert network.all_reduce_s(one) <= network.all_reduce_s(one + more)


@given(networks, sizes)
def test_no_half_beats_the_nodes_link(network: Network, nbytes: float) -> None:
    nodes = network.num_nodes
    # Every node has to hear of the other nodes' sums.
    least = nbytes * (nodes - 1) / nodes / network.ranks_in_node * network.between.beta_s
    flat = {"ring", "tree", "nccl"}
    share = 1 if network.algorithm in flat else network.ranks_in_node
    assert network.half_s(nbytes) >= share * least * (1 - 1e-9)


def test_another_rate_leaves_starts_of_messages_and_other_links() -> None:
    """Of measured collectives the bytes change by the same factor, whatever was measured."""
    curve = Curve((10.0, 20.0), (1.0, 3.0), least_s=0.5)
    costs = {"all_reduce": Link(3.0, 2.0), "all_gather": curve}
    network = Network(SLOW, 8, ranks_per_node=4, within=FAST, **costs)
    half = network.at_rate(8 / (2 * SLOW.beta_s))
    assert (half.between, half.within) == (Link(SLOW.alpha_s, 2 * SLOW.beta_s), FAST)
    assert half.all_reduce == Link(3.0, 4.0)
    assert half.all_gather == replace(curve, seconds=(1.0, 5.0))
    assert half.reduce_scatter is None
    endless = network.at_rate(math.inf)
    assert endless.between == Link(SLOW.alpha_s, 0.0)
    assert endless.all_reduce == Link(3.0, 0.0)
    assert endless.all_gather == replace(curve, seconds=(1.0, 1.0))
    # One host has no other link, and a link of which nothing else is known goes along.
    alone = Network(SLOW, 4, ranks_per_node=4, within=FAST).at_rate(4.0)
    assert (alone.between, alone.within) == (SLOW, Link(FAST.alpha_s, 2.0))
    same = Network(SLOW, 8, ranks_per_node=4, within=SLOW).at_rate(4.0)
    assert same.within == same.between == Link(SLOW.alpha_s, 2.0)
    assert Network(Link(1.0, 0.0), 2, all_reduce=FAST).at_rate(4.0).all_reduce == FAST


def test_nccls_all_reduces_do_not_change_where_ours_take_two_hops() -> None:
    for nbytes in (0.8, 8000.0):
        all_reduce_s = eight_ranks("two_hops").all_reduce_s(nbytes)
        assert all_reduce_s == eight_ranks("nccl").all_reduce_s(nbytes)
    gloo = replace(eight_ranks("two_hops"), has_reduce_scatter=False)
    assert gloo.all_reduce_s(0.8) == eight_ranks("ring").all_reduce_s(0.8)
    assert [gloo.has_nccl_hosts, eight_ranks("ring").has_nccl_hosts] == [False, True]
    assert not Network(SLOW, 8).has_nccl_hosts
    assert not Network(SLOW, 8, ranks_per_node=8).has_nccl_hosts


def test_a_measured_all_reduce_counts() -> None:
    gloo = Network(SLOW, 2, all_reduce=Link(3.0, 2.0), has_reduce_scatter=False)
    assert gloo.all_reduce_s(10.0) == 2 * 10
    assert gloo.all_reduce_s(1.0) == 3
    assert replace(gloo, has_reduce_scatter=True).all_reduce_s(10.0) == 3 + 2 * 10


def test_nothing_is_summed_on_its_way_from_all_to_all() -> None:
    # Of 80 bytes each of a node's 4 ranks sends 10 to each of the other node's 4.
    assert eight_ranks("pairwise").all_to_all_s(80.0) == 10 + 5 * 160
    # In two hops 80 are summed within, and what 8 are made of them travels between.
    assert eight_ranks("two_hops").all_to_all_s(8.0, 1, 80.0) == 1 + 60 + 10 + 5 * 4
    assert eight_ranks("ring").all_to_all_s(80.0) == (10 + 6 * 1) + 5 * 160
    assert eight_ranks("ring").all_to_all_s(80.0, starts=2) == 2 * 10 + 5 * 160
    # Alone in their nodes ranks send what they send in a half.
    single = Network(SLOW, 4, algorithm="ring")
    assert single.all_to_all_s(80.0) == single.half_s(80.0)
    assert Network(SLOW, 1).all_to_all_s(80.0) == 0


def test_starts_may_be_fewer() -> None:
    assert eight_ranks("ring").half_s(80.0, starts=2) == 2 * 10 + 5 * 70


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 0}, "world_size=0 is not valid. Choose 1 or more."),
        ({"world_size": 8, "ranks_per_node": 0}, "ranks_per_node=0 is not valid."),
        ({"world_size": 6, "ranks_per_node": 4, "within": FAST}, "do not fill nodes of 4"),
        ({"world_size": 8, "ranks_per_node": 4}, "need a link within. Add within=Link(...)"),
        ({"world_size": 8, "algorithm": "rings"}, "valid names: pairwise, two_hops, ring, tree"),
    ],
)
def test_impossible_networks_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Network(SLOW, **options)


@pytest.mark.parametrize("values", [(-1.0, 0.0), (0.0, float("inf")), (float("nan"), 0.0)])
def test_impossible_links_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="of a link is not valid"):
        Link(*values)


def test_of_many_messages_the_slowest_part_of_the_way_counts() -> None:
    """30 s on the network; 10 + 2 x 4 s down, 10 + 2 x 9 s up, and 5 s of sums."""
    network = replace(eight_ranks("pairwise"), bus=Link(10.0, 2.0), sum_s=0.5)
    assert network.through_host(30.0, 4.0, 9.0, 10.0) == (30.0, 18.0 + 28.0 + 5.0)
    assert network.through_host(20.0, 4.0, 9.0, 10.0) == (28.0, 20.0 + 18.0 + 5.0)
    for other in (replace(network, bus=None), replace(network, world_size=1)):
        assert other.through_host(30.0, 4.0, 9.0, 10.0) == (30.0, 0.0)
