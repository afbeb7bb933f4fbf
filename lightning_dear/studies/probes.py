"""Measurements of `dear-plan calibrate`: exchanges, and host time that DDP and FSDP2 need.

`strategy="dear"` needs no such host time. It sends module buffers during computation, gradients
accumulate in the buckets from which they are sent, and the host does not touch a bucket's tensors
one by one.
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
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_dear.collectives.nccl import ALL_GATHER, REDUCE_SCATTER
from lightning_dear.collectives.work import STATE_TAGS, Collectives, uncounted
from lightning_dear.planning import LinkCost
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import measure_collectives, slowest

_LEAST_BYTES = 1 << 24
"""Least bytes of a model for which exchanges are measured: larger models use the results, too."""

_WAITED_BYTES = tuple(1 << power for power in range(12, 22, 2))
"""Bytes of the buffers of the backend's own halves, 4 KiB to 1 MiB. One more has a quarter of the
model's bytes, limited to 1 to 4 MiB."""

_NUM_SPREAD = 3
"""Number of measurements of exchanges; their spread tells how sure the costs are."""

_NUM_REPEATS, _NUM_WARM_UP, _NUM_IN_A_ROW = 9, 2, 4

_SHORT_NUMEL, _NUM_SHORT = 1 << 8, 64
"""Elements of an all-reduce that takes little more than its start; number of them in a row."""

_MOST_NUMEL = 1 << 26
"""Most elements with which host time is measured. For larger models it is extrapolated."""

Units = Sequence[Sequence[int]]
"""For each of FSDP2's units: the number of elements of each of its tensors, as fp32."""

Run = Callable[[], None]
"""Function that is timed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costs:
    """Measured costs; the same on all ranks.

    Attributes:
        links: Costs of the halves of `strategy="dear"` and of the backend's all-reduce; one for
            each repeat.
        all_gather: Bytes of the whole buffer -> seconds of the backend's own all-gather, waited for
            one by one; one value for each repeat. On gloo `strategy="dear"` uses another one.
        reduce_scatter: Same as `all_gather`, for the reduce-scatter; gloo's is an all-reduce.
        all_reduce_cpu_s: CPU seconds of a rank for a short all-reduce. 0 means not measured.
        ddp_s: Seconds of a step in which DDP sends rank 0's module buffers, and copies gradients
            into its buckets and back.
        sharding_s: Host seconds of a step of FSDP2 beyond its exchanges. None means not measured.
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
    optimizer: optim.Optimizer,
    ready_s: Sequence[float],
    units: Units,
    begin: Callable[[str], None],
) -> Costs:
    """Measure all of `Costs` without changing the training's tensors. Collective. Blocks.

    On accelerators, FSDP2's host time and the starts of all-reduces are hidden behind the device's
    work, so they are not measured.

    Args:
        collectives: Collectives of the training.
        module: Module that is trained; it is not changed.
        optimizer: optim.Optimizer of the module; it is not changed.
        ready_s: For each gradient the seconds from the beginning of backward until it is ready, in
            rising order.
        units: FSDP2's units of the model; not empty.
        begin: Called with the name of each measurement when it begins.
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
    all_gather = {one: half_times(collectives, device, ALL_GATHER, one) for one in sizes}
    reduce_scatter = {one: half_times(collectives, device, REDUCE_SCATTER, one) for one in sizes}
    begin("what DDP takes of a host")
    ddp_s = ddp_seconds(collectives, device, units, list(module.buffers()))
    begin("what FSDP2 takes of a host")
    fsdp2_s = sharding_seconds(collectives, device, units, optimizer)
    return Costs(links, all_gather, reduce_scatter, cpu_s, ddp_s, fsdp2_s)


# --- exchanges ------------------------------------------------------------------------------------


def half_times(collectives: Collectives, device: torch.device, name: str, size: int) -> list[float]:
    """Measure the backend's own all-gather, or reduce-scatter. Collective. Blocks.

    Args:
        collectives: Collectives of the training.
        device: Device of the parameters.
        name: Name of the function in torch.distributed.
        size: Bytes of the whole buffer.

    Returns:
        Seconds of each repeat on the slowest rank. A repeat is the mean of several exchanges in a
        row, as FSDP2 has them, because in the first one ranks also wait for the last to begin.
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
    """Measure alpha of all-reduces on a CPU, with short ones. Collective. Blocks.

    They are launched once all together, and once at the times when gradients are ready. The smaller
    result counts, since both can be too large. All together, ranks wait for each other the longer
    the more messages are in flight (gloo). At the times of a backward, the pauses between launches
    are part of the result.

    Returns:
        `links` with that alpha, and the CPU seconds of a rank for one all-reduce.
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
    """Return seconds, and CPU seconds, for each short all-reduce; launched at `launches_s`."""
    buffers = [torch.zeros(_SHORT_NUMEL) for _ in launches_s]
    works = []
    with uncounted(collectives):
        # A barrier, so that ranks begin together.
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
    """Measure DDP's sending of module buffers and copying of gradients. Collective. Blocks.

    It is the difference between steps of a module with and without DDP, in which no gradient is
    sent. Needs four times the memory of the parameters, at most of 64 Mi elements: for a larger
    model the first tensors are measured and the result is extrapolated.

    Returns:
        Seconds of a step on the slowest rank.
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
    """Return `module` in a DDP that sends no gradient, with its default buckets."""
    # All parameters are 0 on all ranks, so that no first broadcast is needed.
    ddp = nn.parallel.DistributedDataParallel(module, init_sync=False)
    ddp.register_comm_hook(None, noop_hook)
    return ddp


