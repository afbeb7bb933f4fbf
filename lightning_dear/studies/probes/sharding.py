"""What sharding as others do it takes: the backend's own halves, and FSDP2's host.

Ours are neither: on gloo our halves are messages to all ranks at once, of buckets whose tensors the
host does not touch one by one.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer

from lightning_dear.collectives.nccl import ALL_GATHER, REDUCE_SCATTER
from lightning_dear.collectives.work import Collectives
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import slowest

_NUM_REPEATS, _NUM_IN_A_ROW = 9, 4
_NUM_TENSORS = 8, 256
_NUM_ROUNDS, _NUM_STEPS, _NUM_WARM_UP_STEPS = 3, 5, 2

log = logging.getLogger(__name__)


def probe_gather(collectives: Collectives, device: torch.device, nbytes: int) -> list[float]:
    """Seconds of the backend's own all-gather of `nbytes`, which our collectives may not use.

    Of repeats, after one that does not count, the slowest rank's each. Each is the mean of several
    one after the other, as FSDP2 has them: ranks that do not begin together catch up in the first.
    Collective, blocks.
    """
    return _seconds(collectives, device, nbytes, getattr(dist, ALL_GATHER))


def probe_reduce_scatter(
    collectives: Collectives, device: torch.device, nbytes: int
) -> list[float]:
    """As `probe_gather`, of the backend's own reduce-scatter; gloo's is an all-reduce."""
    reduce_scatter = getattr(dist, REDUCE_SCATTER)
    return _seconds(collectives, device, nbytes, lambda whole, shard: reduce_scatter(shard, whole))


def _seconds(
    collectives: Collectives,
    device: torch.device,
    nbytes: int,
    exchange: Callable[[Tensor, Tensor], Any],
) -> list[float]:
    shard = torch.zeros(max(nbytes // 4 // collectives.world_size, 1), device=device)
    whole = torch.zeros(shard.numel() * collectives.world_size, device=device)
    clock = clock_of(device)
    own = []
    for _ in range(1 + _NUM_REPEATS):
        collectives.all_gather_object(None)
        begin = clock.mark()
        for _ in range(_NUM_IN_A_ROW):
            exchange(whole, shard)
        end = clock.mark()
        own.append((clock.seconds(end) - clock.seconds(begin)) / _NUM_IN_A_ROW)
    return slowest(collectives, own[1:])


def sharded_tensor_s(
    collectives: Collectives, device: torch.device, optimizer: Optimizer
) -> list[float]:
    """Seconds of a step that FSDP2 takes of the host for each tensor, beyond an unsharded one.

    Of repeats, rising. Each from steps of two modules of one unit and as many bytes, in few tensors
    and in many, whose exchanges are alike. Of a CPU, all ranks at once: where they share cores,
    they wait for each other, as they do in training. The slowest rank's. Collective, blocks.

    Args:
        collectives: Training's.
        device: A CPU.
        optimizer: What steps are taken with is of its class, with its options; SGD where that
            cannot be built from them, with a warning.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)
    differences: list[list[float]] = []
    for count in _NUM_TENSORS:
        # On dimension 0 all ranks have shards of equal length.
        numel = collectives.world_size * max(_NUM_TENSORS) // count
        plain, sharded = (
            Unit(torch.zeros(numel, device=device) for _ in range(count)) for _ in range(2)
        )
        fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
        medians_s = [_medians_s(collectives, unit, optimizer) for unit in (plain, sharded)]
        differences.append([after - before for before, after in zip(*medians_s, strict=True)])
    few, many = _NUM_TENSORS
    return sorted(
        max(of_many - of_few, 0.0) / (many - few)
        for of_few, of_many in zip(*differences, strict=True)
    )


def _medians_s(collectives: Collectives, unit: nn.Module, like: Optimizer) -> list[float]:
    """Medians of so many rounds of steps."""
    everyones = steps_s(collectives, unit, alike(like, unit), _NUM_ROUNDS * _NUM_STEPS)
    return [median(everyones[first::_NUM_ROUNDS]) for first in range(_NUM_ROUNDS)]


def steps_s(
    collectives: Collectives, module: nn.Module, optimizer: Optimizer, num_steps: int
) -> list[float]:
    """Seconds of steps, after some that do not count; of each the slowest rank's.

    The optimizer's gradients are `module`'s, or others that stay. Collective, blocks.
    """
    own = []
    for _ in range(_NUM_WARM_UP_STEPS + num_steps):
        collectives.all_gather_object(None)
        begin_s = time.perf_counter()
        module.zero_grad()
        module(torch.ones((), requires_grad=True)).backward()
        optimizer.step()
        own.append(time.perf_counter() - begin_s)
    return slowest(collectives, own[_NUM_WARM_UP_STEPS:])


def alike(optimizer: Optimizer, unit: nn.Module) -> Optimizer:
    """One of its class, with its options, for another module; SGD if there cannot be one."""
    try:
        return type(optimizer)(unit.parameters(), **options_of(optimizer))
    except TypeError as error:
        log.warning(
            "What FSDP2 takes of a host is measured with SGD, as another %s cannot be made of its"
            " options (%s).",
            type(optimizer).__name__,
            error,
        )
        return SGD(unit.parameters(), lr=0.0)


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """The options that another one of its class is made with."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def first_of(units: Sequence[Sequence[int]], most: int) -> tuple[list[list[int]], float]:
    """The first of tensors' elements, `most` in all; and their share of the elements of all."""
    chosen: list[list[int]] = []
    left = most
    for unit in units:
        taken: list[int] = []
        for numel in unit:
            if left:
                taken.append(min(numel, left))
                left -= taken[-1]
        if taken:
            chosen.append(taken)
    return chosen, (most - left) / max(sum(map(sum, units)), 1)


class Unit(nn.Module):
    """A module whose parameters are summed.

    Args:
        tensors: What they are made of.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(map(nn.Parameter, tensors))

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` and all elements of all parameters."""
        for one in self.tensors:
            hidden = hidden + one.sum()
        return hidden
