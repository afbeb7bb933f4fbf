"""What `dear-plan calibrate` times: exchanges, and what DDP and FSDP2 take of a host.

Ours takes none of the latter. Module buffers travel while something is computed, gradients are
where they are sent from, and the host does not touch a bucket's tensors one by one.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dear.collectives.nccl import ALL_GATHER, REDUCE_SCATTER
from lightning_dear.collectives.work import STATE_TAGS, Collectives, uncounted
from lightning_dear.planning import LinkCost
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import measure_collectives, slowest

_LEAST_BYTES = 1 << 24
"""Of a model as exchanges are measured for it: a cluster's file serves others, too."""

_WAITED_BYTES = tuple(1 << power for power in range(12, 22, 2))
"""Of whole buffers, 4 KiB to 1 MiB; and a quarter of the model, if that is up to 4 MiB."""

_NUM_SPREAD = 3
"""Measurements of exchanges, whose shortest and longest make a band."""

_NUM_REPEATS, _NUM_WARM_UP, _NUM_IN_A_ROW = 9, 2, 4

_SHORT_NUMEL, _NUM_SHORT = 1 << 8, 64
"""Of all-reduces that are nothing but a start, and how many of them make a train."""

_MOST_NUMEL = 1 << 26
"""Elements of a model on which hosts are measured; of larger ones a part tells what all take."""

Units = Sequence[Sequence[int]]
"""Elements of the tensors of each of FSDP2's units, in fp32."""

