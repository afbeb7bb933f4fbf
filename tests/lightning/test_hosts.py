"""Hosts of several ranks: in how many hops they exchange, and what people are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_dear.collectives import factory
from lightning_dear.collectives.hosts import ranks_on_a_host, ranks_on_each_host
from lightning_dear.strategy import refusals
from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts
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
    assert ranks_on_a_host(hosts) == fewest
    assert ranks_on_each_host(hosts) == each


def test_ranks_of_one_host_have_one_name() -> None:
    assert factory._host() == factory._host()


def _fit(
    ranks_a_host: int = 2, *, in_turn: bool = False, **options: Any
) -> tuple[WeightRecorder, list[str]]:
    """As if ranks ran on hosts of so many, one after the other, or in turn on two."""
    recorder, said = WeightRecorder(), []
    host = f"host {dist.get_rank() % 2}"
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
        assert "2 hosts of 2 ranks" in one
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
