"""What exchanges of any size cost, for a cluster's file that is to serve models of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

import torch

from lightning_dear.collectives.work import Collectives
from lightning_dear.planning import LinkCost
from lightning_dear.planning.measured import sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.tuning.link_cost import slowest, train_times

_SMALL_NUMELS = 1 << 10, 1 << 14
"""4 and 64 KiB. In a train the former wait for each other's acknowledgements, as no step's do; on a
slow link the latter take what their bytes take. So the shorter time counts."""

_COUNTS = 16, 128
_NUM_LARGE = 4
_NUM_REPEATS = 3

Of = Callable[[list[float]], float]
"""What of several repeats counts."""

_SHORT_NUMELS, _NUM_SHORT, _NUM_SHORT_REPEATS = (1 << 8, 1 << 12), 64, 5
"""Of all-reduces of 1 and 16 KiB: trains as a step has them that fuses nothing. On gloo what one of
them takes varies up to twofold from train to train, whatever its size: so the median counts."""

Cost = TypeVar("Cost")


@dataclass(frozen=True)
class Spread(Generic[Cost]):
    """What exchanges cost, by the shortest, the median and the longest of their repeats."""

    least: Cost
    middle: Cost
    most: Cost


def measure_sizes(
    collectives: Collectives, device: torch.device, total_bytes: int
) -> tuple[Spread[LinkCost], Spread[LinkCost]]:
    """What our halves and the backend's all-reduce cost: alpha from small ones, beta from large.

    For a cluster's file, which is to serve models of any size. An all-reduce of gloo's takes its
    alpha or its bytes' time, whichever is longer: its dependent steps hide behind the bytes of
    another one. Collective, blocks.

    Args:
        collectives: Training's.
        device: Where buffers are.
        total_bytes: Of the large exchanges, which are under way at once.
    """
    world_size = collectives.world_size
    unit = ALIGNMENT * world_size
    large = aligned(total_bytes // 4 // _NUM_LARGE, unit)
    sent = sent_bytes(4 * large, world_size)

    def slowest_times(numel: int, count: int, repeats: int) -> list[list[float]]:
        own = train_times(collectives, device, numel, count, repeats)
        return [slowest(collectives, one) for one in own]

    halves_s, wholes_s = slowest_times(large, _NUM_LARGE, _NUM_REPEATS)
    trains = {
        numel: [slowest_times(numel, count, _NUM_REPEATS)[0] for count in _COUNTS]
        for numel in (aligned(small, unit) for small in _SMALL_NUMELS)
    }
    starts_s: list[float] = []
    for numel in (aligned(short, unit) for short in _SHORT_NUMELS):
        starts_s += slowest_times(numel, _NUM_SHORT, _NUM_SHORT_REPEATS)[1]

    def half(of: Of) -> LinkCost:
        half_s = of(halves_s) / _NUM_LARGE
        fitted_to = []
        for numel, (few_s, many_s) in trains.items():
            own_s = max(of(many_s) - of(few_s), 0.0) / (_COUNTS[1] - _COUNTS[0])
            fitted_to.append(line(sent_bytes(4 * numel, world_size), own_s, sent, half_s))
        return min(fitted_to, key=lambda cost: cost.alpha_s)

    def whole(of: Of) -> LinkCost:
        return LinkCost(of(starts_s) / _NUM_SHORT, of(wholes_s) / _NUM_LARGE / (2 * sent))

    halves, wholes = (Spread(cost(min), cost(median), cost(max)) for cost in (half, whole))
    return halves, wholes


def line(few_bytes: float, few_s: float, many_bytes: float, many_s: float) -> LinkCost:
    """Alpha and beta of two exchanges, of what a rank sends in each; never below zero."""
    beta_s = max((many_s - few_s) / (many_bytes - few_bytes), 0.0)
    return LinkCost(max(few_s - beta_s * few_bytes, 0.0), beta_s)
