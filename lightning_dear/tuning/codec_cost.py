"""Measures the costs of encoding and decoding, on buckets of random values that are never sent.

The time to start a bucket's messages is measured apart, by `launch_seconds`, and added.
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
"""Elements of the two buckets that are measured. Smaller models get smaller buckets."""

_NUM_REPEATS = 15
"""How often each bucket is measured. The first time is dropped; of the others the median counts."""


def measure_codecs(pipeline: Pipeline) -> CodecCosts:
    """Measures the costs of compressed and of uncompressed buckets, on the slowest rank.

    All ranks measure at the same time, since ranks of a host may share cores in training, too. The
    training's state is not changed. Needs memory for a few buckets of 4 Mi elements in the
    meantime. Collective. Blocks.

    Args:
        pipeline: Training with a codec; not mutated, but its parameters are gathered first.

    Returns:
        Costs of the training's codec (`compressed`) and of `Fp32` instead of it (`uncompressed`);
        the same on all ranks.
    """
    codec, collectives = pipeline.options.compressor, pipeline.collectives
    assert isinstance(codec, Codec)
    pipeline.complete_parameters("measuring the codec")
    numel = sum(tensor.numel for tensor in pipeline.parts[0].tensors)
    unit = ALIGNMENT * collectives.world.size
    large = aligned(max(min(numel, _LARGE_NUMEL), 4 * unit), unit)
    sizes = aligned(min(_SMALL_NUMEL, large // 4), unit), large
    # As a barrier: all ranks begin to measure at the same time.
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
    """Returns the costs that follow from measured seconds.

    Args:
        pipeline: Training whose options and ranks count.
        codec: Codec that was measured.
        sizes: Elements of the smaller and of the larger bucket.
        times_s: Seconds of the four operations (see `_Probe.times_s`) with the smaller bucket, then
            with the larger one.
        launches_s: Seconds to start the messages of the reduce half and of the gather half.
    """
    options = pipeline.options
    shards = [numel // pipeline.collectives.world.size for numel in sizes]
    # With two hops a rank encodes and decodes one part of its host's sum, whose length differs from
    # that of a rank's own gradients.
    together = options.ranks_together(pipeline.collectives)
    of_ranks = [[together * size for size in sizes]] * 2
    encode, decode_sum, encode_shard, decode = (
        fitted_line(lengths, times_s[place::4])
        for place, lengths in enumerate((*of_ranks, shards, sizes))
    )
    row = fitted_line(shards, [codec.wire_bytes(shard) for shard in shards])
    # Otherwise parameters, or mean gradients, are gathered uncompressed.
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
    """Returns the line through two measured points, with alpha and beta of at least 0.

    If alpha would be negative, the line goes through the origin and the second point. If beta would
    be negative, the line is flat.

    Args:
        sizes: Elements at both points, ascending.
        values: Values at both points.
    """
    (small, large), (low, high) = sizes, values
    beta = max((high - low) / (large - small), 0.0)
    if low < beta * small:
        return Linear(0.0, high / large)
    return Linear(low - beta * small, beta)


class _Probe:
    """Measures the exchange of one bucket on this rank, without communication. Local.

    The exchange is the one of training. Only its collectives are replaced, by `_SilentCollectives`.

    Args:
        pipeline: Training whose options and device are used.
        codec: Codec to measure; the training's, or `Fp32` instead.
        numel: Elements of the bucket.
    """

    @torch.no_grad()
    def __init__(self, pipeline: Pipeline, codec: Codec, numel: int) -> None:
        options, collectives = pipeline.options, pipeline.collectives
        rank, world_size = collectives.world.rank, collectives.world.size
        like = pipeline.parts[0].parameters[0]
        device = like.device
        self._clock = clock_of(device)
        generator = torch.Generator(device).manual_seed(rank)
        # Not zeros, since a sparse codec would find no elements to select in them.
        self._noise = torch.randn(numel, device=device, generator=generator).to(like.dtype)
        tensor = TensorSpec(0, "probe", numel, like.element_size(), "probe", 0, 0)
        plan, parameters = NoFusion().plan([tensor], world_size), [Parameter(self._noise.clone())]
        role_of = partial(options.role_of, plan)
        flat = allocate(plan, parameters, role_of, rank, lambda _: 0, keeps_gradients=True)
        self._bucket = flat.buckets[0]
        self._silent = _SilentCollectives(collectives)
        silent = cast(Collectives, self._silent)
        # `Fp32` is measured as a bucket that a plan leaves uncompressed: the training's codec still
        # keeps the memory that belongs to the bucket.
        left = (0,) if codec.is_identity else ()
        traffic = Traffic(silent, 0, flat, options.is_of_gradients, left)
        self._exchange = new_exchange(options, [None], traffic)

    def times_s(self) -> list[float]:
        """Returns the median seconds of four operations. Blocks.

        They are: to encode the bucket, to decode and sum it, to encode its shard, and to decode
        what was gathered.
        """
        rounds = [self._exchanged() for _ in range(_NUM_REPEATS)][1:]
        return [median(times_s) for times_s in zip(*rounds, strict=True)]

    @torch.no_grad()
    def _exchanged(self) -> list[float]:
        """Does the four operations of a step once, and returns the seconds of each."""
        bucket, exchange, clock = self._bucket, self._exchange, self._clock
        marks: list[Any] = []

        def timed(run: Callable[[], T]) -> T:
            marks.append(clock.mark())
            returned = run()
            marks.append(clock.mark())
            return returned

        bucket.gradients.copy_(self._noise)
        work = timed(partial(exchange.launch_reduce, bucket))
        self._silent.deliver()
        timed(work.wait)
        # A stand-in for the optimizer step: if differences of parameters are sent, they are not 0.
        bucket.shard.add_(bucket.mean, alpha=1e-3)
        launch = timed(partial(exchange.prepare_gather, bucket))
        work = launch()
        self._silent.deliver()
        timed(work.wait)
        exchange.commit()
        moments = [clock.seconds(mark) for mark in marks]
        return [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]


class _SilentCollectives:
    """Stand-in for `Collectives` that sends nothing.

    `deliver` copies what this rank would have sent into the receive buffers of all ranks' messages.
    It has the methods and attributes that exchanges use.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.world, self.scratch_numel = collectives.world, collectives.scratch_numel
        self.wait_blocks_host, self.hops, self.showing = True, 1, None
        self._sent: list[tuple[Tensor, Tensor]] = []

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        # Without scratch there are no received rows to sum on the host: the backend would sum.
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
"""Bytes of each message in `launch_seconds`. Starting a message takes as long for any size."""

_NUM_LAUNCHES = 20
"""How often the launch of each half is measured."""


def launch_seconds(pipeline: Pipeline) -> tuple[float, float]:
    """Measures the seconds to start an encoded bucket's messages, on the slowest rank.

    All ranks start their messages at the same time, since ranks of a host may share cores in
    training, too. Receives are posted in advance, as in training. Collective. Blocks.

    Returns:
        Seconds in the reduce half and in the gather half; the same on all ranks. 0 on accelerators,
        where launches run ahead of the device and so delay nothing.
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
        # As a barrier: all ranks launch at the same time.
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
