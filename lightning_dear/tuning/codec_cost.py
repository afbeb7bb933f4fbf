"""Measures the costs of encoding and decoding, on buckets of random values that are never sent.

The time to start a bucket's messages is measured separately, by `launch_seconds`, and added.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_dear.bucket import allocate
from lightning_dear.collectives.shards import shard_of, sum_in_source_order
from lightning_dear.collectives.work import STATE_TAGS, Collectives, T, Work, uncounted
from lightning_dear.compression import Codec, Fp32
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange import Traffic, new_exchange
from lightning_dear.planning import CodecCost, CodecCosts, Linear, NoFusion, TensorSpec
from lightning_dear.planning.plan import ALIGNMENT, aligned
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.tuning.link_cost import slowest

_SMALL_NUMEL, _LARGE_NUMEL = 1 << 16, 1 << 22
"""Most elements of the two buckets that are measured. For small models they are smaller."""

_NUM_REPEATS = 15
"""How often each bucket is measured. The first measurement is dropped; of the others the median
counts."""


def measure_codecs(pipeline: Pipeline) -> CodecCosts:
    """Measures the costs of compressed and of uncompressed buckets, on the slowest rank.

    All ranks measure at the same time, since ranks of a host may share cores in training, too.
    Weights, residuals and optimizer state do not change. Needs memory for a few buckets of up to
    4 Mi elements in the meantime. Collective. Blocks.

    Args:
        pipeline: Training whose compressor is a `Codec`. Its pending all-gathers are waited for
            first.

    Returns:
        Costs of the training's codec (`compressed`) and of `Fp32` in place of it (`uncompressed`);
        the same on all ranks.
    """
    codec, collectives = pipeline.options.compressor, pipeline.collectives
    assert isinstance(codec, Codec)
    pipeline.complete_parameters("measuring the codec")
    numel = sum(tensor.numel for tensor in pipeline.parts[0].tensors)
    unit = ALIGNMENT * collectives.world.size
    large = aligned(max(min(numel, _LARGE_NUMEL), 4 * unit), unit)
    sizes = aligned(min(_SMALL_NUMEL, large // 4), unit), large
    # A barrier, so that all ranks begin to measure at the same time.
    collectives.all_gather_object(None)
    launches_s = launch_seconds(pipeline)
    own, plain = (_cost(pipeline, used, sizes, launches_s) for used in (codec, Fp32()))
    return CodecCosts(own, plain, may_mix=not codec.votes and not codec.is_identity)


def _cost(
    pipeline: Pipeline, codec: Codec, sizes: Sequence[int], launches_s: tuple[float, float]
) -> CodecCost:
    """Measures a codec, and returns its costs on the slowest rank. Collective. Blocks.

    Args:
        pipeline: Training, whose options and world size are read.
        codec: Codec to measure.
        sizes: Elements of the smaller and of the larger bucket.
        launches_s: (seconds to start the messages of the reduce half, the same of the gather half).
    """
    options, collectives = pipeline.options, pipeline.collectives
    # Seconds of the four operations with the smaller bucket, then with the larger one.
    own_s = [one_s for size in sizes for one_s in _own_seconds(pipeline, codec, size)]
    times_s = slowest(collectives, own_s)
    shards = [numel // collectives.world.size for numel in sizes]
    # In two hops (first within each host, then between hosts) a rank encodes and decodes only a
    # part of its host's sum: 1 / `together` of a bucket. So the size that was measured, with all
    # elements encoded, stands for a bucket that is `together` times as large.
    of_ranks = [[options.ranks_together(collectives) * size for size in sizes]] * 2
    lengths = enumerate((*of_ranks, shards, sizes))
    lines = (fitted_line(length, times_s[place::4]) for place, length in lengths)
    encode, decode_sum, encode_shard, decode = lines
    row = fitted_line(shards, [codec.wire_bytes(shard) for shard in shards])
    encode = replace(encode, alpha=encode.alpha + launches_s[0])
    encode_shard = replace(encode_shard, alpha=encode_shard.alpha + launches_s[1])
    # If not, parameters or mean gradients are gathered uncompressed.
    gathered = row if options.encodes_both and not codec.is_identity else None
    return CodecCost(encode, decode_sum, encode_shard, decode, row, gathered)


def fitted_line(sizes: Sequence[int], values: Sequence[float]) -> Linear:
    """Returns the line through two measured points, with alpha and beta of at least 0.

    If alpha would be negative, the line goes through the origin and the second point. If beta would
    be negative, the line is flat, with the value at the first point.

    Args:
        sizes: Elements at both points, ascending.
        values: Values at both points.
    """
    (small, large), (low, high) = sizes, values
    beta = max((high - low) / (large - small), 0.0)
    return Linear(0.0, high / large) if low < beta * small else Linear(low - beta * small, beta)


@torch.no_grad()
def _own_seconds(pipeline: Pipeline, codec: Codec, numel: int) -> list[float]:
    """Measures encoding and decoding of one bucket on this rank, without communication. Local.

    The code that runs is the exchange of the training, with new tensors. Only its collectives are
    replaced, by `_SilentCollectives`.

    Args:
        pipeline: Training whose options and device are used.
        codec: Codec to measure: the training's, or `Fp32` in place of it.
        numel: Elements of the bucket.

    Returns:
        Median seconds of four operations: to encode the bucket's gradients, to decode and sum them,
        to encode this rank's shard, and to decode what was gathered.
    """
    options, world = pipeline.options, pipeline.collectives.world
    like = pipeline.parts[0].parameters[0]
    clock, generator = clock_of(like.device), torch.Generator(like.device).manual_seed(world.rank)
    # Random values and not zeros, since a sparse codec would find no elements to select in zeros.
    noise = torch.randn(numel, device=like.device, generator=generator).to(like.dtype)
    tensor = TensorSpec(0, "probe", numel, like.element_size(), "probe", 0, 0)
    plan, parameters = NoFusion().plan([tensor], world.size), [torch.nn.Parameter(noise.clone())]
    role_of = partial(options.role_of, plan)
    flat = allocate(plan, parameters, role_of, world.rank, lambda _: 0, keeps_gradients=True)
    silent: Any = _SilentCollectives(pipeline.collectives)
    # `Fp32` is measured as a bucket that a plan leaves uncompressed. Such a bucket still has the
    # memory (residual) of the training's codec.
    left = (0,) if codec.is_identity else ()
    traffic = Traffic(silent, 0, flat, options.is_of_gradients, left)
    bucket, exchange = flat.buckets[0], new_exchange(options, [None], traffic)

    def exchanged() -> list[float]:
        marks: list[Any] = []

        def timed(run: Callable[[], T]) -> T:
            marks.append(clock.mark())
            returned = run()
            marks.append(clock.mark())
            return returned

        bucket.gradients.copy_(noise)
        work = timed(partial(exchange.launch_reduce, bucket))
        silent.deliver()
        timed(work.wait)
        # Stands in for the optimizer step. Without it, differences of parameters would be 0.
        bucket.shard.add_(bucket.mean, alpha=1e-3)
        work = timed(partial(exchange.launch_gather, bucket))
        silent.deliver()
        timed(work.wait)
        exchange.commit()
        moments = [clock.seconds(mark) for mark in marks]
        return [end - begin for begin, end in zip(moments[::2], moments[1::2], strict=True)]

    rounds = [exchanged() for _ in range(_NUM_REPEATS)][1:]
    return [median(times_s) for times_s in zip(*rounds, strict=True)]


class _SilentCollectives:
    """Stand-in for `Collectives` that sends nothing.

    It has the methods and attributes that exchanges of codecs use. A launch only stores its
    buffers. `deliver` then fills the receive buffers, as if every other rank had sent the same as
    this rank.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.world, self.scratch_numel = collectives.world, collectives.scratch_numel
        self.wait_blocks_host, self.hops, self.showing = True, 1, None
        self._sent: list[tuple[Tensor, Tensor]] = []

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        # If `received` is empty, the backend would sum, so that the host has no rows to sum.
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
        """Fills the receive buffers of all launches since the last call; see the class."""
        for sent, received in self._sent:
            received.copy_(sent)
        self._sent.clear()


