"""Predicts the cost of compressors on a device that is not here, from their kernels and bytes.

A kernel takes `kernel_s` to start, and moves its bytes at `bytes_per_s`. Kernels and bytes of
codecs are counted by running them on meta tensors. The work of sparse all-reduces depends on
values, so their kernels and bytes are constants in this file.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_dear import compression
from lightning_dear.compression import Codec, Compressor, SparseAllReduce
from lightning_dear.planning.measured import NO_CODEC, CodecCost, CodecCosts, Linear
from lightning_dear.simulator import Workload
from lightning_dear.telemetry.clock import clock_of

_META = torch.device("meta")
_PASSES = {"topk": 5, "sort": 16}
"""Operation -> number of passes over its tensors, if not 1: a radix sort has one for each digit."""

_OVERWRITING = ("copy_", "fill_", "zero_", "uniform_", "random_", "bernoulli_", "normal_")
"""In-place operations that do not read the tensor they write."""

AS_GOOD = ("bf16", "int8")
"""Compressors with which, in recipes/compression, trainings ended as well as without one."""

_FEW, _MANY = 1 << 14, 1 << 18
"""Numbers of elements of the two rows on which kernels and bytes are counted."""

_ADD_RESIDUAL, _KEEP_RESIDUAL = (2, 24.0), (1, 12.0)
"""Kernels, and bytes for each element, of error feedback: to add the residual to the gradient; and
to subtract the decoded message, which leaves the next residual."""

_SUM_BYTES = 12.0
"""Bytes for each element to add one rank's values to a sum: two fp32 are read, one is written."""

_NUDGES = 10
"""Assumed number of corrections of `Gaussiank`'s threshold: half of the most that it makes."""

_NUM_REPEATS = 5
"""How often a measured codec encodes and decodes, after a warm-up."""

_GATHERED = CodecCost(gather_bytes=Linear(), way="all_gather")
"""Cost of no work, if every rank gets every rank's message: nothing is left for the second half."""


@dataclass(frozen=True)
class Device:
    """Speed of a device whose kernels are limited by memory.

    Attributes:
        kernel_s: Least seconds of a kernel, the launch by the host included.
        bytes_per_s: Bytes that its memory reads and writes in a second.
    """

    kernel_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.kernel_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ValueError(
                f"kernel_s={self.kernel_s} or bytes_per_s={self.bytes_per_s} is not valid. kernel_s"
                " must be finite and not negative, bytes_per_s finite and positive."
            )

    def work(self, kernels: float, bytes_per_element: float) -> Linear:
        """Return the seconds of `kernels` kernels as a linear function of the elements."""
        return Linear(kernels * self.kernel_s, bytes_per_element / self.bytes_per_s)


def measured_device(codec: Codec, device: torch.device) -> Device:
    """Return the speed with which a device, such as this CPU, encodes and decodes. Local. Blocks.

    Two sizes are measured, for some milliseconds. No random number of the training is drawn.
    """
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for numel in (_FEW, 1 << 22):
        rows = torch.randn(1, numel, device=device, generator=generator)
        wire = torch.empty(1, codec.wire_bytes(numel), dtype=torch.uint8, device=device)
        clock, marks = clock_of(device), []
        for _ in range(1 + _NUM_REPEATS):
            marks.append(clock.mark())
            codec.encode(rows, wire, generator)
            codec.decode(wire, rows, generator)
        seconds = [clock.seconds(one) for one in (*marks, clock.mark())]
        both = _counted(codec, numel, torch.Generator())
        counted = sum(one.kernels for one in both), sum(one.nbytes for one in both)
        found.append((*counted, median(b - a for a, b in pairwise(seconds[1:]))))
    (kernels, few, few_s), (_, many, many_s) = found
    # On a busy machine the smaller one may take as long.
    rate = (many - few) / (many_s - few_s) if many_s > 2 * few_s else many / many_s
    return Device(max(few_s - few / rate, 0.0) / kernels, rate)


