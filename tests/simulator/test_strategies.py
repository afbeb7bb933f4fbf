"""Every strategy: bounds, bytes and order, on made-up models and networks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import FUSIONS, CodecCost, CodecCosts, Linear
from lightning_dear.simulator import Curve, Link, Network, Workload, simulate
from lightning_dear.simulator.strategies import (
    MIB,
    STRATEGIES,
    as_published,
    horovod_program,
    resolve_strategy,
)
from tests.planning.models import ITEMSIZE, UNIT, chain, chains, compute_s, unaligned_chains

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
parallel = pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
FIXED = [
    name for name in STRATEGIES if name not in ("bytescheduler", "dear_auto", "dear_mergecomp")
]
"""Whose order of messages does not depend on when they end."""

SLACK = 1 + 1e-9
OURS = ("dear", "dear_mergecomp")
PER_UNIT_S = 1 / (UNIT * ITEMSIZE)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    tensors, times = draw(st.one_of(chains(), unaligned_chains()))
    times = replace(times, step_s=draw(st.floats(0.01, 4)))
    # A tensor a unit, some of them, or all in one.
    unit_mb = draw(st.sampled_from([0.0, 0.005, 25.0]))
    return Workload("made up", tensors, times, shard_unit_mb=unit_mb)


networks = st.builds(
    lambda alpha_s, beta, world_size, algorithm: Network(
        Link(alpha_s, beta * PER_UNIT_S), world_size, algorithm=algorithm
    ),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([2, 3, 8]),
    st.sampled_from(["pairwise", "ring", "nccl"]),
)


def step_s(name: str, workload: Workload, network: Network) -> float:
    program = STRATEGIES[name].program(workload, network)
    return simulate(program).step_s


@every_strategy
@given(workloads())
@settings(max_examples=15, deadline=None)
def test_one_rank_takes_what_it_computes(name: str, workload: Workload) -> None:
    times = workload.times
    alone = step_s(name, workload, Network(Link(1.0, 1.0), 1))
    assert alone == pytest.approx(times.forward_s + times.backward_s + times.step_s)


@parallel
@given(workloads(), networks)
@settings(max_examples=25, deadline=None)
def test_no_step_beats_its_bounds(name: str, workload: Workload, network: Network) -> None:
    program = STRATEGIES[name].program(workload, network)
    step = simulate(program)
    bytes_s = program.sent_bytes * network.between.beta_s
    assert step.step_s * SLACK >= max(compute_s(program), bytes_s)
    waited_s = sum(step.exposed_s.values())
    assert step.step_s == pytest.approx(compute_s(program) + waited_s, abs=1e-9)


@pytest.mark.parametrize("name", FIXED)
@given(workloads(), networks, st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=25, deadline=None)
def test_a_faster_link_is_never_slower(
    name: str, workload: Workload, network: Network, factor: float
) -> None:
    between = network.between
    faster = replace(network, between=Link(factor * between.alpha_s, factor * between.beta_s))
    assert step_s(name, workload, faster) <= step_s(name, workload, network) * SLACK


@parallel
@given(workloads(), networks)
@settings(max_examples=15, deadline=None)
def test_as_many_bytes_travel_as_an_all_reduce_sends(
    name: str, workload: Workload, network: Network
) -> None:
    program = STRATEGIES[name].program(workload, network)
    least = 2 * network.sent_bytes(workload.nbytes)
    # At most 64 elements a tensor and 64 a rank and bucket are padding.
    padding = 2 * len(workload.tensors) * 64 * (1 + network.world_size) * ITEMSIZE
    if name in ("wfbp", "ddp", "horovod", "mgwfbp", "bytescheduler"):
        padding = least * 1e-9
    assert least / SLACK <= program.sent_bytes <= least + padding


@parallel
@given(workloads(), networks)
@settings(max_examples=15, deadline=None)
def test_messages_keep_to_the_order_of_their_launches(
    name: str, workload: Workload, network: Network
) -> None:
    step = simulate(STRATEGIES[name].program(workload, network))
    if name == "bytescheduler":
        return
    for kind in {message.kind for message in step.program.messages}:
        launched = [one.number for one in step.program.messages if one.kind == kind]
        in_step = [one.bucket for one in step.spans if one.step == 3 and one.lane == kind]
        assert in_step == launched


def test_urgent_parts_overtake() -> None:
    """ByteScheduler's point: the first layer's gradients do not wait behind the last one's."""
    units = 8 * (1 << 20) // (UNIT * ITEMSIZE)
    tensors, times = chain([units, 3 * units], [0.01, 0.01], [0.01, 0.01])
    workload = Workload("two layers", tensors, times)
    network = Network(Link(0.0, 1 / (1 << 20)), 2)
    assert step_s("bytescheduler", workload, network) < step_s("wfbp", workload, network)


