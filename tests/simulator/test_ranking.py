"""What is recommended, and with what."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_dear.planning import CodecCost, CodecCosts, Linear
from lightning_dear.simulator import Curve, Link, Network, Workload
from lightning_dear.simulator.ranking import (
    alone_s,
    chosen,
    needed_rate,
    pairs,
    predicted,
    recommended,
)
from lightning_dear.simulator.strategies import STRATEGIES, accumulating, in_two_hops
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


MEASURED = Network(
    SLOW,
    4,
    algorithm="pairwise",
    all_reduce=Link(1e-3, 1e-9),
    all_gather=Curve((1e4, 1e8), (1e-4, 1.0)),
    reduce_scatter=Curve((1e4, 1e8), (1e-4, 1.0)),
    has_reduce_scatter=False,
)
HOSTS = Network(SLOW, 8, ranks_per_node=2, within=FAST)


@pytest.mark.parametrize("network", [Network(SLOW, 4), HOSTS, MEASURED], ids=["1", "2", "measured"])
@pytest.mark.parametrize("name", ["ddp", "dear", "dear + codec", "fsdp2", "wfbp", "ddp of 4"])
def test_at_the_rate_that_is_needed_the_share_is_reached(
    name: str, network: Network, bert: Workload
) -> None:
    encoded = CodecCosts(CodecCost(reduce_bytes=Linear(0, 1), gather_bytes=Linear(0, 1)))
    workload = replace(bert, codecs=encoded) if name.endswith("codec") else bert
    strategy = STRATEGIES[name.split()[0]]
    if name.endswith("4"):
        strategy = accumulating(strategy, 4)
    for share in (0.5, 0.9):
        rate = needed_rate(strategy, workload, network, share)
        shares = [
            predicted(strategy, workload, network.at_rate(factor * rate)).efficiency(workload)
            for factor in (0.99, 1.0, 1.01)
        ]
        assert shares[0] < share <= shares[1] < shares[2]
        assert shares[1] == pytest.approx(share, rel=1e-3)
        # The network's own rate does not matter.
        other = needed_rate(strategy, workload, network.at_rate(3e7), share)
        assert other == pytest.approx(rate, rel=1e-3)


def test_no_rate_is_enough_where_other_things_take_longer(bert: Workload) -> None:
    far = Network(Link(1.0, 1e-10), 4)
    assert needed_rate(STRATEGIES["ddp"], bert, far, 0.5) == math.inf
    slow = replace(bert, codecs=CodecCosts(CodecCost(encode=Linear(1.0))))
    assert needed_rate(STRATEGIES["dear"], slow, Network(FAST, 4), 0.5) == math.inf
    assert needed_rate(STRATEGIES["dear"], bert, Network(FAST, 4), 0.5) < 1e11


def test_no_rate_is_sought_for_plans_of_a_search(bert: Workload) -> None:
    with pytest.raises(ValueError, match="dear_mergecomp searches its plan. Choose another"):
        needed_rate(STRATEGIES["dear_mergecomp"], bert, Network(FAST, 4), 0.5)
    rows = [predicted(STRATEGIES[name], bert, Network(FAST, 4), 0.5) for name in NAMES]
    sought = {row.name for row in rows if row.needed_bits_per_s is not None}
    assert sought == {"ddp", "dear"}
    assert predicted(STRATEGIES["ddp"], bert, Network(FAST, 4)).needed_bits_per_s is None


@pytest.mark.parametrize("name", ["ddp", "dear", "fsdp2"])
def test_micro_batches_but_the_last_are_computing_alone(name: str, bert: Workload) -> None:
    """What others gather in forward is waited for in the first one, so that all others are free."""
    workload = replace(bert, times=replace(bert.times, step_s=0.1))
    strategy, network = STRATEGIES[name], Network(SLOW, 8)
    one, four = (
        predicted(each, workload, network) for each in (strategy, accumulating(strategy, 4))
    )
    computing_s = workload.times.forward_s + workload.times.backward_s
    assert four.step.step_s == pytest.approx((3 * computing_s + one.step.step_s) / 4)
    assert four.step.program.sent_bytes == pytest.approx(one.step.program.sent_bytes / 4)
    assert alone_s(workload, 4) == pytest.approx(computing_s + 0.1 / 4)
    assert four.efficiency(workload) > one.efficiency(workload)
    assert four.name == f"{name}, accumulate=4"
    assert str(four.overrides).endswith(" trainer.accumulate_grad_batches=4")


def test_two_hops_are_of_ours_alone(bert: Workload) -> None:
    one = predicted(in_two_hops(STRATEGIES["dear"]), bert, HOSTS)
    two = predicted(STRATEGIES["dear"], bert, replace(HOSTS, algorithm="two_hops"))
    assert one.step.step_s == two.step.step_s != predicted(two.strategy, bert, HOSTS).step.step_s
    assert (one.name, one.overrides) == ("dear, hops=2", "strategy=dear strategy.hops=2")


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
