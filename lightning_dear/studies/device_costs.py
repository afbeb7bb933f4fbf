"""What compressors would cost on a device that is not here, from what they do there.

A kernel takes `kernel_s` to start, and its bytes at `bytes_per_s`. Kernels and bytes of codecs are
counted, by running them on tensors without memory; those of sparse all-reduces, whose work depends
on the numbers, are written down here.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_dear import compression
from lightning_dear.compression import Codec, Compressor, SparseAllReduce
from lightning_dear.planning import CodecCost, CodecCosts, Linear
from lightning_dear.planning.measured import NO_CODEC

_META = torch.device("meta")
_PASSES = {"topk": 5, "sort": 16}
"""How often an operation goes over its tensors, if not once: radixes go digit by digit."""

_OVERWRITING = ("copy_", "fill_", "zero_", "uniform_", "random_", "bernoulli_", "normal_")
"""What does not read the tensor that it writes."""

_FEW, _MANY = 1 << 14, 1 << 18
"""Elements of the two rows that are counted."""

_ADD_RESIDUAL, _KEEP_RESIDUAL = (2, 24.0), (1, 12.0)
"""Kernels, and bytes of each element: what was left is added; what arrives is taken off it."""

_SUM_BYTES = 12.0
"""Of each element, to add one rank's numbers to those of others: two are read, one is written."""

_NUDGES = 10
"""Of `Gaussiank`'s threshold: half of those it may make."""


@dataclass(frozen=True)
class Device:
    """How fast something computes that waits for memory.

    Attributes:
        kernel_s: Seconds that a kernel takes however little it does, the host's part included.
        bytes_per_s: That its memory reads and writes.
    """

    kernel_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.kernel_s < math.inf and 0 < self.bytes_per_s < math.inf):
            raise ValueError(
                "kernel_s must be finite and not negative, bytes_per_s finite and positive; got"
                f" {self.kernel_s} and {self.bytes_per_s}."
            )

    def work(self, kernels: float, bytes_per_element: float) -> Linear:
        """Seconds of so many kernels, of the elements that they go through."""
        return Linear(kernels * self.kernel_s, bytes_per_element / self.bytes_per_s)


def halves_costs(compressor: str | Compressor, device: Device, world_size: int) -> CodecCosts:
    """What it costs where gradients are summed by owners and spread by them, as ours does.

    Raises:
        ValueError: If it is unknown, or depends on more of a bucket than its size (PowerSGD).
    """
    made = _resolved(compressor)
    if made is None:
        return NO_CODEC
    if isinstance(made, SparseAllReduce):
        return CodecCosts(_sparse(made, device, world_size), may_plan=False)
    encode, decode, wire = _parts_of(made, device)
    if made.has_feedback:
        encode = total(encode, device.work(*_ADD_RESIDUAL), decode, device.work(*_KEEP_RESIDUAL))
    own = Linear(decode.alpha, decode.beta / world_size)
    sums = device.work(world_size - 1, _SUM_BYTES * (world_size - 1) / world_size)
    cost = CodecCost(
        encode=encode,
        decode_sum=own if made.is_summable else total(decode, sums),
        encode_shard=encode,
        decode=decode,
        reduce_bytes=wire,
        gather_bytes=wire,
        way="half" if made.is_summable else "to_owners",
    )
    return CodecCosts(cost)


def whole_costs(compressor: str | Compressor, device: Device, world_size: int) -> CodecCosts:
    """What it costs where every rank gets every rank's bytes, and decodes and sums them all.

    As GRACE and MergeComp do, and hooks of DDP. 16-bit numbers are summed on their way instead.

    Raises:
        ValueError: See `halves_costs`.
    """
    made = _resolved(compressor)
    if made is None:
        return NO_CODEC
    if isinstance(made, SparseAllReduce):
        return CodecCosts(_at_once(_sparse(made, device, world_size), world_size), may_plan=False)
    encode, decode, wire = _parts_of(made, device)
    if isinstance(made, compression.Bf16 | compression.Fp16):
        numbers = Linear(0.0, 2.0)
        return CodecCosts(CodecCost(encode, decode, reduce_bytes=numbers, way="all_reduce"))
    ours = halves_costs(made, device, world_size).compressed
    decodes = Linear(world_size * decode.alpha, world_size * decode.beta)
    sums = device.work(world_size - 1, _SUM_BYTES * (world_size - 1))
    cost = CodecCost(
        encode=ours.encode,
        decode_sum=total(decodes, sums),
        reduce_bytes=Linear(wire.alpha, world_size * wire.beta),
        gather_bytes=Linear(),
        way="all_gather",
    )
    return CodecCosts(cost)


