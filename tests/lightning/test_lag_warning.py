"""People hear that weights stay behind where they have allowed it, and not elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dear.callbacks import CompressionSchedule
from lightning_dear.compression import EFSignSGD, OneBit, TopK
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.strategy.refusals import warn_of_lag
from tests.distributed.harness import distributed
from tests.fabric.running import dear as fabric_dear
from tests.fabric.running import new_fabric
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net
from tests.training.models import build, optimizer_for

LAGGING = TopK(density=0.5, allow_lag=True)


def _said(act: Callable[[], object]) -> list[str]:
    """What is warned of lags while `act` runs."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        act()
    return [text for one in said if "allow_lag" in (text := str(one.message))]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (ExchangeOptions(codec=LAGGING), "topk"),
        (ExchangeOptions(codec=EFSignSGD(allow_lag=True)), "efsignsgd"),
        (ExchangeOptions(codec=OneBit(allow_lag=True)), "onebit"),
        (ExchangeOptions(codec=OneBit(allow_lag=True), groups=(("a", LAGGING),)), "onebit, topk"),
    ],
)
def test_a_lag_is_warned_of(options: ExchangeOptions, names: str) -> None:
    (text,) = _said(lambda: warn_of_lag(options))
    assert text.startswith(f"allow_lag=True of {names}: ")
    for word in ("dear/lag", "encoding_figures()", "sync_replicas()", "gather='gradients'"):
        assert word in text


@pytest.mark.parametrize(
    "options",
    [
        ExchangeOptions(),
        ExchangeOptions(codec=TopK(density=0.5, halves="reduce")),
        ExchangeOptions("gradients", codec=TopK(density=0.5)),
    ],
)
def test_nothing_is_said_where_nothing_lags(options: ExchangeOptions) -> None:
    assert not _said(lambda: warn_of_lag(options))


@distributed(world_sizes=(2,))
def test_rank_0_says_it_once_a_fit() -> None:
    only_some = CompressionSchedule(compressors={"*bias": LAGGING})
    for options, count in (
        ({"compressor": LAGGING}, 1),
        ({"compressor": "int8", "compression_schedule": only_some}, 1),
        ({"compressor": "int8"}, 0),
    ):
        strategy = dear(**options)
        said = _said(lambda strategy=strategy: fit(strategy, Net("mlp", "sgd")))
        assert len(said) == (count if strategy.is_global_zero else 0)


@distributed(world_sizes=(1,))
def test_fabric_says_it_too() -> None:
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"compressor": LAGGING}, 1),
        ({"compressor": "int8"}, 0),
    )
    for options, count in cases:
        raw, fabric = build("mlp"), new_fabric(fabric_dear(**options))
        said = _said(lambda raw=raw, fabric=fabric: fabric.setup(raw, optimizer_for("sgd", raw)))
        assert len(said) == count
