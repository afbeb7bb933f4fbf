"""Hosts of several ranks: in how many hops they exchange, and what people are told."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives import factory
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.world import RankPlace, World, hosts_of
from lightning_dear.strategy import refusals
from tests.distributed.harness import distributed, run_ranks
from tests.distributed.rank import on_hosts, staged
from tests.lightning.fitting import WeightRecorder, assert_ranks_agree, ddp, dear, fit
from tests.lightning.nets import Net
from tests.training.models import distance


@pytest.mark.parametrize(
    ("hosts", "fewest", "each"),
    [
        ((), 1, 1),
        ((0,), 1, 1),
        ((0, 0, 0), 1, 1),
        ((0, 0, 2, 2), 2, 2),
        ((0, 1, 0, 1), 2, 1),
        ((0, 1, 1), 1, 1),
        ((0, 0, 0, 3, 3), 2, 1),
        ((0, 0, 0, 3, 3, 3, 6, 6, 6), 3, 3),
    ],
)
def test_how_many_ranks_share_a_host(hosts: tuple[int, ...], fewest: int, each: int) -> None:
    world = World(0, max(1, len(hosts)), hosts)
    assert world.fewest_on_a_host == fewest
    assert world.ranks_a_host == each


def _places(machines: str, networks: str, *node_and_local: tuple[int, ...]) -> list[RankPlace]:
    """A rank's machine and network are a letter each."""
    said = zip(*node_and_local, strict=True)
    return list(zip(zip(machines, networks, strict=True), said, strict=True))


NODES, LOCAL = (0, 0, 1, 1), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("places", "hosts", "wrong"),
    [
        pytest.param(_places("aabb", "nnmm", NODES, LOCAL), [0, 0, 2, 2], "", id="torchrun"),
        pytest.param(_places("abab", "nmnm", (0, 1, 0, 1), NODES), [0, 1, 0, 1], "", id="in turn"),
        # The same name stands for another network on another machine.
        pytest.param(_places("aabb", "nnnn", NODES, LOCAL), [0, 0, 2, 2], "", id="same names"),
        pytest.param(_places("aabb", "wxyz", NODES, LOCAL), [0, 0, 2, 2], "", id="containers"),
        pytest.param(_places("aaaa", "wxyz", (0,) * 4, (0, 1, 2, 3)), [0] * 4, "", id="one node"),
        pytest.param(_places("aaaa", "nnmm", NODES, LOCAL), [0, 0, 2, 2], "", id="emulated hosts"),
        pytest.param(_places("aaaa", "wxyz", (0,) * 4, (0,) * 4), [0, 1, 2, 3], "", id="unset"),
        pytest.param(
            _places("aaaa", "nnnn", (0,) * 4, (0,) * 4), [0] * 4, "", id="unset, one host"
        ),
        pytest.param(
            _places("aabb", "nnmm", (0,) * 4, LOCAL), [0, 0, 2, 2], "", id="all are node 0"
        ),
        pytest.param(_places("aabb", "nnmm", (0,) * 4, (0, 1, 2, 3)), [0, 0, 2, 2], "", id="MPI"),
        pytest.param(
            _places("aabbcc", "nnmmkk", (0, 0, 1, 1, 1, 1), (0, 1) * 3),
            [0, 0, 2, 2, 4, 4],
            "two ranks have the same node rank and local rank",
            id="two hosts with one node rank",
        ),
        pytest.param(
            _places("aabbcc", "nnmmkk", (0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 2, 3)),
            [0, 0, 2, 2, 4, 4],
            "two machines have the same node rank",
            id="two machines, one node rank",
        ),
        pytest.param(
            _places("aaaa", "nnnn", NODES, LOCAL),
            [0] * 4,
            "ranks that see one network of one machine have different node ranks",
            id="two identities of one host",
        ),
    ],
)
def test_which_ranks_share_a_host(places: list[RankPlace], hosts: list[int], wrong: str) -> None:
    assert hosts_of(places) == (tuple(hosts), wrong)


