"""What exchanges cost on this cluster: alpha and beta, while others are under way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from lightning_dear.collectives.work import STATE_TAGS, Collectives, Work, shard_of, uncounted
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import LinkCost
from lightning_dear.planning.measured import Train, fitted, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.telemetry.clock import clock_of

_LEAST_BYTES, _MOST_BYTES, _MOST_LONG_BYTES = 1 << 18, 1 << 24, 1 << 26
"""Of a train of exchanges that are under way at once, as in a step: while one starts, the others
use the link. In between, an eighth of the model, and half of it for the long train, so that a slow
link takes no longer than three steps."""

_TRAINS = {"many": (16, 16), "few": (4, 4), "small": (4, 16)}
"""Of `fitted` -> (number of exchanges, divisor of the bytes for each)."""

_NUM_LONG = 8
"""Exchanges of the long train. It is so long because ranks end a train at different moments: with
four ranks on 1 Gb/s 10 ms apart, a tenth of the time of 16 MiB."""

_NUM_REPEATS = 3
"""Of a train; the long one runs once."""


def measure_link(pipeline: Pipeline) -> LinkCost:
    """`measure_collectives` for a training and its model. Collective, blocks."""
    pipeline.complete_parameters("measuring the link")
    part = pipeline.parts[0]
    model_bytes = sum(tensor.nbytes for tensor in part.tensors)
    return measure_collectives(pipeline.collectives, part.parameters[0].device, model_bytes)


def measure_collectives(
    collectives: Collectives, device: torch.device, model_bytes: int
) -> LinkCost:
    """What our two halves and an all-reduce cost, from trains of exchanges. Collective, blocks.

    A train's time is that of the slowest rank, of its own the median over repeats (and, of the
    halves, over both). Needs twice the bytes of the long train for a moment. The same on all ranks.

    Args:
        collectives: Training's.
        device: Where buffers are.
        model_bytes: Of the model whose exchanges they are to be like.
    """
    total_bytes = min(max(model_bytes // 8, _LEAST_BYTES), _MOST_BYTES)
    long_bytes = min(max(model_bytes // 2, total_bytes), _MOST_LONG_BYTES)
    planned = {
        **{name: (count, total_bytes // part) for name, (count, part) in _TRAINS.items()},
        "long": (_NUM_LONG, long_bytes // _NUM_LONG),
    }
    halves, all_reduces = {}, {}
    for name, (count, nbytes) in planned.items():
        numel = aligned(nbytes // 4, ALIGNMENT * collectives.world.size)
        repeats = 1 if name == "long" else _NUM_REPEATS
        both_s = map(median, train_times(collectives, device, numel, count, repeats))
        half_s, whole_s = (max(collectives.all_gather_object(one_s)) for one_s in both_s)
        sent = sent_bytes(4 * numel, collectives.world.size)
        halves[name] = Train(count, sent, half_s)
        all_reduces[name] = Train(count, 2 * sent, whole_s)
    return replace(fitted(**halves), all_reduce=fitted(**all_reduces))


def train_times(
    collectives: Collectives, device: torch.device, numel: int, count: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds for `count` exchanges of `numel` fp32 numbers each that are under way at once.

    Of either half, in turns, and of all-reduces. What is sent belongs to no step.
    """
    clock = clock_of(device)
    # Written to, unlike `torch.zeros`, whose pages the kernel would make during the exchange.
    made = partial(torch.empty, dtype=torch.float32, device=device)
    buffers = [made(numel).zero_() for _ in range(count)]
    scratch = collectives.scratch_numel(numel)
    received = [made(scratch).zero_() for _ in buffers]

    def reduce_scatter(place: int) -> Work:
        buffer = buffers[place]
        own = shard_of(buffer, collectives.world.rank, collectives.world.size)
        number = STATE_TAGS + place
        return collectives.launch_reduce_scatter(buffer, received[place], own, number)

    def all_gather(place: int) -> Work:
        return collectives.launch_all_gather(buffers[place], STATE_TAGS + place)

    def all_reduce(place: int) -> Work:
        return collectives.launch_all_reduce(buffers[place], STATE_TAGS + place)

    kinds = (reduce_scatter, all_gather, all_reduce)
    halves, all_reduces = [], []
    with uncounted(collectives):
        # One of each first: what a size needs once is set up, and ranks begin together.
        for launch in kinds:
            launch(0).wait()
        for _ in range(repeats):
            marks = [clock.mark()]
            for launch in kinds:
                for work in [launch(place) for place in range(count)]:
                    work.wait()
                marks.append(clock.mark())
            moments = [clock.seconds(mark) for mark in marks]
            *both, whole = (end - begin for begin, end in pairwise(moments))
            halves += both
            all_reduces.append(whole)
    return halves, all_reduces


def slowest(collectives: Collectives, own: list[float]) -> list[float]:
    """Of each of the repeats that all ranks have timed, the longest time."""
    everyones: list[list[float]] = collectives.all_gather_object(own)
    return [max(repeat) for repeat in zip(*everyones, strict=True)]
