"""Measures what encoding and decoding cost, on throw-away buckets that nobody receives.

What starting a bucket's messages costs comes on top, from `launch_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import allocate
from lightning_dear.collectives.work import (
    STATE_TAGS,
    Collectives,
    Work,
    shard_of,
    sum_in_source_order,
    uncounted,
)
from lightning_dear.compression import Codec, Fp32
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange import Traffic, new_exchange
from lightning_dear.planning import CodecCost, CodecCosts, Linear, NoFusion, TensorSpec
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import slowest

T = TypeVar("T")

_SMALL_NUMEL, _LARGE_NUMEL = 1 << 16, 1 << 22
"""Elements of the two buckets, padding left out; of smaller models less."""

_NUM_REPEATS = 15
"""Exchanges of each bucket; the first one is dropped."""


def measure_codecs(pipeline: Pipeline) -> CodecCosts:
    """What the training's codec costs on the slowest rank, and `Fp32` in its place.

    All ranks measure at once, as they may share cores. Nothing of the training is touched. Needs
    memory for a few buckets of 4 Mi elements for a moment. Collective, blocks.
    """
    codec, collectives = pipeline.options.compressor, pipeline.collectives
    assert isinstance(codec, Codec)
    pipeline.complete_parameters("measuring the codec")
    numel = sum(tensor.numel for tensor in pipeline.parts[0].tensors)
    unit = ALIGNMENT * collectives.world.size
    large = aligned(max(min(numel, _LARGE_NUMEL), 4 * unit), unit)
    sizes = aligned(min(_SMALL_NUMEL, large // 4), unit), large
    # Ranks begin together.
    collectives.all_gather_object(None)
    launches_s = launch_seconds(pipeline)
    costs = []
    for used in (codec, Fp32()):
        own_s = [one_s for size in sizes for one_s in _Probe(pipeline, used, size).times_s()]
        costs.append(_cost(pipeline, used, sizes, slowest(collectives, own_s), launches_s))
    own, plain = costs
    return CodecCosts(own, plain, may_mix=not codec.votes and not codec.is_identity)


def _cost(
    pipeline: Pipeline,
    codec: Codec,
    sizes: Sequence[int],
    times_s: Sequence[float],
    launches_s: tuple[float, float],
) -> CodecCost:
    """From the seconds of the four operations, of the smaller bucket and then of the larger."""
    options = pipeline.options
    shards = [numel // pipeline.collectives.world.size for numel in sizes]
    # In two hops a rank encodes, and decodes, its part of what its host's ranks have together.
    together = options.ranks_together(pipeline.collectives)
    of_ranks = [[together * size for size in sizes]] * 2
    encode, decode_sum, encode_shard, decode = (
        fitted_line(lengths, times_s[place::4])
        for place, lengths in enumerate((*of_ranks, shards, sizes))
    )
    row = fitted_line(shards, [codec.wire_bytes(shard) for shard in shards])
    # Where a step or a bucket is left out, parameters and means come back as they are.
    sends_bytes_back = options.encodes_both and not codec.is_identity
    return CodecCost(
        replace(encode, alpha=encode.alpha + launches_s[0]),
        decode_sum,
        replace(encode_shard, alpha=encode_shard.alpha + launches_s[1]),
        decode,
        reduce_bytes=row,
        gather_bytes=row if sends_bytes_back else None,
    )


def fitted_line(sizes: Sequence[int], values: Sequence[float]) -> Linear:
    """The line through two points; through the origin if it would begin below, flat if it fell."""
    (small, large), (low, high) = sizes, values
    beta = max((high - low) / (large - small), 0.0)
    if low < beta * small:
        return Linear(0.0, high / large)
    return Linear(low - beta * small, beta)


class _Probe:
    """One bucket and its exchange, as in training but for the other ranks."""

    @torch.no_grad()
    def __init__(self, pipeline: Pipeline, codec: Codec, numel: int) -> None:
        options, collectives = pipeline.options, pipeline.collectives
        rank, world_size = collectives.world.rank, collectives.world.size
        like = pipeline.parts[0].parameters[0]
        device = like.device
        self._clock = clock_of(device)
        generator = torch.Generator(device).manual_seed(rank)
        # Not zeros, of which a sparse codec would find nothing to select.
        self._noise = torch.randn(numel, device=device, generator=generator).to(like.dtype)
        tensor = TensorSpec(0, "probe", numel, like.element_size(), "probe", 0, 0)
        plan, parameters = NoFusion().plan([tensor], world_size), [Parameter(self._noise.clone())]
        role_of = partial(options.role_of, plan)
        flat = allocate(plan, parameters, role_of, rank, lambda _: 0, keeps_gradients=True)
        self._bucket = flat.buckets[0]
        self._nobody = _Nobody(collectives)
        nobody = cast(Collectives, self._nobody)
        # With the memory of what it stands in for, as where a plan leaves a bucket so.
        left = (0,) if codec.is_identity else ()
        traffic = Traffic(nobody, 0, flat, options.is_of_gradients, left)
        self._exchange = new_exchange(options, [None], traffic)

    def times_s(self) -> list[float]:
        """Seconds to encode a bucket, to decode and sum it, to encode its shard, to decode that."""
        rounds = [self._exchanged() for _ in range(_NUM_REPEATS)][1:]
        return [median(times_s) for times_s in zip(*rounds, strict=True)]

    @torch.no_grad()
    def _exchanged(self) -> list[float]:
        """Seconds of the four operations in turn, each in the place of training's own."""
        bucket, exchange, clock = self._bucket, self._exchange, self._clock
        marks: list[Any] = []

        def timed(run: Callable[[], T]) -> T:
            marks.append(clock.mark())
            returned = run()
            marks.append(clock.mark())
            return returned

        bucket.gradients.copy_(self._noise)
        work = timed(partial(exchange.launch_reduce, bucket))
        self._nobody.deliver()
        timed(work.wait)
        # Stands for a step, so that differences of parameters, if these are sent, are not 0.
        bucket.shard.add_(bucket.mean, alpha=1e-3)
        launch = timed(partial(exchange.prepare_gather, bucket))
        work = launch()
        self._nobody.deliver()
        timed(work.wait)
        exchange.commit()
        moments = [clock.seconds(mark) for mark in marks]
        return [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]