@distributed(world_sizes=(4,))
def test_node_ranks_count_and_wrong_ones_are_said() -> None:
    cpu, (node, local) = torch.device("cpu"), divmod(dist.get_rank(), 2)
    seen = ("machine", f"network of {dist.get_rank()}")
    with mock.patch.object(factory, "_host", return_value=seen):
        assert new_collectives(cpu).world.hosts == (0, 1, 2, 3)
        collectives = new_collectives(cpu, node=(node, local))
        assert (collectives.world.hosts, collectives.hops) == ((0, 0, 2, 2), 2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert new_collectives(cpu, node=(node, 0)).world.hosts == (0, 1, 2, 3)
        mine = [one for one in said if "not used: two ranks have the same" in str(one.message)]
        assert len(mine) == (dist.get_rank() == 0)


@distributed(world_sizes=(4,))
def test_a_trainers_node_ranks_are_those_of_its_environment() -> None:
    node, local = map(str, divmod(dist.get_rank(), 2))
    seen = ("machine", f"network of {dist.get_rank()}")
    with (
        mock.patch.object(factory, "_host", return_value=seen),
        mock.patch.dict(os.environ, GROUP_RANK=node, LOCAL_RANK=local, LOCAL_WORLD_SIZE="2"),
        mock.patch.object(refusals, "rank_zero_info") as said,
    ):
        fit(dear(), Net("mlp", "adamw"), devices=2, num_nodes=2)
    assert "2 hosts with 2 ranks each: shards travel in two hops" in said.call_args.args[0]


@distributed(world_sizes=(2,))
def test_the_way_through_the_host_is_told_at_the_start_beside_nccl() -> None:
    said: list[str] = []
    weights = []
    with mock.patch.object(refusals, "rank_zero_info", said.append):
        for context in (nullcontext(), staged()):
            recorder = WeightRecorder()
            with context:
                fit(dear(), Net("mlp", "adamw"), recorder)
            weights.append(recorder.seen)
    (one,) = [line for line in said if "through the host's memory" in line]
    assert re.search(r"takes at most \S+ s through .* and with NCCL at least \S+ s, predicted", one)
    for plain, through_host in zip(*weights, strict=True):
        assert distance(plain, through_host) == 0


def test_ranks_of_one_host_have_one_name() -> None:
    first, second = run_ranks(factory._host, 2, init_process_group=False)
    assert first == second


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([0], "one rank a host"),
        ([0, 1, 2], "one rank a host"),
        ([0, 0, 0], "one host with 3 ranks"),
        ([0, 0, 2, 2], "2 hosts with 2 ranks each"),
        ([0, 0, 0, 3], "2 hosts with 1 to 3 ranks"),
    ],
)
def test_hosts_are_described(hosts: list[int], words: str) -> None:
    assert World(0, len(hosts), tuple(hosts)).description == words


def _fit(
    ranks_a_host: int = 2, *, in_turn: bool = False, **options: Any
) -> tuple[WeightRecorder, list[str]]:
    """As if ranks ran on hosts of so many, one after the other, or in turn on two."""
    recorder, said = WeightRecorder(), []
    host = f"host {dist.get_rank() % 2}", ""
    with (
        on_hosts(ranks_a_host),
        mock.patch.object(factory, "_host", return_value=host) if in_turn else nullcontext(),
        mock.patch.object(refusals, "rank_zero_info", said.append),
        mock.patch.object(refusals, "rank_zero_warn", said.append),
    ):
        fit(dear(**options), Net("mlp", "adamw"), recorder)
    return recorder, [one for one in said if "hosts" in one]


@distributed(world_sizes=(4,))
def test_training_is_that_of_ddp_in_every_layout() -> None:
    theirs = WeightRecorder()
    fit(ddp(), Net("mlp", "adamw"), theirs)
    for in_turn, said in ((False, "in two hops"), (True, "all-reduces every bucket")):
        ours, (one,) = _fit(in_turn=in_turn)
        assert_ranks_agree(ours.seen)
        for left, right in zip(ours.seen, theirs.seen, strict=True):
            assert distance(left, right) < 1e-5
        assert "2 hosts with 2 ranks each" in one
        assert said in one


@distributed(world_sizes=(4,))
def test_one_hop_is_told_with_its_cost() -> None:
    for options in ({"hops": 1}, {"compressor": "signsgd"}):
        ours, said = _fit(**options)
        assert_ranks_agree(ours.seen)
        (one,) = said
        assert "up to 1.3 times as many bytes leave a host" in one
    _, (one,) = _fit(compressor="int8")
    assert "in two hops" in one