def total(*parts: Linear) -> Linear:
    """One after the other."""
    return Linear(sum(one.alpha for one in parts), sum(one.beta for one in parts))


def _resolved(compressor: str | Compressor) -> Codec | SparseAllReduce | None:
    made = compression.resolve_compressor(compressor)
    if made is not None and made.halves != "both":
        raise ValueError(
            f"Costs are those of both halves, and {made.name} has halves={made.halves!r}; leave"
            " halves out."
        )
    if made is None or isinstance(made, Codec | SparseAllReduce):
        return made
    raise ValueError(
        f"What {made.name} costs depends on the shapes of tensors, which profiles do not tell."
    )


def _parts_of(codec: Codec, device: Device) -> tuple[Linear, Linear, Linear]:
    """A codec's own work, to encode and to decode elements, and their bytes."""
    generator = torch.Generator()
    few, many = (_counted(codec, numel, generator) for numel in (_FEW, _MANY))

    def line(place: int) -> Linear:
        beta = (many[place].nbytes - few[place].nbytes) / (_MANY - _FEW)
        return device.work(many[place].kernels, beta)

    small, large = codec.wire_bytes(_FEW), codec.wire_bytes(_MANY)
    beta = (large - small) / (_MANY - _FEW)
    return line(0), line(1), Linear(max(0.0, small - beta * _FEW), beta)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be kernels, and the bytes of their tensors."""

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
            # `out=` is written alone, and comes back as the result.
            read = args[1:] if name in _OVERWRITING else args
            moved = [one for one in tree_leaves((read, result)) if isinstance(one, Tensor)]
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
    """Words of 4 bytes that are read or written, of each element; k of n are selected.

    Accumulating takes 3, comparing and telling places 2, an exact threshold 5 more now and then. A
    sum reads and writes 3 for each number that has come; writing what has arrived into zeros takes
    1, and 3 for each number.
    """
    tau = getattr(made, "tau_prime", 0)
    select = 5 + (5 / tau if tau else 4 + _NUDGES)
    density = made.density
    if made.all_reduces:
        # Kernels, and words for each of the k numbers, with which a rank adds up what has come.
        rounds = (world_size - 1).bit_length()
        kernels, words = (6 * rounds, 10 * rounds) if made.is_tree else (world_size, 3 * world_size)
        adding = total(device.work(2, 4.0), device.work(kernels, 4 * words * density))
        # A rank in the middle waits for what comes up and then for what comes down.
        there_and_back = 2 if made.is_tree else 1
        travelling = there_and_back * _words_per_element(made, world_size)
        wire = Linear(0.0, 4 * travelling * world_size)
        starts = 2.0 * rounds if made.is_tree else None
        return CodecCost(
            encode=device.work(8 + (0 if tau else 3 + 2 * _NUDGES), 4 * select),
            decode_sum=adding,
            reduce_bytes=wire,
            gather_bytes=Linear(),
            reduce_starts=starts,
            way="all_gather",
        )
    half = Linear(0.0, 4 * _words_per_element(made, world_size) * world_size / 2)
    return CodecCost(
        encode=device.work(8, 4 * select),
        decode_sum=device.work(world_size, 4 * 3 * density),
        encode_shard=device.work(6, 4 * 3.0),
        decode=device.work(2, 4 * (1 + 3 * density)),
        reduce_bytes=half,
        gather_bytes=half,
        way="to_owners",
    )


def _at_once(cost: CodecCost, world_size: int) -> CodecCost:
    """The same where nothing is done between the halves but what has to be."""
    if cost.way == "all_gather":
        return cost
    shard = cost.encode_shard
    publish = Linear(shard.alpha, shard.beta / world_size)
    summed, nothing = total(cost.decode_sum, publish, cost.decode), Linear()
    return replace(cost, decode_sum=summed, encode_shard=nothing, decode=nothing, way="both_halves")


def _words_per_element(made: SparseAllReduce, world_size: int) -> float:
    """As a buffer of which each rank sends (P - 1) / P, of a bucket's elements."""
    if world_size == 1:
        return 0.0
    numel = 1 << 24
    return made.usual_words(numel, world_size) / numel / (world_size - 1)
