"""What DDP takes beyond its all-reduces: module buffers, and copies of gradients.

Ours has neither: module buffers travel while something is computed, and gradients are where they
are sent from.
"""

from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.collectives.work import Collectives
from lightning_dear.studies.probes.sharding import Unit, first_of
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import slowest

_NUM_REPEATS, _NUM_WARM_UP_STEPS = 9, 2
_MOST_NUMEL = 1 << 26
"""Elements of a model's gradients that are copied; of larger ones a part tells what all take."""


def module_buffers_s(collectives: Collectives, device: torch.device, module: nn.Module) -> float:
    """Seconds for which DistributedDataParallel holds up forward to send rank 0's module buffers.

    Of buffers as long as `module`'s; 0 if it has none. The slowest rank's. Collective, blocks.
    """
    buffers = [torch.zeros_like(one, device=device) for one in module.buffers()]
    if not buffers:
        return 0.0
    without_s, with_s = (
        median(_forwards_s(collectives, device, DistributedDataParallel(_Buffers(given, device))))
        for given in ([], buffers)
    )
    return max(with_s - without_s, 0.0)


def gradient_copies_s(collectives: Collectives, device: torch.device, module: nn.Module) -> float:
    """Seconds of a step in which DistributedDataParallel copies gradients into buckets and back.

    From backwards of as many and as large parameters as `module`'s, in which nothing is sent, with
    DDP and without. All ranks at once; the slowest rank's. Needs four times the parameters'
    memory, or that of `_MOST_NUMEL` elements. Collective, blocks.
    """
    trained = [one for one in module.parameters() if one.requires_grad]
    units, share = first_of([[one.numel() for one in trained]], _MOST_NUMEL)
    if not units:
        return 0.0
    plain, wrapped = (
        Unit(
            torch.zeros(numel, dtype=one.dtype, device=device)
            # Of a large model not all.
            for one, numel in zip(trained, units[0], strict=False)
        )
        for _ in range(2)
    )
    # Its default buckets, of what the ranks need not agree on: all is zero.
    ddp = DistributedDataParallel(wrapped, init_sync=False)
    ddp.register_comm_hook(None, _send_nothing)
    plain_s, ddp_s = (median(_backwards_s(collectives, device, one)) for one in (plain, ddp))
    return max(ddp_s - plain_s, 0.0) / share


def _send_nothing(
    # Annotated as DDP demands of hooks, which mypy cannot see.
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    buffer = bucket.buffer()
    sent: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    sent.set_result(buffer)
    return sent


def _backwards_s(collectives: Collectives, device: torch.device, module: nn.Module) -> list[float]:
    clock = clock_of(device)
    own = []
    for _ in range(_NUM_WARM_UP_STEPS + _NUM_REPEATS):
        loss = module(torch.zeros((), device=device))
        collectives.all_gather_object(None)
        begin = clock.mark()
        loss.backward()
        end = clock.mark()
        own.append(clock.seconds(end) - clock.seconds(begin))
        module.zero_grad()
    return slowest(collectives, own[_NUM_WARM_UP_STEPS:])


def _forwards_s(collectives: Collectives, device: torch.device, module: nn.Module) -> list[float]:
    clock = clock_of(device)
    own = []
    for _ in range(_NUM_WARM_UP_STEPS + _NUM_REPEATS):
        collectives.all_gather_object(None)
        begin = clock.mark()
        loss = module(torch.ones(()))
        end = clock.mark()
        own.append(clock.seconds(end) - clock.seconds(begin))
        # Without backward DDP sends nothing in the next forward.
        loss.backward()
    return slowest(collectives, own[_NUM_WARM_UP_STEPS:])


class _Buffers(nn.Module):
    def __init__(self, buffers: list[Tensor], device: torch.device) -> None:
        super().__init__()
        self.tensor = nn.Parameter(torch.zeros((), device=device))
        for number, buffer in enumerate(buffers):
            self.register_buffer(str(number), buffer)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.tensor