def test_horovods_cycle_and_buffer_decide_on_its_messages() -> None:
    tensors, times = chain([1] * 6, [1.0] * 6, [1.0] * 6)
    workload, network = Workload("chain", tensors, times), Network(Link(0.1, PER_UNIT_S), 2)
    unit_mb = UNIT * ITEMSIZE / MIB

    def sizes(cycle_s: float, fusion_mb: float) -> list[float]:
        messages = horovod_program(workload, network, cycle_s, fusion_mb).messages
        unit = 2 * network.sent_bytes(UNIT * ITEMSIZE)
        return [round(one.nbytes / unit) for one in messages]

    assert sizes(1.0, 128) == [1] * 6
    assert sizes(2.0, 128) == [2] * 3
    assert sizes(6.0, 128) == [6]
    assert sizes(6.0, 4.5 * unit_mb) == [4, 2]
    default = STRATEGIES["horovod"].program(workload, network)
    assert default == horovod_program(workload, network, 1e-3, 128.0)


def test_dear_as_published_goes_with_any_cap_or_none() -> None:
    tensors, times = chain([1] * 6, [1.0] * 6, [1.0] * 6)
    workload, network = Workload("chain", tensors, times), Network(Link(0.1, PER_UNIT_S), 2)
    whole, unfused = (as_published(cap)(workload, network) for cap in (25.0, None))
    assert whole == STRATEGIES["dear_paper"].program(workload, network)
    assert [len(one.messages) for one in (whole, unfused)] == [2, 12]


def test_unknown_names_list_the_valid_ones() -> None:
    assert resolve_strategy("dear").name == "dear"
    with pytest.raises(ValueError, match=re.escape("'dare'; valid names: single, wfbp, ddp")):
        resolve_strategy("dare")


@pytest.mark.parametrize("name", ["fsdp2", "zero"])
@given(workloads(), networks)
@settings(max_examples=15, deadline=None)
def test_on_gloo_what_others_reduce_scatter_is_all_reduced_and_waited_for(
    name: str, workload: Workload, network: Network
) -> None:
    gloo = replace(network, has_reduce_scatter=False)
    program = STRATEGIES[name].program(workload, gloo)
    step = simulate(program)
    elsewhere = STRATEGIES[name].program(workload, network)
    assert program.sent_bytes == pytest.approx(1.5 * elsewhere.sent_bytes)
    busy_s = sum(message.seconds for message in program.messages)
    assert step.step_s == pytest.approx(compute_s(program) + busy_s)
    ours = STRATEGIES["dear"]
    assert ours.program(workload, gloo) == ours.program(workload, network)


def test_the_backends_own_gather_has_its_own_cost() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    workload = Workload("two layers", tensors, times)
    network = Network(Link(0.0, PER_UNIT_S), 2, has_reduce_scatter=False)
    slow = replace(network, all_gather=Curve((1.0,), (2 * PER_UNIT_S,)))
    gathered_s = 8.0
    assert step_s("fsdp2", workload, slow) - step_s("fsdp2", workload, network) == gathered_s
    assert step_s("dear", workload, slow) == step_s("dear", workload, network)


def test_the_backends_own_reduce_scatter_has_its_own_cost() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    workload = Workload("two layers", tensors, times)
    network = Network(Link(0.0, PER_UNIT_S), 2, has_reduce_scatter=False)
    # Twice the bytes of a half, as an all-reduce's: so it takes what it took.
    alike = replace(network, reduce_scatter=Curve((1.0,), (2 * PER_UNIT_S,)))
    assert step_s("fsdp2", workload, alike) == step_s("fsdp2", workload, network)
    slow = replace(network, reduce_scatter=Curve((1.0,), (3 * PER_UNIT_S,)))
    assert step_s("fsdp2", workload, slow) - step_s("fsdp2", workload, alike) == 8.0
    for other in ("dear", "ddp"):
        assert step_s(other, workload, slow) == step_s(other, workload, network)


