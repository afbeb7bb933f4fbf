"""Measures a job on this cluster: forward and backward of its model, and the rate of the links."""

import time
from itertools import combinations, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig
from typing_extensions import override

from lightning_dear.apps.bench.build import build_model, build_trainer
from lightning_dear.collectives.work import Collectives
from lightning_dear.local_steps import num_modules
from lightning_dear.planning import LinkCost
from lightning_dear.studies.block import BlockLength, StepProbe, quiet_lightning
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.telemetry.statistics import median_and_error
from lightning_dear.tuning.link_cost import measure_collectives

NUM_WARM_UP = 3
NUM_STEPS = 8
BUDGET_S = 20.0
"""Seconds after which no further step begins: eight steps of a large model would take too long."""

MAX_RANKS_FOR_ALL_PAIRS = 8
"""With more ranks only neighbours are measured: the number of pairs grows with the square."""

_LEAST_BYTES, _PAIR_BYTES = 1 << 23, (1 << 16, 1 << 23)
"""Least bytes of gradients for which exchanges are measured; least and most bytes of a message
between two ranks."""

_PAIR_S = 0.1
"""Seconds that a message between two ranks should take; its size is chosen accordingly."""

_NUM_ROUND_TRIPS = 3


class Compute(NamedTuple):
    """Time and bytes of one batch on one rank.

    Attributes:
        gradient_bytes: Bytes of the gradients of all trainable parameters.
        forward_s: Median time of `training_step`.
        backward_s: Median time of backward.
        num_steps: Number of steps over which the medians are taken.
        error_s: By how much `total_s` may be wrong, see `median_and_error`.
        numel: Number of elements of the gradients.
        num_modules: Number of modules that own trainable parameters.
    """

    gradient_bytes: int
    forward_s: float
    backward_s: float
    num_steps: int
    error_s: float = 0.0
    numel: int = 0
    num_modules: int = 1

    @property
    def total_s(self) -> float:
        """Forward and backward together, in seconds."""
        return self.forward_s + self.backward_s


class Pair(NamedTuple):
    """The rate and latency between two ranks while no other rank sends.

    Attributes:
        low: The lower rank.
        high: The higher rank.
        rate: Median bytes per second of a message between them.
        round_trip_s: Median seconds in which a message of one byte goes there and back.
    """

    low: int
    high: int
    rate: float
    round_trip_s: float = 0.0


class _StepTimer(StepProbe):
    """Synchronizes with the device before it reads the clock; stops the fit after `BUDGET_S`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(BlockLength(NUM_WARM_UP, NUM_STEPS), on_step=self._stop_in_time)
        self.trainer: Trainer | None = None
        self._device = device
        self._end_s = time.perf_counter() + BUDGET_S

    def _stop_in_time(self) -> None:
        if self.trainer is not None and len(self.begins_s) >= NUM_WARM_UP:
            self.trainer.should_stop = time.perf_counter() > self._end_s

    @override
    def start(self, action_name: str) -> None:
        self._synchronize()
        super().start(action_name)

    @override
    def stop(self, action_name: str) -> None:
        self._synchronize()
        super().stop(action_name)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_compute(cfg: DictConfig, device: torch.device) -> Compute:
    """Fit a copy of the configured model for a few batches on this rank alone. Local. Blocks.

    Args:
        cfg: Config of the job.
        device: Device of this rank.

    Raises:
        ValueError: If the data has too few batches.
    """
    model, timer = build_model(cfg), _StepTimer(device)
    with quiet_lightning():
        trainer = timer.trainer = build_trainer(
            cfg,
            SingleDeviceStrategy(device=device),
            profiler=timer,
            devices=1 if device.index is None else [device.index],
            num_nodes=1,
            max_steps=NUM_WARM_UP + NUM_STEPS,
            accumulate_grad_batches=1,
        )
        trainer.fit(model, datamodule=instantiate(cfg.data, _convert_="all"))
    forward_s, backward_s = timer.forward_s[NUM_WARM_UP:], timer.backward_s[NUM_WARM_UP:]
    if not backward_s:
        raise ValueError(
            f"The training data ended after {len(timer.backward_s)} batches on this rank, too"
            f" few to time. Give at least {NUM_WARM_UP + 1}: more data, or a smaller batch size."
        )
    trained = [one for one in model.parameters() if one.requires_grad]
    _, error_s = median_and_error([*map(sum, zip(forward_s, backward_s, strict=False))])
    times = median(forward_s), median(backward_s), len(backward_s), error_s
    sizes = sum(one.numel() for one in trained), num_modules(model, trained)
    return Compute(sum(one.nbytes for one in trained), *times, *sizes)


def measure_links(
    collectives: Collectives, device: torch.device, gradient_bytes: int
) -> tuple[LinkCost, list[Pair]]:
    """Measure exchanges among all ranks, and then each pair of ranks alone. Collective. Blocks.

    Args:
        collectives: The collectives that a training would use.
        device: Device of the parameters.
        gradient_bytes: Bytes of all gradients; the same on all ranks.

    Returns:
        The cost that planners use, the same on all ranks; and the pairs of which this rank is the
        lower one.
    """
    cost = measure_collectives(collectives, device, max(gradient_bytes, _LEAST_BYTES))
    least, most = _PAIR_BYTES
    nbytes = min(max(int(_PAIR_S / cost.beta_s), least), most) if cost.beta_s else most
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, nbytes)]
    found = []
    for low, high in pairs_to_measure(collectives.world.size):
        dist.barrier()
        if collectives.world.rank == low:
            small_s, large_s = (_round_trips(one, high, dist.send, dist.recv) for one in messages)
            found.append(Pair(low, high, 2 * nbytes / median(large_s), median(small_s)))
        elif collectives.world.rank == high:
            for one in messages:
                _round_trips(one, low, dist.recv, dist.send)
    return cost, found


def pairs_to_measure(world_size: int) -> list[tuple[int, int]]:
    """Return all pairs of ranks; with more than `MAX_RANKS_FOR_ALL_PAIRS` only ring neighbours."""
    ranks = range(world_size)
    if world_size <= MAX_RANKS_FOR_ALL_PAIRS:
        return list(combinations(ranks, 2))
    return [*pairwise(ranks), (0, world_size - 1)]


def _round_trips(message: torch.Tensor, peer: int, *there_and_back: Any) -> list[float]:
    """Return the seconds of each round trip, without the first one, which is a warm-up."""
    clock = clock_of(message.device)
    marks = []
    for _ in range(1 + _NUM_ROUND_TRIPS):
        for pass_on in there_and_back:
            pass_on(message, peer)
        marks.append(clock.mark())
    return [end - begin for begin, end in pairwise(map(clock.seconds, marks))]