_ROW_BYTES = 1024
"""Bytes of each message in `launch_seconds`. The time to start a message does not depend on its
size."""

_NUM_LAUNCHES = 20
"""How often the start of the messages of each half is measured. The median counts."""


def launch_seconds(pipeline: Pipeline) -> tuple[float, float]:
    """Measures the seconds to start an encoded bucket's messages, on the slowest rank.

    All ranks start their messages at the same time, since ranks of a host may share cores in
    training, too. Receives are posted in advance, as in training. The sent bytes do not count as
    those of the training. Collective and blocks on a CPU.

    Returns:
        (seconds in the reduce half, seconds in the gather half); the same on all ranks. On
        accelerators both are 0 and nothing is measured: there the host launches ahead of the
        device, so that the time to launch delays nothing.
    """
    collectives = pipeline.collectives
    if pipeline.parts[0].parameters[0].device.type != "cpu":
        return 0.0, 0.0
    shape = collectives.world.size, _ROW_BYTES
    rows, incoming = (torch.zeros(shape, dtype=torch.uint8) for _ in range(2))

    def started_s(
        expect: Callable[[Tensor, int], None], launch: Callable[..., Work], *buffers: Tensor
    ) -> float:
        """Starts the messages of one half, waits for them, and returns the seconds to start."""
        expect(buffers[-1], STATE_TAGS)
        # A barrier, so that all ranks launch at the same time.
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
