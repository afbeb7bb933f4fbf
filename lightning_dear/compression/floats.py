"""Narrower floats: half the bytes, and errors that only the smallest numbers see."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.blocks import tiles
from lightning_dear.compression.codec import Codec, Kind, Lag, field, padded_bytes


class _Float(Codec):
    """Each number for itself, as a float of some width.

    Wire: [numel x the float's bytes | zeros to a multiple of 4].
    """

    kind: ClassVar[Kind] = "contractive"
    lag: ClassVar[Lag] = "small"
    block_size: ClassVar[int] = 1
    wire_dtype: ClassVar[torch.dtype]

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(self.wire_dtype.itemsize * numel)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        rows.copy_(field(wire, self.wire_dtype, 0, rows.shape[1]))


class _HalfFloat(_Float):
    """Round to a float of 16 bits, and to its largest finite number what lies beyond that."""

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        numel, largest = rows.shape[1], torch.finfo(self.wire_dtype).max
        wire[:, 2 * numel :].zero_()
        narrow = field(wire, self.wire_dtype, 0, numel)
        if rows.device.type != "cpu":
            # Without a temporary as large as the rows, and without waiting for the device.
            narrow.copy_(rows).clamp_(-largest, largest)
            return
        for tile, place in tiles(rows, narrow):
            place.copy_(tile)
            # Finite only if all addends are: half the time of a clamp, which few tiles need.
            if not math.isfinite(place.sum().item()):
                place.copy_(tile.clamp(-largest, largest))


@dataclass(frozen=True, kw_only=True)
class Fp32(_Float):
    """Sends numbers as they are: C(x) = x, for what a compressor leaves out."""

    name: ClassVar[str] = "fp32"
    is_identity: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        field(wire, self.wire_dtype, 0, rows.shape[1]).copy_(rows)


@dataclass(frozen=True, kw_only=True)
class Bf16(_HalfFloat):
    """Round to bfloat16: C(x) = x (1 + e), |e| <= 2^-8, in 2 bytes an element.

    The range is that of fp32 (Kalamkar et al. 2019, "A study of BFLOAT16 for deep learning
    training"). Below 2^-126 the error is at most 2^-134.
    """

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Fp16(_HalfFloat):
    """Round to IEEE half precision: C(x) = x (1 + e), |e| <= 2^-11, in 2 bytes an element.

    That holds from 2^-14 to 65504. Below, the error is at most 2^-25, so that smaller numbers are
    lost, which is why Micikevicius et al. 2018, "Mixed precision training", scale losses; beyond,
    65504 is sent. Error feedback makes good for both where it happens now and then. With it, a
    number beyond twice 65504 counts as inf: a spike of 1e8 would be sent for 1500 steps.
    """

    name: ClassVar[str] = "fp16"
    largest: ClassVar[float] = torch.finfo(torch.float16).max
    overflows: ClassVar[str] = (
        " Numbers beyond twice 65504 count as inf: 'bf16' has the range of fp32."
    )
    wire_dtype: ClassVar[torch.dtype] = torch.float16
