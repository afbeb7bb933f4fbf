"""Codecs that send each value as a float, of 16 bits (half the bytes) or of 32 bits (unchanged)."""

import math
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression import blocks, codec


class _Float(codec.Codec):
    """Base of codecs that send each value by itself, as a float of `wire_dtype`.

    Bytes of a row: the floats, then zeros up to a multiple of 4 bytes.
    """

    kind: ClassVar[codec.Kind] = "contractive"
    lag: ClassVar[codec.Lag] = "small"
    block_size: ClassVar[int] = 1
    wire_dtype: ClassVar[torch.dtype]

    @override
    def wire_bytes(self, numel: int) -> int:
        return codec.padded_bytes(self.wire_dtype.itemsize * numel)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        rows.copy_(codec.field(wire, self.wire_dtype, 0, rows.shape[1]))


class _HalfFloat(_Float):
    """Base of codecs that round to a 16-bit float.

    Values beyond its range become its largest finite value, with their sign; nan stays nan.
    """

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        numel, largest = rows.shape[1], torch.finfo(self.wire_dtype).max
        wire[:, 2 * numel :].zero_()
        narrow = codec.field(wire, self.wire_dtype, 0, numel)
        if rows.device.type != "cpu":
            # Clamped in place: there is no temporary as large as the rows, and the host does not
            # wait for the device, as it would for the sum below.
            narrow.copy_(rows).clamp_(-largest, largest)
            return
        for tile, place in blocks.tiles(rows, narrow):
            place.copy_(tile)
            # If the sum is finite, all values are. Then the tile needs no clamp, which would take
            # twice as long as the sum.
            if not math.isfinite(place.sum().item()):
                place.copy_(tile.clamp(-largest, largest))


class Fp32(_Float):
    """Sends fp32 values unchanged: C(x) = x.

    For tensors or steps that are not to be compressed in a training that has a compressor.
    """

    name: ClassVar[str] = "fp32"
    is_identity: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        codec.field(wire, self.wire_dtype, 0, rows.shape[1]).copy_(rows)


class Bf16(_HalfFloat):
    """Rounds to bfloat16: C(x) = x (1 + e), |e| <= 2^-8, in 2 bytes an element.

    The range of values is that of fp32 (Kalamkar et al. 2019, "A study of BFLOAT16 for deep
    learning training"). If |x| is below 2^-126, the bound for e does not hold, but
    |C(x) - x| <= 2^-134. Values that would round to infinity become the largest finite value.
    """

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16


class Fp16(_HalfFloat):
    """Rounds to IEEE half precision: C(x) = x (1 + e), |e| <= 2^-11, in 2 bytes an element.

    The bound holds for |x| from 2^-14 to 65504. If |x| is smaller, |C(x) - x| <= 2^-25, and an |x|
    up to 2^-25 becomes 0. That is why Micikevicius et al. 2018, "Mixed precision training", scale
    losses. In place of larger values 65504 is sent, with the sign of x. Error feedback sends the
    lost rest later, which suffices if losses are rare. With feedback and without a loss scale a
    value beyond 2 x 65504 counts as inf, since the rest of a spike of 1e8 would take 1500 steps to
    send. With a loss scale a value beyond 65504 does.
    """

    name: ClassVar[str] = "fp16"
    largest: ClassVar[float] = torch.finfo(torch.float16).max
    overflows: ClassVar[str] = (
        " Values beyond 2 x 65504 count as inf, too; compressor='bf16' has the range of fp32."
    )
    wire_dtype: ClassVar[torch.dtype] = torch.float16
