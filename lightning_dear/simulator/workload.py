"""A model as a simulation needs it: tensors, when each is read and ready, costs of compressing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from lightning_dear.planning import CodecCosts, ModelTimes, TensorSpec, measured
from lightning_dear.planning.fusion import MIB, runs_of, use_key

BLOCKS: Final = "blocks"

_BLOCK = re.compile(r"(?:[^.]+[.])*?[0-9]+(?=[.])")


@dataclass(frozen=True)
class Workload:
    """A model, as one rank trains it.

    Attributes:
        name: Name for people.
        tensors: Parameters, with known `first_use` and `ready`.
        times: Times of a step without communication. `step_s` is for stepping all parameters; the
            strategy decides how much of that a rank does.
        codecs: Costs of compressing if owners sum gradients and send the sums to all ranks.
        whole_codecs: Costs of compressing if every rank gets every rank's encoded gradients. None
            means that strategies which work this way run without the compressor.
        fixed_step_s: Seconds of the optimizer's step that do not depend on how much is stepped.
        copies_s: Seconds of a step in which DDP copies gradients into its buckets and back, and
            sends rank 0's module buffers. `strategy="dear"` sends buffers while it computes.
        sharding_s: Host seconds in a step of FSDP2 beyond its exchanges, in units of
            `shard_unit_mb`. None means `Network.sharded_tensor_s` for each tensor.
        compressor: Name of the compressor whose costs `codecs` are.
        shard_unit_mb: MiB of a unit, which FSDP2 and ZeRO gather together. A unit is whole modules
            in the order in which forward reads them, until they reach this size. "blocks" means one
            unit for each numbered block in the tensors' names ("net.blocks.3.weight") and one for
            all other tensors.
    """

    name: str
    tensors: Sequence[TensorSpec]
    times: ModelTimes
    codecs: CodecCosts = measured.NO_CODEC
    compressor: str = "none"
    fixed_step_s: float = 0.0
    copies_s: float = 0.0
    sharding_s: float | None = None
    whole_codecs: CodecCosts | None = None
    shard_unit_mb: float | Literal["blocks"] = 25.0

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.numel * tensor.itemsize for tensor in self.tensors)

    @property
    def uncompressed(self) -> "Workload":
        """The same workload without a compressor."""
        return replace(self, codecs=measured.NO_CODEC, whole_codecs=None, compressor="none")

    def sharded_times(self, world_size: int) -> ModelTimes:
        """Return the times as planners need them: `step_s` is for stepping one rank's shard."""
        return replace(self.times, step_s=self.times.step_s / world_size)


# --- units of FSDP2 and ZeRO ----------------------------------------------------------------------


def units_of(workload: Workload) -> list[list[int]]:
    """Return the tensor indices of each unit; see `Workload.shard_unit_mb` for what a unit is.

    Units are whole modules whose tensors are gathered, and reduced, together.

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
    modules = [list(module) for _, module in groupby(tensors, module_of)]
    runs = runs_of(modules, lambda module: sum(one.nbytes for one in module), least_bytes)
    return [[tensor.index for module in run for tensor in module] for run in runs]


def _blocks(tensors: Sequence[TensorSpec]) -> list[list[int]]:
    units: dict[str, list[int]] = {}
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        units.setdefault(found.group() if found else "", []).append(tensor.index)
    return list(units.values())


def module_of(tensor: TensorSpec) -> str:
    """Return the name of the module that owns a tensor."""
    return tensor.name.rpartition(".")[0] or tensor.name