def halves_costs(compressor: str | Compressor, device: Device, world_size: int) -> CodecCosts:
    """Return the costs of a compressor if owners sum gradients and send the sums to all ranks.

    `strategy="dear"` works this way.

    Raises:
        ValueError: If the compressor is unknown, does not encode both halves, or its cost depends
            on the shapes of tensors (PowerSGD).
    """
    if (made := _resolved(compressor)) is None:
        return NO_CODEC
    if isinstance(made, SparseAllReduce):
        return CodecCosts(_sparse(made, device, world_size), may_plan=False)
    encode, decode, wire = _parts_of(made, device)
    if made.has_feedback:
        encode = total(encode, device.work(*_ADD_RESIDUAL), decode, device.work(*_KEEP_RESIDUAL))
    if made.is_summable:
        own = Linear(decode.alpha, decode.beta / world_size)
        return CodecCosts(CodecCost(encode, own, encode, decode, wire, wire))
    sums = device.work(world_size - 1, _SUM_BYTES * (world_size - 1) / world_size)
    summed = total(decode, sums)
    return CodecCosts(CodecCost(encode, summed, encode, decode, wire, wire, way="to_owners"))


def whole_costs(compressor: str | Compressor, device: Device, world_size: int) -> CodecCosts:
    """Return the costs if every rank gets every rank's message, and decodes and sums all of them.

    GRACE, MergeComp and DDP's hooks work this way. 16-bit compressors are all-reduced instead.

    Raises:
        ValueError: In the same cases as `halves_costs`.
    """
    if (made := _resolved(compressor)) is None:
        return NO_CODEC
    if isinstance(made, SparseAllReduce):
        return CodecCosts(_at_once(_sparse(made, device, world_size), world_size), may_plan=False)
    encode, decode, wire = _parts_of(made, device)
    if isinstance(made, compression.Bf16 | compression.Fp16):
        numbers = Linear(0.0, 2.0)
        return CodecCosts(CodecCost(encode, decode, reduce_bytes=numbers, way="all_reduce"))
    ours = halves_costs(made, device, world_size).compressed
    decodes = Linear(world_size * decode.alpha, world_size * decode.beta)
    summed = total(decodes, device.work(world_size - 1, _SUM_BYTES * (world_size - 1)))
    sent = Linear(wire.alpha, world_size * wire.beta)
    return CodecCosts(replace(_GATHERED, encode=ours.encode, decode_sum=summed, reduce_bytes=sent))


def compressed(
    workload: Workload, compressor: str | Compressor, device: Device, world_size: int
) -> Workload:
    """Return `workload` with the cost of a compressor on `device`.

    Raises:
        ValueError: If the compressor is unknown, or its kernels cannot be counted.
    """
    halves, whole = (of(compressor, device, world_size) for of in (halves_costs, whole_costs))
    name = compressor if isinstance(compressor, str) else compressor.name
    return replace(workload, codecs=halves, whole_codecs=whole, compressor=name)


def total(*parts: Linear) -> Linear:
    """Return the cost of all parts, one after the other."""
    return Linear(sum(one.alpha for one in parts), sum(one.beta for one in parts))


def _resolved(compressor: str | Compressor) -> Codec | SparseAllReduce | None:
    made = compression.resolve_compressor(compressor)
    if made is not None and made.halves != "both":
        raise ValueError(
            f"{made.name} has halves={made.halves!r}, of which the cost is unknown. Leave halves"
            " out. Only costs of both halves are counted."
        )
    if made is None or isinstance(made, Codec | SparseAllReduce):
        return made
    raise ValueError(
        f"The cost of {made.name} depends on the shapes of tensors. Leave it out of compressors."
    )


