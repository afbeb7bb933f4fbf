"""What the start of an all-reduce takes in a step that fuses nothing, from pretended steps.

Trains of equal ones overstate it on gloo, where ranks that have little to send wait for each other
longer the more is under way: by up to a fifth of a step with four ranks on two cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median

import torch

from lightning_dear.collectives.work import STATE_NUMBERS, Collectives, uncounted
from lightning_dear.planning import LinkCost, ModelTimes, TensorSpec
from lightning_dear.planning.measured import sent_bytes
from lightning_dear.studies.probes.sizes import Spread
from lightning_dear.tuning.link_cost import slowest

_NUM_REPEATS = 5
_NEARLY = 0.02
"""Share of a pretended backward that its repeats differ by in any case."""

_NUM_HALVINGS = 40

Due = Sequence[tuple[float, int]]
"""Of each tensor: seconds since backward began when its gradient is there, and its elements."""


def due_of(tensors: Sequence[TensorSpec], times: ModelTimes) -> Due:
    """The gradients of a step, in the order in which they are there."""
    return sorted((times.ready_s.get(one.index, times.backward_s), one.numel) for one in tensors)


def with_paced_alpha(
    all_reduce: Spread[LinkCost], collectives: Collectives, device: torch.device, due: Due
) -> tuple[Spread[LinkCost], float]:
    """`all_reduce` with the alphas of pretended backwards in the place of trains'.

    Each launches an all-reduce for every gradient when it is due. Where backward hides them all,
    nothing is told of alpha, and that of trains stays. Collective, blocks.

    Returns:
        The costs, and the CPU seconds of a rank for one all-reduce.
    """
    own = [_backward_s(collectives, device, due) for _ in range(1 + _NUM_REPEATS)][1:]
    ends_s = slowest(collectives, [end_s for end_s, _ in own])
    own_cpu_s = median(cpu_s for _, cpu_s in own) / len(due)
    cpu_s = mean(collectives.all_gather_object(own_cpu_s))

    def with_alpha(cost: LinkCost, end_s: float) -> LinkCost:
        return replace(cost, alpha_s=alpha_of(end_s, due, cost, collectives.world_size))

    spread = Spread(
        with_alpha(all_reduce.least, min(ends_s)),
        with_alpha(all_reduce.middle, median(ends_s)),
        with_alpha(all_reduce.most, max(ends_s)),
    )
    return spread, cpu_s


def alpha_of(end_s: float, due: Due, cost: LinkCost, world_size: int) -> float:
    """The alpha with which the last all-reduce ends after `end_s`; `cost`'s if any small one does.

    An all-reduce takes alpha or its bytes' time, whichever is longer, one after the other.
    """
    most_s = (1 + _NEARLY) * end_s
    if _end_s(0.0, due, cost, world_size) >= (1 - _NEARLY) * end_s:
        # All of it is hidden: the largest that may be, but no more than what trains have.
        return min(cost.alpha_s, _largest(most_s, due, cost, world_size))
    return _largest(end_s, due, cost, world_size)


def _largest(most_s: float, due: Due, cost: LinkCost, world_size: int) -> float:
    low, high = 0.0, most_s
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if _end_s(middle, due, cost, world_size) <= most_s:
            low = middle
        else:
            high = middle
    return low


def _end_s(alpha_s: float, due: Due, cost: LinkCost, world_size: int) -> float:
    end_s = 0.0
    for ready_s, numel in due:
        bytes_s = cost.beta_s * 2 * sent_bytes(4 * numel, world_size)
        end_s = max(end_s, ready_s) + max(alpha_s, bytes_s)
    return end_s


def _backward_s(collectives: Collectives, device: torch.device, due: Due) -> tuple[float, float]:
    """Seconds of a pretended backward until its last all-reduce has ended, and CPU seconds."""
    buffers = [torch.zeros(numel, device=device) for _, numel in due]
    works = []
    with uncounted(collectives):
        # Ranks begin together.
        collectives.all_gather_object(None)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for number, ((ready_s, _), buffer) in enumerate(zip(due, buffers, strict=True)):
            time.sleep(max(0.0, begin_s + ready_s - time.perf_counter()))
            works.append(collectives.launch_all_reduce(buffer, STATE_NUMBERS + number))
        for work in works:
            work.wait()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