class _Nobody:
    """The part of `Collectives` that an exchange uses; what it sends comes back from every rank."""

    def __init__(self, collectives: Collectives) -> None:
        self.world, self.scratch_numel = collectives.world, collectives.scratch_numel
        self.wait_blocks_host, self.hops, self.showing = True, 1, None
        self._sent: list[tuple[Tensor, Tensor]] = []

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        # No scratch: nothing is encoded, or the backend itself sums.
        if not received.numel():
            return Work(lambda: None)
        own = shard_of(buffer, self.world.rank, self.world.size)
        others = received.view(-1, own.numel())
        self._sent.append((own, others))
        return Work(lambda: None, partial(sum_in_source_order, [own, *others], out))

    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, bucket: int) -> Work:
        self._sent.append((rows, incoming))
        return Work(lambda: None)

    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        rows = buffer.view(self.world.size, -1)
        self._sent.append((rows[self.world.rank].clone(), rows))
        return Work(lambda: None)

    def deliver(self) -> None:
        for sent, received in self._sent:
            received.copy_(sent)
        self._sent.clear()


_ROW_BYTES = 1024
"""Of each message: a bucket of any size has as many."""

_NUM_LAUNCHES = 20


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
        torch.zeros((collectives.world.size, _ROW_BYTES), dtype=torch.uint8) for _ in range(2)
    )

    def started_s(
        expect: Callable[[Tensor, int], None], launch: Callable[..., Work], *buffers: Tensor
    ) -> float:
        expect(buffers[-1], STATE_TAGS)
        # Ranks begin together.
        collectives.all_gather_object(None)
        begin_s = time.perf_counter()
        work = launch(*buffers, STATE_TAGS)
        end_s = time.perf_counter()
        work.wait()
        return end_s - begin_s

    expect = partial(collectives.expect_messages, "reduce_scatter")
    reducing = expect, collectives.launch_all_to_all, rows, incoming
    gathering = collectives.expect_all_gather, collectives.launch_all_gather, rows.view(-1)
    with uncounted(collectives):
        own = [(started_s(*reducing), started_s(*gathering)) for _ in range(_NUM_LAUNCHES)]
    reduce_s, gather_s = slowest(collectives, [median(half) for half in zip(*own, strict=True)])
    return reduce_s, gather_s
