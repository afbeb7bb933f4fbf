"""The simulator's step of a plan is the planners' prediction, with every part in its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dear.planning import (
    BucketPlan,
    CodecCosts,
    LinkCost,
    ModelTimes,
    TensorSpec,
    predict,
)
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.planning.measured import NO_CODEC
from lightning_dear.simulator import Link, Network, Schedule, Workload, simulate
from tests.planning.models import WORLD_SIZE, chains, codecs, links

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
