"""What is recommended, and with what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dear.planning import CodecCost, CodecCosts, Linear
from lightning_dear.simulator import Link, Network, Workload
from lightning_dear.simulator.ranking import alone_s, chosen, pairs, predicted, recommended
from lightning_dear.simulator.strategies import STRATEGIES
from lightning_dear.workloads.replay import load_profile
from lightning_dear.workloads.replay.profile import planned

NAMES = ("single", "ddp", "bytescheduler", "dear", "dear_mergecomp")
SLOW, FAST = Link(5e-5, 8e-10), Link(5e-6, 1e-12)


@pytest.fixture(scope="module")
def bert() -> Workload:
    profile = load_profile("bert_base")
    return Workload(profile.name, *planned(profile))


def strategies(*names: str):
    return [STRATEGIES[name] for name in names]


def ranked(names: tuple[str, ...], workload: Workload, network: Network):
    rows = [predicted(one, workload, network) for one in strategies(*names)]
    return sorted(rows, key=lambda row: row.step.step_s)


def test_a_slow_network_asks_for_ours_and_a_fast_one_for_nothing(bert: Workload) -> None:
    slow = ranked(NAMES, bert, Network(SLOW, 16))
    assert slow[0].strategy.name == "single"
    assert recommended(slow).strategy.name == "dear"
    assert recommended(slow, enough=0.0).strategy.name == "dear_mergecomp"
    fast = ranked(NAMES, bert, Network(FAST, 16))
    assert recommended(fast).strategy.name == "ddp"
    assert recommended(fast, enough=0.0).strategy.name != "single"


def test_only_what_can_be_run_is_recommended(bert: Workload) -> None:
    rows = ranked(("bytescheduler", "ddp"), bert, Network(SLOW, 4))
    assert rows[0].strategy.name == "bytescheduler"
    assert recommended(rows).strategy.name == "ddp"
    with pytest.raises(ValueError, match="Add ddp or dear"):
        recommended(rows[:1])


def test_the_baseline_stays_where_little_is_to_be_gained() -> None:
    assert chosen({"ddp": 1.03, "dear": 1.0}) == "ddp"
    assert chosen({"ddp": 1.04, "dear": 1.0}) == "dear"
    assert chosen({"ddp": 1.04, "dear": 1.0}, enough=0.05) == "ddp"
    assert chosen({"b": 1.0, "a": 1.0}) == "b"
    assert chosen({"dear": 1.03, "ddp_bf16": 1.03, "a": 1.0}) == "ddp_bf16"
    assert chosen({"dear": 1.03, "a": 1.0}) == "dear"
    assert chosen({"dear": 1.04, "a": 1.0}) == "a"


def test_efficiency_is_that_of_weak_scaling(bert: Workload) -> None:
    (row,) = ranked(("ddp",), bert, Network(SLOW, 8))
    assert row.efficiency(bert) == pytest.approx(alone_s(bert) / row.step.step_s)
    assert 0 < row.efficiency(bert) < 1


def test_compressors_are_tried_where_they_can_be_used(bert: Workload) -> None:
    encoded = CodecCosts(CodecCost(reduce_bytes=Linear(0, 2), gather_bytes=Linear(0, 2)))
    sparse = replace(bert, codecs=replace(encoded, may_plan=False), compressor="sparse")
    sixteen = replace(bert, codecs=encoded, whole_codecs=encoded, compressor="bf16")
    names = ("ddp", "dear", "dear_mergecomp", "dear_auto")
    both = pairs(strategies(*names), [bert, sparse, sixteen])
    rows = [predicted(*pair, Network(SLOW, 16)) for pair in both]
    assert {row.name: row.overrides for row in rows} == {
        "ddp": "strategy=ddp",
        "dear": "strategy=dear",
        "dear_mergecomp": "strategy=dear fusion=mergecomp",
        "dear_auto": "strategy=dear fusion=auto",
        "ddp_bf16": "strategy=ddp_bf16",
        "dear + bf16": "strategy=dear compressor=bf16",
        "dear_mergecomp + bf16": "strategy=dear fusion=mergecomp compressor=bf16",
        "dear + sparse": "strategy=dear compressor=sparse",
    }