Run = Callable[[], None]
"""What is timed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costs:
    """What was measured; the same on all ranks.

    Attributes:
        links: Of our halves, and of the backend's all-reduce; of each repeat.
        all_gather: The backend's own, which ours is not on gloo, waited for one by one: bytes of
            the whole buffer -> seconds of repeats.
        reduce_scatter: The same; gloo's is an all-reduce.
        all_reduce_cpu_s: Of a rank, for a short all-reduce; 0 where it was not measured.
        ddp_s: Of a step in which DDP sends rank 0's module buffers, and copies gradients into its
            own buckets and back.
        sharding_s: Of a step that FSDP2 takes of a host beyond exchanges; None where it was not
            measured.
    """

    links: Sequence[LinkCost]
    all_gather: Mapping[int, list[float]]
    reduce_scatter: Mapping[int, list[float]]
    all_reduce_cpu_s: float = 0.0
    ddp_s: float = 0.0
    sharding_s: float | None = None


def measure(
    collectives: Collectives,
    module: nn.Module,
    optimizer: Optimizer,
    ready_s: Sequence[float],
    units: Units,
    begin: Callable[[str], None],
) -> Costs:
    """Time all that `Costs` has. Nothing of the training is touched. Collective, blocks.

    Accelerators hide what FSDP2 takes of their hosts, and the starts of all-reduces: there neither
    is measured.

    Args:
        collectives: Training's.
        module: What is trained.
        optimizer: What it is stepped with.
        ready_s: Seconds since backward began when each gradient is there, rising.
        units: Of the model; not empty.
        begin: Called with what is timed next.
    """
    device = next(module.parameters()).device
    nbytes = 4 * sum(map(sum, units))
    begin("what exchanges cost")
    size = max(nbytes, _LEAST_BYTES)
    links = [measure_collectives(collectives, device, size) for _ in range(_NUM_SPREAD)]
    begin("how all-reduces start")
    links, cpu_s = with_starts(links, collectives, device, ready_s)
    begin("the backend's own halves")
    sizes = sorted({*_WAITED_BYTES, min(max(nbytes // 4, 1 << 20), 1 << 22)})
    all_gather, reduce_scatter = (
        {size: half_times(collectives, device, name, size) for size in sizes}
        for name in (ALL_GATHER, REDUCE_SCATTER)
    )
    begin("what DDP takes of a host")
    ddp_s = ddp_seconds(collectives, device, units, list(module.buffers()))
    begin("what FSDP2 takes of a host")
    fsdp2_s = sharding_seconds(collectives, device, units, optimizer)
    return Costs(links, all_gather, reduce_scatter, cpu_s, ddp_s, fsdp2_s)


# --- exchanges ------------------------------------------------------------------------------------


def half_times(collectives: Collectives, device: torch.device, name: str, size: int) -> list[float]:
    """Seconds of the backend's own all-gather, or reduce-scatter, of `size` bytes; of repeats.

    Each is the mean of several, one after the other as FSDP2 has them: ranks that do not begin
    together catch up in the first. The slowest rank's. Collective, blocks.

    Args:
        collectives: Training's.
        device: Where parameters are.
        name: In torch.distributed.
        size: Bytes of the whole buffer.
    """
    shard = torch.zeros(max(size // 4 // collectives.world.size, 1), device=device)
    whole = torch.zeros(shard.numel() * collectives.world.size, device=device)
    out_and_in = (whole, shard) if name == ALL_GATHER else (shard, whole)

    def exchange() -> None:
        for _ in range(_NUM_IN_A_ROW):
            getattr(dist, name)(*out_and_in)

    return [one_s / _NUM_IN_A_ROW for one_s in _times(collectives, device, exchange)]


def with_starts(
    links: Sequence[LinkCost],
    collectives: Collectives,
    device: torch.device,
    ready_s: Sequence[float],
) -> tuple[list[LinkCost], float]:
    """`links` with what all-reduces take that only start, on a CPU. Collective, blocks.

    They are launched at once, and when gradients are ready; what takes less counts. At once they
    overstate it on gloo, where ranks that have little to send wait for each other longer the more
    is under way. In a backward that hides them they overstate it, too.

    Returns:
        The costs, and the CPU seconds of a rank for one all-reduce.
    """
    if device.type != "cpu":
        return list(links), 0.0
    trains = [0.0] * _NUM_SHORT, ready_s
    found = [[_start_s(collectives, one) for _ in range(1 + len(links))] for one in trains]
    at_once, paced = (slowest(collectives, [start_s for start_s, _ in of[1:]]) for of in found)
    own_cpu_s = median(cpu_s for _, cpu_s in found[1])
    started = []
    for link, *starts_s in zip(links, at_once, paced, strict=True):
        assert link.all_reduce is not None
        started.append(replace(link, all_reduce=replace(link.all_reduce, alpha_s=min(starts_s))))
    return started, mean(collectives.all_gather_object(own_cpu_s))


def _start_s(collectives: Collectives, launches_s: Sequence[float]) -> tuple[float, float]:
    """Seconds, and CPU seconds, of each of short all-reduces that are launched at such times."""
    buffers = [torch.zeros(_SHORT_NUMEL) for _ in launches_s]
    works = []
    with uncounted(collectives):
        # Ranks begin together.
        collectives.all_gather_object(None)
        begin_s, begin_cpu_s = time.perf_counter() - launches_s[0], time.process_time()
        for number, (launch_s, buffer) in enumerate(zip(launches_s, buffers, strict=True)):
            time.sleep(max(0.0, begin_s + launch_s - time.perf_counter()))
            works.append(collectives.launch_all_reduce(buffer, STATE_TAGS + number))
        for work in works:
            work.wait()
    took_s = time.perf_counter() - begin_s - launches_s[0]
    return took_s / len(works), (time.process_time() - begin_cpu_s) / len(works)


# --- hosts ----------------------------------------------------------------------------------------


def ddp_seconds(
    collectives: Collectives, device: torch.device, units: Units, buffers: Sequence[Tensor]
) -> float:
    """Seconds of a step in which DDP sends module buffers, and copies gradients to and fro.

    From steps of a module with such tensors in which no gradient is sent, with DDP and without.
    Needs four times the parameters' memory, or that of 64 Mi elements: of larger models the first
    tensors tell what all take. The slowest rank's. Collective, blocks.
    """
    some, share = first_of(units, _MOST_NUMEL)
    plain, wrapped = (_module_of(some, device) for _ in range(2))
    copies_s = _difference_s(collectives, device, _step(plain), _step(_silent_ddp(wrapped)))
    with_none, with_all = (
        _silent_ddp(Unit([torch.zeros((), device=device)], map(torch.zeros_like, given)))
        for given in ([], buffers)
    )
    buffers_s = _difference_s(collectives, device, _step(with_none), _step(with_all))
    return max(copies_s, 0.0) / share + max(buffers_s, 0.0) * bool(buffers)


def _silent_ddp(module: nn.Module) -> nn.Module:
    """In the default buckets. Ranks need not agree on parameters first: all is zero."""
    ddp = DistributedDataParallel(module, init_sync=False)
    ddp.register_comm_hook(None, noop_hook)
    return ddp


def sharding_seconds(
    collectives: Collectives, device: torch.device, units: Units, optimizer: Optimizer
) -> float | None:
    """Seconds of a step that FSDP2 takes of the host beyond exchanges and unsharded modules.

    From steps of modules with such units, sharded among the ranks, in which nothing is sent, and
    of plain ones whose shards are stepped. All ranks at once: where they share cores, they wait for
    each other, as in training. Of models with more than 64 Mi elements the first units tell what
    all take. The slowest rank's. Collective, blocks.

    Args:
        collectives: Training's.
        device: Where parameters are.
        units: Of the model; not empty.
        optimizer: Steps are taken with one like it.

    Returns:
        None where hosts run ahead, and, with a warning, where this torch does not let exchanges be
        left out.
    """
    if device.type != "cpu":
        return None
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        log.warning(
            "What FSDP2 takes of a host is left out: this torch (%s) does not let exchanges be left"
            " out of it, which the measurement needs; torch 2.9 does.",
            torch.__version__,
        )
        return None
    some, share = first_of(units, _MOST_NUMEL)
    shards = [[-(-numel // collectives.world.size) for numel in unit] for unit in some]
    plain, stepped, sharded = (_module_of(one, device) for one in (some, shards, some))
    for one in stepped.parameters():
        one.grad = torch.zeros_like(one)
    everyone = dist.group.WORLD
    assert everyone is not None
    mesh = DeviceMesh.from_group(everyone, device.type)
    for module in (*sharded, sharded):
        wrapped = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        wrapped.set_custom_all_gather(_NoExchange())
        wrapped.set_custom_reduce_scatter(_NoExchange())
    steps = _step(plain, alike(optimizer, stepped)), _step(sharded, alike(optimizer, sharded))
    return max(_difference_s(collectives, device, *steps), 0.0) / share


class _NoExchange:
    """Stands in for FSDP2's collectives; what should have arrived is whatever was there."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        """Sends nothing."""


