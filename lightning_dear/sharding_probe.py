"""What strategies that shard take: the backend's own halves, and what FSDP2 costs a host.

Ours are neither: on gloo our halves are messages to all ranks at once, of buckets whose tensors the
host does not touch one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from lightning_dear.clock import clock_of
from lightning_dear.exchange_probe import slowest
from lightning_dear.native import all_gather_into, reduce_scatter_into
from lightning_dear.work import Collectives

_NUM_REPEATS, _NUM_IN_A_ROW = 9, 4
_NUM_TENSORS = 8, 256
_TENSOR_NUMEL = 64
_NUM_STEPS, _NUM_WARM_UP_STEPS = 8, 2


def probe_gather(collectives: Collectives, device: torch.device, nbytes: int) -> list[float]:
    """Seconds of the backend's own all-gather of `nbytes`, which our collectives may not use.

    Of repeats, after one that does not count, the slowest rank's each. Each is the mean of several
    one after the other, as FSDP2 has them: ranks that do not begin together catch up in the first.
    Collective, blocks.
    """
    return _seconds(collectives, device, nbytes, all_gather_into)


def probe_reduce_scatter(
    collectives: Collectives, device: torch.device, nbytes: int
) -> list[float]:
    """As `probe_gather`, of the backend's own reduce-scatter; gloo's is an all-reduce."""
    return _seconds(
        collectives, device, nbytes, lambda whole, shard: reduce_scatter_into(shard, whole)
    )


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


def sharded_tensor_s(collectives: Collectives, device: torch.device) -> float:
    """Seconds of a step that FSDP2 takes of the host for each tensor, beyond an unsharded one.

    From steps of two modules of one unit each, with few tensors and with many, whose exchanges are
    alike. Of a CPU, all ranks at once: where they share cores, they wait for each other, as they do
    in training. The slowest rank's. Collective, blocks.
    """
    few, many = _NUM_TENSORS
    beyond = [_beyond_s(collectives, device, count) for count in (few, many)]
    return max(beyond[1] - beyond[0], 0.0) / (many - few)


def _beyond_s(collectives: Collectives, device: torch.device, count: int) -> float:
    mesh = init_device_mesh(device.type, (collectives.world_size,))
    sharded = _Unit(count, device)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
    plain_s, sharded_s = (
        median(_steps_s(collectives, unit)) for unit in (_Unit(count, device), sharded)
    )
    return sharded_s - plain_s


def _steps_s(collectives: Collectives, unit: nn.Module) -> list[float]:
    optimizer = SGD(unit.parameters(), lr=0.0)
    own = []
    for _ in range(_NUM_WARM_UP_STEPS + _NUM_STEPS):
        collectives.all_gather_object(None)
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        unit(torch.ones((), requires_grad=True)).backward()
        optimizer.step()
        own.append(time.perf_counter() - begin_s)
    return slowest(collectives, own[_NUM_WARM_UP_STEPS:])


class _Unit(nn.Module):
    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        numbers = (torch.zeros(_TENSOR_NUMEL, device=device) for _ in range(count))
        self.tensors = nn.ParameterList(map(nn.Parameter, numbers))

    def forward(self, hidden: Tensor) -> Tensor:
        for one in self.tensors:
            hidden = hidden + one.sum()
        return hidden
