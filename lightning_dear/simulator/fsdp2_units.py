"""Units of FSDP2 and ZeRO: whole modules whose tensors are gathered, and reduced, together."""

import re
from collections.abc import Sequence
from itertools import groupby

from lightning_dear.planning import TensorSpec
from lightning_dear.planning.fusion import MIB, runs_of, use_key
from lightning_dear.simulator.workload import BLOCKS, Workload

_BLOCK = re.compile(r"(?:[^.]+[.])*?[0-9]+(?=[.])")


def units_of(workload: Workload) -> list[list[int]]:
    """Return the tensor indices of each unit; see `Workload.shard_unit_mb` for what a unit is.

    Tensors without a gradient are in no unit, because no exchange moves them.
    """
    families: dict[str, list[TensorSpec]] = {}
    for tensor in sorted((one for one in workload.tensors if one.is_used), key=use_key):
        families.setdefault(tensor.family, []).append(tensor)
    if workload.shard_unit_mb == BLOCKS:
        return [unit for family in families.values() for unit in _blocks(family)]
    least_bytes = workload.shard_unit_mb * MIB
    return [unit for family in families.values() for unit in _filled(family, least_bytes)]


def _filled(tensors: Sequence[TensorSpec], least_bytes: float) -> list[list[int]]:
    modules = [list(module) for _, module in groupby(tensors, _module_of)]
    runs = runs_of(modules, lambda module: sum(one.nbytes for one in module), least_bytes)
    return [[tensor.index for module in run for tensor in module] for run in runs]


def _blocks(tensors: Sequence[TensorSpec]) -> list[list[int]]:
    units: dict[str, list[int]] = {}
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        units.setdefault(found.group() if found else "", []).append(tensor.index)
    return list(units.values())


def _module_of(tensor: TensorSpec) -> str:
    return tensor.name.rpartition(".")[0] or tensor.name