def sharding_seconds(
    collectives: Collectives, device: torch.device, units: Units, optimizer: optim.Optimizer
) -> float | None:
    """Measure FSDP2's host time in a step, beyond its exchanges. Collective. Blocks.

    It is the difference between two kinds of steps: of modules with these units under FSDP2, in
    which nothing is sent, and of plain modules of which only shards are stepped. All ranks measure
    at once, so that ranks on the same cores wait for each other as in training. For a model of more
    than 64 Mi elements the first units are measured and the result is extrapolated.

    Args:
        collectives: Collectives of the training.
        device: Device of the parameters.
        units: FSDP2's units of the model; not empty.
        optimizer: Steps are taken with an optimizer like this one.

    Returns:
        Seconds on the slowest rank. None on accelerators, whose hosts run ahead; and, with a
        warning, if this torch cannot leave out FSDP2's exchanges.
    """
    if device.type != "cpu":
        return None
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        log.warning(
            "The host time of FSDP2 is not measured with torch %s. Update to torch 2.9 or later for"
            " it. The measurement replaces FSDP2's exchanges, which this version does not allow.",
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
    """Replaces FSDP2's collectives, and sends nothing. Output tensors stay uninitialized."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None:
        """Send nothing."""


class Unit(nn.Module):
    """A module that sums its parameters.

    Args:
        tensors: Tensors from which the parameters are made.
        buffers: Module buffers.
    """

    def __init__(self, tensors: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(map(nn.Parameter, tensors))
        for number, buffer in enumerate(buffers):
            self.register_buffer(str(number), buffer)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` plus the sum of all elements of all parameters."""
        return sum((one.sum() for one in self.tensors), hidden)


def _module_of(units: Units, device: torch.device) -> nn.Sequential:
    made = (Unit(torch.zeros(numel, device=device) for numel in unit) for unit in units)
    return nn.Sequential(*made)


def first_of(units: Units, most: int) -> tuple[list[list[int]], float]:
    """Return the first `most` elements of `units`, as units, and their share of all elements."""
    numels = [numel for unit in units for numel in unit]
    taken = np.diff(np.minimum(np.cumsum(numels), most), prepend=0).tolist()
    left = iter(taken)
    chosen = [[numel for numel in islice(left, len(unit)) if numel] for unit in units]
    return [unit for unit in chosen if unit], sum(taken) / sum(numels)


def alike(optimizer: optim.Optimizer, module: nn.Module) -> optim.Optimizer:
    """Return a new optimizer for `module`, with the options of `optimizer`'s first group."""
    other = copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": [*module.parameters()]}]
    return other


def _step(module: nn.Module, optimizer: optim.Optimizer | None = None) -> Run:
    def step() -> None:
        module.zero_grad()
        module(torch.ones((), requires_grad=True)).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _difference_s(collectives: Collectives, device: torch.device, *runs: Run) -> float:
    """Return how many seconds the second function takes longer than the first. Collective."""
    first_s, second_s = (median(_times(collectives, device, run)) for run in runs)
    return second_s - first_s


def _times(collectives: Collectives, device: torch.device, run: Run) -> list[float]:
    """Return the seconds of each repeat on its slowest rank, without warm-up. Collective."""
    clock = clock_of(device)
    own = []
    for _ in range(_NUM_WARM_UP + _NUM_REPEATS):
        # A barrier, so that ranks begin together.
        collectives.all_gather_object(None)
        begin = clock.mark()
        run()
        own.append(clock.seconds(clock.mark()) - clock.seconds(begin))
    return slowest(collectives, own[_NUM_WARM_UP:])
