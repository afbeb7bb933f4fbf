"""What FSDP2 takes of a host for a model: copies, hooks and tensors of its own kind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives
from lightning_dear.studies.probes.sharding import Unit, alike, first_of, steps_s

_NUM_STEPS = 9
_MOST_NUMEL = 1 << 26

log = logging.getLogger(__name__)

Units = Sequence[Sequence[int]]
"""Elements of the tensors of each unit, in fp32."""


def sharding_s(
    collectives: Collectives, device: torch.device, units: Units, optimizer: Optimizer
) -> float | None:
    """Seconds of a step that FSDP2 takes of the host beyond exchanges and unsharded modules.

    From steps of modules with such units, sharded among the ranks, in which nothing is sent, and
    of plain ones whose shards are stepped. Of a CPU, all ranks at once; the slowest rank's. Of
    models with more than 64 Mi elements the first units tell what all take. Collective, blocks.

    Args:
        collectives: Training's.
        device: A CPU.
        units: Of the model.
        optimizer: See `sharded_tensor_s`.

    Returns:
        None, with a warning, where this torch does not allow exchanges to be left out.
    """
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        log.warning(
            "What FSDP2 takes of a host is estimated by the number of tensors: this torch (%s) does"
            " not let exchanges be left out of it; torch 2.9 does.",
            torch.__version__,
        )
        return None
    units, share = first_of(units, _MOST_NUMEL)
    if not units:
        return 0.0
    plain_s, sharded_s = (
        median(steps_s(collectives, module, alike(optimizer, stepped), _NUM_STEPS))
        for module, stepped in (
            _plain(units, collectives, device),
            _sharded(units, device),
        )
    )
    return max(sharded_s - plain_s, 0.0) / share


def _plain(
    units: Units, collectives: Collectives, device: torch.device
) -> tuple[nn.Module, nn.Module]:
    whole = _modules(units, device)
    shards = [[-(-numel // collectives.world_size) for numel in unit] for unit in units]
    stepped = _modules(shards, device)
    for one in stepped.parameters():
        one.grad = torch.zeros_like(one)
    return whole, stepped


def _sharded(units: Units, device: torch.device) -> tuple[nn.Module, nn.Module]:
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)
    root = _modules(units, device)
    for module in (*root, root):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        sharded.set_custom_all_gather(_NoExchange())
        sharded.set_custom_reduce_scatter(_NoExchange())
    return root, root


def _modules(units: Units, device: torch.device) -> nn.Sequential:
    zeros = partial(torch.zeros, device=device)
    return nn.Sequential(*(Unit(map(zeros, unit)) for unit in units))


class _NoExchange:
    """Stands in for a collective; what should have arrived is whatever was there."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        return None
