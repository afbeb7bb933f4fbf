"""What FSDP2 and ZeRO gather together: by size, and by the blocks that names number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator import Link, Network, Workload
from lightning_dear.simulator.strategies import STRATEGIES
from lightning_dear.simulator.workload import units_of
from lightning_dear.workloads.replay import ReplayModel, load_profile
from lightning_dear.workloads.replay.profile import planned
from tests.planning.models import ITEMSIZE, UNIT, chain

MIB = 1 << 20


def workload_of(*sizes_mib: float, unit_mb: Any = 25.0) -> Workload:
    """Modules of a tensor of so many MiB each, in the order of forward."""
    seconds = [1.0] * len(sizes_mib)
    units = [max(round(size * MIB / ITEMSIZE / UNIT), 1) for size in sizes_mib]
    tensors, times = chain(units, seconds, seconds)
    return Workload("tensors", tensors, times, shard_unit_mb=unit_mb)


def renamed(workload: Workload, *names: str) -> Workload:
    tensors = [replace(one, name=name) for one, name in zip(workload.tensors, names, strict=True)]
    return replace(workload, tensors=tensors)


def test_the_module_that_reaches_the_size_closes_a_unit() -> None:
    assert units_of(workload_of(20, 10, 24, 100, 3)) == [[0, 1], [2, 3], [4]]
    split = renamed(workload_of(20, 10, 24, 100, 3), "0.w", "1.w", "1.b", "2.w", "2.b")
    assert units_of(split) == [[0, 1, 2], [3, 4]]


def test_no_tensor_is_cut() -> None:
    assert units_of(workload_of(100, unit_mb=10)) == [[0]]
    assert units_of(workload_of(1, 2, 3, unit_mb=0)) == [[0], [1], [2]]


@pytest.mark.parametrize("name", ["resnet50", "bert_base", "densenet201"])
def test_units_are_those_of_a_replay(name: str) -> None:
    profile = load_profile(name)
    with torch.device("meta"):
        model = ReplayModel(profile, shard_unit_mb=25)
    begun = iter(range(10**6))
    expected = [
        [next(begun) for layer in unit for _ in layer.parameters()] for unit in model.units()
    ]
    assert units_of(Workload(name, *planned(profile))) == expected


def test_tensors_without_a_gradient_are_in_no_unit() -> None:
    workload = workload_of(1, 1, 1, unit_mb=100)
    tensors = [*workload.tensors]
    tensors[1] = replace(tensors[1], ready=None)
    assert units_of(replace(workload, tensors=tensors)) == [[0, 2]]


@given(st.lists(st.floats(0.1, 60.0), min_size=1, max_size=20), st.floats(0.0, 50.0))
def test_every_tensor_is_in_one_unit(sizes_mib: list[float], unit_mb: float) -> None:
    workload = workload_of(*sizes_mib, unit_mb=unit_mb)
    units = units_of(workload)
    assert [index for unit in units for index in unit] == list(range(len(sizes_mib)))
    nbytes = [sum(4 * workload.tensors[index].numel for index in unit) for unit in units]
    assert all(size >= unit_mb * MIB for size in nbytes[:-1])


def test_blocks_are_those_that_names_number() -> None:
    names = ("stem.weight", "net.blocks.0.a", "net.blocks.0.1.b", "net.blocks.1.a", "head.weight")
    workload = renamed(workload_of(1, 1, 1, 1, 1, unit_mb="blocks"), *names)
    assert units_of(workload) == [[0, 4], [1, 2], [3]]
    without = renamed(workload_of(1, 1, unit_mb="blocks"), "first.weight", "block2.weight")
    assert units_of(without) == [[0, 1]]


def test_families_do_not_mix() -> None:
    workload = workload_of(1, 1, 1, unit_mb=100)
    tensors = [*workload.tensors]
    tensors[1] = replace(tensors[1], family="other")
    assert units_of(replace(workload, tensors=tensors)) == [[0, 2], [1]]


@pytest.mark.parametrize("name", ["fsdp2", "zero"])
def test_strategies_that_shard_exchange_units(name: str) -> None:
    network = Network(Link(0.0, 1e-9), 2)
    program = STRATEGIES[name].program(workload_of(20, 10, 24, 100, 3), network)
    assert sorted(one.nbytes / MIB for one in program.messages) == [1.5, 1.5, 15, 15, 62, 62]
