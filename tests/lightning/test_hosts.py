"""Hosts of several ranks: what is all-reduced there, and what people are told."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_dear.collectives import factory
from lightning_dear.collectives.work import ranks_on_a_host
from lightning_dear.strategy import refusals
from tests.distributed.harness import distributed
from tests.lightning.fitting import WeightRecorder, assert_ranks_agree, ddp, dear, fit
from tests.lightning.nets import Net
from tests.training.models import distance


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [((), 1), ((0,), 1), ((0, 0, 0), 1), ((0, 0, 2, 2), 2), ((0, 1, 1), 1), ((0, 0, 0, 3, 3), 2)],
)
def test_how_many_ranks_share_a_host(hosts: tuple[int, ...], expected: int) -> None:
    assert ranks_on_a_host(hosts) == expected


def test_ranks_of_one_host_have_one_name() -> None:
    assert factory._host() == factory._host()


class _Shares(Callback):
    """Keeps how much of the model was all-reduced, in the end."""

    share: float | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.share = trainer.strategy.plan.all_reduced_share


def _fit(ranks_a_host: int, **options: Any) -> tuple[WeightRecorder, float | None, list[str]]:
    """As if ranks ran on hosts of so many."""
    recorder, shares, said = WeightRecorder(), _Shares(), []
    host = f"host {dist.get_rank() // ranks_a_host}"
    with (
        mock.patch.object(factory, "_host", return_value=host),
        mock.patch.object(refusals, "rank_zero_info", said.append),
        mock.patch.object(refusals, "rank_zero_warn", said.append),
    ):
        fit(dear(**options), Net("mlp", "adamw"), recorder, shares)
    return recorder, shares.share, [one for one in said if "hosts" in one]


@distributed(world_sizes=(4,))
def test_dense_buckets_are_all_reduced_between_hosts_of_several_ranks() -> None:
    theirs = WeightRecorder()
    fit(ddp(), Net("mlp", "adamw"), theirs)
    for ranks_a_host in (1, 2, 4):
        ours, share, said = _fit(ranks_a_host)
        assert_ranks_agree(ours.seen)
        for left, right in zip(ours.seen, theirs.seen, strict=True):
            assert distance(left, right) < 1e-5
        assert share == (ranks_a_host == 2)
        assert len(said) == (ranks_a_host == 2)
        assert all("2 hosts of 2 ranks" in one and "whole optimizer state" in one for one in said)


@distributed(world_sizes=(4,))
def test_what_cannot_be_all_reduced_there_is_told_with_its_cost() -> None:
    for options in ({"compressor": "int8"}, {"gather": "gradients"}):
        ours, share, said = _fit(2, **options)
        assert_ranks_agree(ours.seen)
        assert share == 0
        (one,) = said
        assert "up to 1.3 times as many bytes leave a host" in one
    _, _, said = _fit(2, gather="gradients", decouple=False)
    assert not said
