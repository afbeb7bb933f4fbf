"""FSDP2 for layers that follow each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_dear.planning.fusion import runs_of


def shard_layers(
    root: nn.Module, layers: Sequence[nn.Module], unit_bytes: float, mesh: DeviceMesh
) -> None:
    """Apply `fully_shard` to units of consecutive layers, then to `root`; once.

    Parameters stay whole between forward and backward, so that each is gathered once a step.

    Args:
        root: Holds the layers; mutated in place.
        layers: In the order of forward.
        unit_bytes: A unit is closed once it has so many bytes; 0 makes every layer its own unit.
        mesh: One axis of ranks to shard over.
    """
    if isinstance(root, FSDPModule):
        return
    for unit in units_of(layers, unit_bytes):
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)


def units_of(layers: Sequence[nn.Module], unit_bytes: float) -> list[list[nn.Module]]:
    """Cut `layers` into runs of at least `unit_bytes` each, but for the last."""
    return runs_of(layers, _nbytes, unit_bytes)


def _nbytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())
