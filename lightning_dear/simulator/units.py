"""The units of FSDP2 and ZeRO: whole tensors that are gathered, and reduced, together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lightning_dear.planning import TensorSpec
from lightning_dear.planning.fusion import fuse_groups
from lightning_dear.simulator.network import Network
from lightning_dear.simulator.program import Program
from lightning_dear.simulator.schedule import Schedule
from lightning_dear.simulator.workload import Workload

_MIB = 1 << 20
_BLOCK = re.compile(r"^(?:[^.]+[.])*?[0-9]+(?=[.])")
_REST = ""


def in_units(schedule: Schedule) -> Callable[[Workload, Network], Program]:
    """Makes steps whose buckets are a workload's units."""

    def build(workload: Workload, network: Network) -> Program:
        plan = fuse_groups("units", workload.tensors, network.world_size, units_of(workload))
        return schedule.program(plan, workload, network)

    return build


def units_of(workload: Workload) -> list[list[int]]:
    """Numbers of the tensors of each unit; see `Workload.shard_unit_mb`."""
    families: dict[str, list[TensorSpec]] = {}
    for tensor in sorted(workload.tensors, key=_use_key):
        families.setdefault(tensor.family, []).append(tensor)
    if workload.shard_unit_mb is None:
        return [unit for family in families.values() for unit in _blocks(family)]
    least_bytes = workload.shard_unit_mb * _MIB
    return [unit for family in families.values() for unit in _filled(family, least_bytes)]


def _filled(tensors: Sequence[TensorSpec], least_bytes: float) -> list[list[int]]:
    units: list[list[int]] = []
    filled = least_bytes
    for tensor in tensors:
        if filled >= least_bytes:
            units.append([])
            filled = 0
        units[-1].append(tensor.index)
        filled += tensor.numel * tensor.itemsize
    return units


def _blocks(tensors: Sequence[TensorSpec]) -> list[list[int]]:
    units: dict[str, list[int]] = {}
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        units.setdefault(found.group() if found else _REST, []).append(tensor.index)
    return list(units.values())


def _use_key(tensor: TensorSpec) -> tuple[float, int]:
    return float("inf") if tensor.first_use is None else tensor.first_use, tensor.index