def _parts_of(codec: Codec, device: Device) -> tuple[Linear, Linear, Linear]:
    """Return a codec's own cost to encode and to decode, and its bytes, all by the elements."""
    few, many = (_counted(codec, numel, torch.Generator()) for numel in (_FEW, _MANY))

    def line(place: int) -> Linear:
        beta = (many[place].nbytes - few[place].nbytes) / (_MANY - _FEW)
        return device.work(many[place].kernels, beta)

    small, large = codec.wire_bytes(_FEW), codec.wire_bytes(_MANY)
    beta = (large - small) / (_MANY - _FEW)
    return line(0), line(1), Linear(max(0.0, small - beta * _FEW), beta)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that would be kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0
        self.nbytes = 0.0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not name.startswith("empty") and not func.is_view:
            self.kernels += 1
            # A tensor given as `out=` is only written; it is counted as the result.
            read = args[1:] if name in _OVERWRITING else args
            moved = [one for one in tree_leaves((read, result)) if isinstance(one, torch.Tensor)]
            self.nbytes += _PASSES.get(name, 1) * sum(one.nbytes for one in moved)
        return result


def _counted(codec: Codec, numel: int, generator: torch.Generator) -> tuple[_Counter, _Counter]:
    rows = torch.empty(1, numel, device=_META)
    wire = torch.empty(1, codec.wire_bytes(numel), dtype=torch.uint8, device=_META)
    with _Counter() as encoding:
        codec.encode(rows, wire, generator)
    with _Counter() as decoding:
        codec.decode(wire, rows, generator)
    return encoding, decoding


# --- sparse all-reduces ---------------------------------------------------------------------------


def _sparse(made: SparseAllReduce, device: Device, world_size: int) -> CodecCost:
    """Return the cost of a sparse all-reduce, which selects k of a bucket's n elements.

    Counted in words of 4 bytes that are read or written. For each of the n elements, adding the
    residual takes 3, comparing with the threshold and finding indices 2, and an exact threshold,
    which is not computed in each step, 5 more. Summing takes 3 for each received value. Writing
    received values into zeros takes 1 for each element, and 3 for each value.
    """
    tau = getattr(made, "tau_prime", 0)
    select = 5 + (5 / tau if tau else 4 + _NUDGES)
    density = made.density
    if made.all_reduces:
        # Kernels, and words for each of the k values, with which a rank sums received messages.
        rounds = (world_size - 1).bit_length()
        kernels, words = (6 * rounds, 10 * rounds) if made.is_tree else (world_size, 3 * world_size)
        adding = total(device.work(2, 4.0), device.work(kernels, 4 * words * density))
        # In a tree the sum travels up, and then down again to all ranks.
        there_and_back, starts = (2, 2.0 * rounds) if made.is_tree else (1, None)
        wire = Linear(0.0, 4 * there_and_back * _words_per_element(made, world_size) * world_size)
        encode = device.work(8 + (0 if tau else 3 + 2 * _NUDGES), 4 * select)
        gathered = replace(_GATHERED, reduce_bytes=wire, reduce_starts=starts)
        return replace(gathered, encode=encode, decode_sum=adding)
    half = Linear(0.0, 4 * _words_per_element(made, world_size) * world_size / 2)
    encode, decode_sum = device.work(8, 4 * select), device.work(world_size, 4 * 3 * density)
    encode_shard, decode = device.work(6, 4 * 3.0), device.work(2, 4 * (1 + 3 * density))
    return CodecCost(encode, decode_sum, encode_shard, decode, half, half, way="to_owners")


def _at_once(cost: CodecCost, world_size: int) -> CodecCost:
    """Return `cost` with all work after the reduce half moved into `decode_sum`.

    For strategies that run both halves as one exchange, with no other work between them.
    """
    if cost.way == "all_gather":
        return cost
    shard = cost.encode_shard
    publish = Linear(shard.alpha, shard.beta / world_size)
    summed, nothing = total(cost.decode_sum, publish, cost.decode), Linear()
    return replace(cost, decode_sum=summed, encode_shard=nothing, decode=nothing, way="both_halves")


def _words_per_element(made: SparseAllReduce, world_size: int) -> float:
    """Return words sent for each element of a bucket, over P - 1 for P ranks; 0 at one rank.

    So a buffer of P times as many words, of which a rank sends (P - 1) / P, is equivalent.
    """
    if world_size == 1:
        return 0.0
    numel = 1 << 24
    return made.usual_words(numel, world_size) / numel / (world_size - 1)