class Unit(nn.Module):
    """A module whose parameters are summed.

    Args:
        tensors: What they are made of.
        buffers: What it has besides.
    """

    def __init__(self, tensors: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(map(nn.Parameter, tensors))
        for number, buffer in enumerate(buffers):
            self.register_buffer(str(number), buffer)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` and all elements of all parameters."""
        for one in self.tensors:
            hidden = hidden + one.sum()
        return hidden


def _module_of(units: Units, device: torch.device) -> nn.Sequential:
    made = (Unit(torch.zeros(numel, device=device) for numel in unit) for unit in units)
    return nn.Sequential(*made)


def first_of(units: Units, most: int) -> tuple[list[list[int]], float]:
    """The first of tensors' elements, `most` in all; and their share of the elements of all."""
    numels = [numel for unit in units for numel in unit]
    taken = np.diff(np.minimum(np.cumsum(numels), most), prepend=0).tolist()
    left = iter(taken)
    chosen = [[numel for numel in islice(left, len(unit)) if numel] for unit in units]
    return [unit for unit in chosen if unit], sum(taken) / sum(numels)


def alike(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    """One with the options of its first group and no state yet, for another module."""
    other = copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": [*module.parameters()]}]
    return other


def _step(module: nn.Module, optimizer: Optimizer | None = None) -> Run:
    def step() -> None:
        module.zero_grad()
        module(torch.ones((), requires_grad=True)).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _difference_s(collectives: Collectives, device: torch.device, *runs: Run) -> float:
    """Seconds that the second takes beyond the first."""
    first_s, second_s = (median(_times(collectives, device, run)) for run in runs)
    return second_s - first_s


def _times(collectives: Collectives, device: torch.device, run: Run) -> list[float]:
    """Seconds of repeats, after some that do not count; of each the slowest rank's."""
    clock = clock_of(device)
    own = []
    for _ in range(_NUM_WARM_UP + _NUM_REPEATS):
        # Ranks begin together.
        collectives.all_gather_object(None)
        begin = clock.mark()
        run()
        end = clock.mark()
        own.append(clock.seconds(end) - clock.seconds(begin))
    return slowest(collectives, own[_NUM_WARM_UP:])
