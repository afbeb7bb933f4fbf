"""Measures what starting a bucket's messages takes of a CPU that would compute meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from lightning_dear.collectives.work import STATE_NUMBERS, Work, uncounted
from lightning_dear.engine.pipeline import Pipeline

_ROW_BYTES = 1024
"""Of each message: a bucket of any size has as many."""

_NUM_REPEATS = 20


def launch_seconds(pipeline: Pipeline) -> tuple[float, float]:
    """Seconds to start a coded bucket's messages, of the reduce half and of the gather half.

    On the slowest rank. All ranks start theirs at once, as they may share cores, and receives are
    expected as in training. 0 where the device is no CPU: the host hands it work ahead of time.
    Collective, blocks.
    """
    collectives = pipeline.collectives
    device = pipeline.parts[0].parameters[0].device
    if device.type != "cpu":
        return 0.0, 0.0
    rows, incoming = (
        torch.zeros((collectives.world_size, _ROW_BYTES), dtype=torch.uint8) for _ in range(2)
    )

    def reduce_s() -> float:
        collectives.expect_all_to_all(incoming, STATE_NUMBERS)
        return started_s(partial(collectives.launch_all_to_all, rows, incoming))

    def gather_s() -> float:
        buffer = rows.view(-1)
        collectives.expect_all_gather(buffer, STATE_NUMBERS)
        return started_s(partial(collectives.launch_all_gather, buffer))

    def started_s(launch: Callable[[int], Work]) -> float:
        # Ranks begin together.
        collectives.all_gather_object(None)
        begin_s = time.perf_counter()
        work = launch(STATE_NUMBERS)
        end_s = time.perf_counter()
        work.wait()
        return end_s - begin_s

    with uncounted(collectives):
        own = [(reduce_s(), gather_s()) for _ in range(_NUM_REPEATS)]
    medians = [median(half) for half in zip(*own, strict=True)]
    slowest = [max(half) for half in zip(*collectives.all_gather_object(medians), strict=True)]
    return slowest[0], slowest[1]
