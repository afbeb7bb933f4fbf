"""The simulator's step of a plan is the planners' prediction, with every part in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.local_steps import LocalSteps
from lightning_dear.planning import (
    BucketPlan,
    CodecCost,
    CodecCosts,
    Linear,
    LinkCost,
    ModelTimes,
    TensorSpec,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.measured import NO_CODEC
from lightning_dear.simulator import Link, Network, Workload, simulate
from lightning_dear.simulator.schedule import Schedule, round_program
from tests.planning.models import ITEMSIZE, UNIT, WORLD_SIZE, chain, chains, codecs, links

TOLERANCE_S = 1e-9


def grouped(
    tensors: list[TensorSpec], cuts: list[bool], world_size: int = WORLD_SIZE
) -> BucketPlan:
    groups: list[list[int]] = [[]]
    for tensor, is_cut in zip(tensors, cuts, strict=True):
        groups[-1].append(tensor.index)
        if is_cut:
            groups.append([])
    return fuse_groups("some", tensors, world_size, filter(None, groups))


@st.composite
def planned(draw: st.DrawFn) -> tuple[BucketPlan, list[TensorSpec], ModelTimes]:
    tensors, times = draw(chains())
    times = replace(times, step_s=draw(st.floats(0, 3)))
    return grouped(tensors, [draw(st.booleans()) for _ in tensors]), tensors, times


def network_of(link: LinkCost) -> Network:
    return Network(Link(link.alpha_s, link.beta_s), WORLD_SIZE, algorithm="pairwise")


def simulated(
    plan: BucketPlan,
    tensors: list[TensorSpec],
    times: ModelTimes,
    link: LinkCost,
    costs: CodecCosts = NO_CODEC,
):
    whole = replace(times, step_s=times.step_s * WORLD_SIZE)
    workload = Workload("some", tensors, whole, costs)
    return simulate(Schedule().program(plan, workload, network_of(link)))


@given(planned(), links, st.data())
@settings(max_examples=200)
def test_dense_steps_are_those_that_are_predicted(model, link, data) -> None:
    plan, tensors, times = model
    numbers = range(len(plan.buckets))
    whole = data.draw(st.lists(st.sampled_from(numbers), unique=True))
    plan = replace(plan, all_reduced=tuple(sorted(whole)))
    expected = predict(plan, tensors, times, link)
    step = simulated(plan, tensors, times, link)
    assert step.step_s == pytest.approx(expected.step_s, abs=TOLERANCE_S)


@given(planned(), links, codecs)
@settings(max_examples=200)
def test_compressed_steps_are_those_that_are_predicted(model, link, costs) -> None:
    expected = predict(*model, link, costs)
    step = simulated(*model, link, costs)
    assert step.step_s == pytest.approx(expected.step_s, rel=1e-9, abs=TOLERANCE_S)


# --- local steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "options", "step_s"),
    [
        # Two fragments of 8 units: 4 s there and 4 s back, beside 4 s of computing in a step.
        (8, {"every": 16, "delay": 2}, 4.0),
        # Its way back begins after the step in which it has arrived. Two merges wait in a round.
        (8, {"every": 16, "delay": 1}, 4.0 + 2 * 4.0 / 16),
        (8, {"every": 16, "delay": 0}, 4.0 + 2 * 8.0 / 16),
        # The default is half of an interval of 4 steps.
        (8, {"every": 8}, 4.0),
        # The next fragment is sent just before the last one goes back, and each step merges one.
        (8, {"every": 2, "delay": 1}, 4.0 + 8.0),
        (8, {"every": 2, "delay": 0}, 4.0 + 8.0),
        # One fragment: 8 s there and 8 s back.
        (8, {"every": 3, "delay": 2}, 4.0 + 8.0 / 3),
        # A full link: of two fragments 24 s each, and the link is free for a step in two.
        (24, {"every": 4, "delay": 3}, (24.0 + 4.0) / 2),
    ],
)
def test_a_round_waits_for_what_its_steps_do_not_hide(
    units: int, options: dict[str, int], step_s: float
) -> None:
    # Fragments are taken to be of equal size, whatever the layers are.
    tensors, times = chain([units - 2, units + 2], [1.0, 1.0], [0.5, 0.5])
    workload = Workload("two layers", tensors, replace(times, step_s=1.0))
    network = network_of(LinkCost(0.0, 1 / (UNIT * ITEMSIZE)))
    step = simulate(round_program(LocalSteps(**options), workload, network))
    assert step.step_s == pytest.approx(step_s)
    assert sum(step.exposed_s.values()) == pytest.approx(step_s - 4.0)
    # Half of all numbers leave a rank in each direction, once in a round.
    sent_bytes = 2 * units * UNIT * ITEMSIZE / options["every"]
    assert step.program.sent_bytes == pytest.approx(sent_bytes)


def test_a_round_sends_fp32_and_also_encodes() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [0.5, 0.5])
    halves = [replace(one, itemsize=2) for one in tensors]
    # A fragment has 8 units of `UNIT` numbers, and an owner half of them: 1 + 2 + 3 + 4 s.
    own = {"encode": Linear(1.0), "decode_sum": Linear(2.0), "encode_shard": Linear(3.0)}
    costs = CodecCosts(CodecCost(**own, decode=Linear(4.0), reduce_bytes=Linear(0.0, 1.0)))
    workload = Workload("two layers", halves, times, costs)
    step = simulate(round_program(LocalSteps(every=4), workload, network_of(LinkCost(0.0, 0.0))))
    assert step.step_s == pytest.approx(3.0 + 2 * 10.0 / 4)
    # One byte a number there, and four back.
    assert step.program.sent_bytes == pytest.approx((1 + 4) * 16 * UNIT / 2 / 4)


def test_a_round_of_one_rank_is_computing_alone() -> None:
    tensors, times = chain([8, 8], [1.0, 1.0], [0.5, 0.5])
    alone = Network(Link(1.0, 1.0), 1)
    step = simulate(round_program(LocalSteps(), Workload("two layers", tensors, times), alone))
    assert (step.step_s, step.program.sent_bytes) == (pytest.approx(3.0), 0.0)
