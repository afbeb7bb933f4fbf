"""Measures what encoding and decoding cost, on throw-away buckets that nobody receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import add
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import allocate
from lightning_dear.clock import Clock, clock_of
from lightning_dear.compression import Codec, Fp32
from lightning_dear.exchange import new_exchange
from lightning_dear.exchange_options import ExchangeOptions
from lightning_dear.pipeline import Pipeline
from lightning_dear.planning import CodecCost, CodecCosts, Linear, NoFusion, TensorSpec
from lightning_dear.planning.codec_cost import NO_CODEC
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.work import STATE_NUMBERS, Collectives, WireLedger, Work

_SMALL_NUMEL, _LARGE_NUMEL = 1 << 16, 1 << 22
"""Elements of the two buckets, padding left out; of smaller models less."""

_NUM_REPEATS = 5
"""Exchanges of each bucket; the first one is dropped."""

_ROW_BYTES = 1024
"""Of the messages whose handling is timed."""


def measure_codecs(pipeline: Pipeline) -> CodecCosts:
    """What the training's codec costs on the slowest rank, and `Fp32` in its place.

    `NO_CODEC` if there is none. All ranks measure at once, as they may share cores. Nothing of the
    training is touched. Needs memory for a few buckets of 4 Mi elements for a moment. Collective,
    blocks.
    """
    codec, options = pipeline.codec, pipeline.options
    if codec is None:
        return NO_CODEC
    assert isinstance(codec, Codec)
    part, collectives = pipeline.parts[0], pipeline.collectives
    total = sum(tensor.numel for tensor in part.tensors)
    sizes = _sizes(total, collectives.world_size)
    # Ranks begin together.
    collectives.all_gather_object(None)
    own = [
        [_times_s(options, used, numel, part.parameters[0], collectives) for numel in sizes]
        for used in (codec, Fp32())
    ]
    everyones = collectives.all_gather_object(own)
    handling_s = _slowest(collectives.all_gather_object(_handling_s(pipeline)))
    costs = []
    for place, used in enumerate((codec, Fp32())):
        slowest = [_slowest([one[place][size] for one in everyones]) for size in range(len(sizes))]
        # Whatever the size of a bucket.
        times_s = [list(map(add, one, handling_s)) for one in slowest]
        costs.append(_cost(options, used, sizes, times_s, collectives.world_size))
    may_mix = codec.kind != "vote" and not isinstance(codec, Fp32)
    return CodecCosts(costs[0], costs[1], may_mix)


def _slowest(everyones: Sequence[Sequence[float]]) -> list[float]:
    return [max(times_s) for times_s in zip(*everyones, strict=True)]


def _handling_s(pipeline: Pipeline) -> list[float]:
    """Seconds that messages take of whoever computes, beside what encodes and decodes them.

    To start those of the reduce half, to see that they are there, and the same of the gather half.
    Buckets of any size have as many. Collective, blocks.
    """
    collectives = pipeline.collectives
    device = pipeline.parts[0].parameters[0].device
    clock: Clock = clock_of(device)
    rows, incoming = (
        torch.zeros((collectives.world_size, _ROW_BYTES), dtype=torch.uint8, device=device)
        for _ in range(2)
    )
    halves: Sequence[Callable[[], Work]] = (
        partial(collectives.launch_all_to_all, rows, incoming, STATE_NUMBERS),
        partial(collectives.launch_all_gather, rows.view(-1), STATE_NUMBERS),
    )
    # These bytes belong to no step.
    ledger, collectives.ledger = collectives.ledger, WireLedger()
    rounds = []
    for _ in range(_NUM_REPEATS):
        moments: list[Any] = []
        for launch in halves:
            moments.append(clock.mark())
            work = launch()
            moments.append(clock.mark())
            # Until then everybody has sent.
            collectives.all_gather_object(None)
            moments.append(clock.mark())
            work.wait()
            moments.append(clock.mark())
        seconds = [clock.seconds(mark) for mark in moments]
        rounds.append([seconds[place + 1] - seconds[place] for place in range(0, 8, 2)])
    collectives.ledger = ledger
    return [median(times_s) for times_s in zip(*rounds[1:], strict=True)]


def _sizes(total: int, world_size: int) -> tuple[int, int]:
    unit = ALIGNMENT * world_size
    large = aligned(max(min(total, _LARGE_NUMEL), 4 * unit), unit)
    return aligned(min(_SMALL_NUMEL, large // 4), unit), large


def _cost(
    options: ExchangeOptions,
    codec: Codec,
    sizes: Sequence[int],
    times_s: Sequence[Sequence[float]],
    world_size: int,
) -> CodecCost:
    shards = [numel // world_size for numel in sizes]
    encode, decode_sum, encode_shard, decode = (
        fitted_line(shards if place == 2 else sizes, [one[place] for one in times_s])
        for place in range(4)
    )
    row = fitted_line(shards, [codec.wire_bytes(shard) for shard in shards])
    # Where a step or a bucket is left out, parameters and means come back as they are.
    sends_bytes_back = options.encodes("gather") and not isinstance(codec, Fp32)
    return CodecCost(
        encode,
        decode_sum,
        encode_shard,
        decode,
        reduce_bytes=row if options.encodes("reduce") else None,
        gather_bytes=row if sends_bytes_back else None,
    )


def fitted_line(sizes: Sequence[int], values: Sequence[float]) -> Linear:
    """The line through two points; through the origin if it would begin below, flat if it fell."""
    (small, large), (low, high) = sizes, values
    beta = max((high - low) / (large - small), 0.0)
    if low < beta * small:
        return Linear(0.0, high / large)
    return Linear(low - beta * small, beta)


def _times_s(
    options: ExchangeOptions,
    codec: Codec,
    numel: int,
    like: Parameter,
    collectives: Collectives,
) -> list[float]:
    """Seconds to encode a bucket, to decode and sum it, to encode its shard and to decode that."""
    probe = _Probe(options, codec, numel, like, collectives)
    rounds = [probe.exchanged() for _ in range(_NUM_REPEATS)][1:]
    return [median(times_s) for times_s in zip(*rounds, strict=True)]


class _Probe:
    """One bucket and its exchange, as in training but for the other ranks."""

    @torch.no_grad()
    def __init__(
        self,
        options: ExchangeOptions,
        codec: Codec,
        numel: int,
        like: Parameter,
        collectives: Collectives,
    ) -> None:
        device, rank, world_size = like.device, collectives.rank, collectives.world_size
        self._clock: Clock = clock_of(device)
        generator = torch.Generator(device).manual_seed(rank)
        self._noise = torch.randn(numel, device=device, generator=generator).to(like.dtype)
        tensor = TensorSpec(0, "probe", numel, like.element_size(), "probe", 0, 0)
        flat = allocate(
            NoFusion().plan([tensor], world_size),
            [Parameter(self._noise.clone())],
            rank,
            lambda _: 0,
            world_size,
            keeps_gradients=True,
            lags=options.encodes_differences,
        )
        self._bucket = flat.buckets[0]
        self._nobody = _Nobody(rank, world_size)
        self._exchange = new_exchange(
            options,
            [codec],
            cast(Collectives, self._nobody),
            0,
            flat,
            lambda: None,
            lambda _: nullcontext(),
        )

    @torch.no_grad()
    def exchanged(self) -> list[float]:
        """Seconds of the four operations in turn, each in the place of training's own."""
        bucket, exchange = self._bucket, self._exchange
        bucket.gradients.copy_(self._noise)
        marks: list[Any] = [self._clock.mark()]
        work = exchange.launch_reduce(bucket)
        marks.append(self._clock.mark())
        self._nobody.deliver()
        marks.append(self._clock.mark())
        work.wait()
        marks.append(self._clock.mark())
        bucket.shard.add_(bucket.mean, alpha=1e-3)
        marks.append(self._clock.mark())
        launch = exchange.prepare_gather(bucket)
        marks.append(self._clock.mark())
        work = launch()
        self._nobody.deliver()
        marks.append(self._clock.mark())
        work.wait()
        marks.append(self._clock.mark())
        exchange.commit()
        moments = [self._clock.seconds(mark) for mark in marks]
        spans = (0, 2, 4, 6)
        return [moments[place + 1] - moments[place] for place in spans]


class _Nobody:
    """The part of `Collectives` that an exchange uses; what it sends comes back from every rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.reads_flags_freely = True
        self._sent: list[tuple[Tensor, Tensor]] = []

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        return Work(lambda: None)

    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, bucket: int) -> Work:
        self._sent.append((rows, incoming))
        return Work(lambda: None)

    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        rows = buffer.view(self.world_size, -1)
        self._sent.append((rows[self.rank].clone(), rows))
        return Work(lambda: None)

    def deliver(self) -> None:
        for sent, received in self._sent:
            received.copy_(sent)
        self._sent.clear()
