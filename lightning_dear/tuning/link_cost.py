"""Measures what collectives cost on this cluster: alpha and beta of `LinkCost`.

Collectives are measured in trains. A train is several collectives that are launched at once, as in
a training step: while one of them starts, the others use the link (the connection to the network).
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from lightning_dear.collectives.shards import shard_of
from lightning_dear.collectives.work import STATE_TAGS, Collectives, Work, uncounted
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning.measured import LinkCost, Train, fitted, sent_bytes
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.telemetry.clock import clock_of

_LEAST_BYTES, _MOST_BYTES, _MOST_LONG_BYTES = 1 << 18, 1 << 24, 1 << 26
"""Bytes of the trains, all collectives of a train together: the trains "many" and "few" have 1/8 of
the model's bytes, but at least _LEAST_BYTES and at most _MOST_BYTES (the total). The long train has
1/2 of the model's bytes, but at least the total and at most _MOST_LONG_BYTES. So measuring takes no
longer than three steps even on a slow link."""

_TRAINS = {"many": (16, 16), "few": (4, 4), "small": (4, 16)}
"""Argument of `fitted` -> (number of collectives, d). Each collective has 1/d of the total bytes
(see _LEAST_BYTES). So "small" has 1/4 of the total."""

_NUM_LONG = 8
"""Number of collectives in the long train. That train has many bytes because ranks end a train at
different times, which must weigh little: with four ranks on 1 Gb/s these times were 10 ms apart,
1/10 of the time that 16 MiB take."""

_NUM_REPEATS = 3
"""How often each train is run, except for the long train, which is run once."""


def measure_link(pipeline: Pipeline) -> LinkCost:
    """Measures the costs of collectives for a training, with sizes that suit its model.

    Pending all-gathers are waited for first. Collective. Blocks.
    """
    pipeline.complete_parameters("measuring the link")
    part = pipeline.parts[0]
    model_bytes = sum(tensor.nbytes for tensor in part.tensors)
    return measure_collectives(pipeline.collectives, part.parameters[0].device, model_bytes)


def measure_collectives(
    collectives: Collectives, device: torch.device, model_bytes: int
) -> LinkCost:
    """Measures the costs of reduce-scatters, all-gathers and all-reduces. Collective. Blocks.

    Each rank takes the median time over the repeats of a train. A train of reduce-scatters and the
    same train of all-gathers count as repeats of one train. Of these medians, that of the slowest
    rank counts. Needs memory for up to twice the bytes of the long train in the meantime.

    Args:
        collectives: Collectives of the training.
        device: Device of the buffers.
        model_bytes: Bytes of the model, on which the sizes of the trains depend.

    Returns:
        The costs, the same on all ranks.
    """
    total_bytes = min(max(model_bytes // 8, _LEAST_BYTES), _MOST_BYTES)
    long_bytes = min(max(model_bytes // 2, total_bytes), _MOST_LONG_BYTES)
    planned = {name: (count, total_bytes // part) for name, (count, part) in _TRAINS.items()}
    planned["long"] = _NUM_LONG, long_bytes // _NUM_LONG
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
    """Measures trains, and returns the times of this rank. Collective. Blocks.

    The bytes sent here do not count as sent bytes of the training.

    Args:
        collectives: Collectives of the training.
        device: Device of the buffers.
        numel: fp32 elements of each collective.
        count: Number of collectives in a train.
        repeats: How often each train is run.

    Returns:
        (Seconds of each train of reduce-scatters and of each train of all-gathers, seconds of each
        train of all-reduces).
    """
    clock = clock_of(device)
    # Written with `zero_`, since the operating system provides the memory pages of `torch.zeros`
    # only when they are used, which would be during the collective.
    made = partial(torch.empty, dtype=torch.float32, device=device)
    buffers = [made(numel).zero_() for _ in range(count)]
    received = [made(collectives.scratch_numel(numel)).zero_() for _ in buffers]

    def reduce_scatter(place: int) -> Work:
        buffer = buffers[place]
        own = shard_of(buffer, collectives.world.rank, collectives.world.size)
        return collectives.launch_reduce_scatter(buffer, received[place], own, STATE_TAGS + place)

    def all_gather(place: int) -> Work:
        return collectives.launch_all_gather(buffers[place], STATE_TAGS + place)

    def all_reduce(place: int) -> Work:
        return collectives.launch_all_reduce(buffers[place], STATE_TAGS + place)

    kinds = (reduce_scatter, all_gather, all_reduce)
    halves, all_reduces = [], []
    with uncounted(collectives):
        # One collective of each kind is run before measuring. So a backend's setup for this size is
        # not measured, and all ranks begin to measure at about the same time.
        for launch in kinds:
            launch(0).wait()
        for _ in range(repeats):
            marks = [clock.mark()]
            for launch in kinds:
                for work in [launch(place) for place in range(count)]:
                    work.wait()
                marks.append(clock.mark())
            *both, whole = (end - begin for begin, end in pairwise(map(clock.seconds, marks)))
            halves += both
            all_reduces.append(whole)
    return halves, all_reduces


def slowest(collectives: Collectives, own: list[float]) -> list[float]:
    """Returns, for each place in `own`, the longest of all ranks' times. Collective. Blocks.

    Args:
        collectives: Collectives of the training.
        own: Times of this rank; all ranks pass as many.

    Returns:
        The times, the same on all ranks.
    """
    return [max(repeat) for repeat in zip(*collectives.all_gather_object(own), strict=True)]