def test_a_host_takes_its_time_for_every_tensor_that_fsdp2_shards() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    workload = Workload("two layers", tensors, times)
    network = Network(Link(0.0, PER_UNIT_S), 2)
    slow = replace(network, sharded_tensor_s=0.5)
    assert step_s("fsdp2", workload, slow) - step_s("fsdp2", workload, network) == 2 * 0.5
    measured = replace(workload, sharding_s=0.25)
    assert step_s("fsdp2", measured, slow) - step_s("fsdp2", workload, network) == 0.25
    assert step_s("fsdp2", measured, network) == step_s("fsdp2", measured, slow)
    sharing = replace(network, host_growth=2.0)
    assert step_s("fsdp2", measured, sharing) - step_s("fsdp2", measured, network) == 0.25
    for other in ("zero", "dear"):
        assert step_s(other, workload, slow) == step_s(other, workload, network)
    alone = replace(slow, world_size=1)
    assert step_s("fsdp2", workload, alone) == step_s(
        "fsdp2", workload, replace(network, world_size=1)
    )


def test_ddp_copies_gradients() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    network = Network(Link(0.0, PER_UNIT_S), 2)
    without = Workload("two layers", tensors, times)
    workload = replace(without, copies_s=0.25)
    sharing = replace(network, host_growth=2.0)
    for name in ("ddp", "wfbp"):
        assert step_s(name, workload, network) - step_s(name, without, network) == 0.25
        assert step_s(name, workload, sharing) - step_s(name, workload, network) == 0.25
    for name in ("mgwfbp", "fsdp2", "dear"):
        assert step_s(name, workload, network) == step_s(name, without, network)
    alone = replace(network, world_size=1)
    assert step_s("ddp", workload, alone) == step_s("ddp", without, alone)


COSTS = CodecCosts(CodecCost(encode=Linear(0.5), gather_bytes=Linear(0.0, 1.0)), may_mix=True)


@parallel
def test_a_compressor_is_for_whom_it_has_costs(name: str) -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [1.0, 1.0])
    plain = Workload("two layers", tensors, replace(times, step_s=1.0))
    workload, network = replace(plain, codecs=COSTS), Network(Link(0.0, PER_UNIT_S), 2)
    if name == "dear_auto":
        with pytest.raises(ValueError, match="Leave one of them out"):
            STRATEGIES[name].program(workload, network)
        return
    without = STRATEGIES[name].program(plain, network)
    assert (STRATEGIES[name].program(workload, network) != without) == (name in OURS)
    whole = replace(workload, whole_codecs=COSTS)
    ours_or_whole = (*OURS, "wfbp", "ddp", "horovod", "mgwfbp")
    assert (STRATEGIES[name].program(whole, network) != without) == (name in ours_or_whole)


@pytest.mark.parametrize(
    ("way", "sent", "seconds"),
    # Of 2 ranks each sends half of a buffer, and all 4 bytes of an element count.
    [("all_gather", 1.0, 1.0), ("both_halves", 1.5, 1.5), ("all_reduce", 2.0, 2.0)],
)
def test_what_is_all_reduced_travels_as_the_compressor_says(way, sent, seconds) -> None:
    tensors, times = chain([1], [1.0], [1.0])
    cost = CodecCost(reduce_bytes=Linear(0.0, 4.0), gather_bytes=Linear(0.0, 2.0), way=way)
    workload = Workload(
        "a layer", tensors, times, codecs=COSTS, whole_codecs=CodecCosts(cost), compressor="made up"
    )
    network = Network(Link(0.0, 2 * PER_UNIT_S), 2)
    (message,) = STRATEGIES["ddp"].program(workload, network).messages
    assert message.nbytes * PER_UNIT_S == pytest.approx(sent / 2)
    assert message.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_ours_goes_with_every_fusion(fusion: str) -> None:
    tensors, times = chain([4, 8, 16], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    workload, network = Workload("three layers", tensors, times), Network(Link(0.1, PER_UNIT_S), 4)
    strategy = resolve_strategy(f"dear_{fusion}")
    assert strategy.overrides is not None
    assert strategy.overrides.startswith("strategy=dear")
    step_s = simulate(strategy.program(workload, network)).step_s
    assert step_s >= times.forward_s + times.backward_s
    sparse = replace(workload, codecs=replace(COSTS, may_plan=False))
    assert strategy.allows(sparse) == (fusion in ("threshold", "none", "single"))
