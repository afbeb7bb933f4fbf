"""Narrower floats: half the bytes, and errors that only the smallest numbers see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, field, padded_bytes
from lightning_dear.compression.compressor import Kind, Lag
from lightning_dear.compression.tiling import tiles


class _Float(Codec):
    """Each number for itself, as a float of some width."""

    @property
    @override
    def kind(self) -> Kind:
        return "contractive"

    @property
    @override
    def lag(self) -> Lag:
        return "small"

    @property
    @override
    def block_size(self) -> int:
        return 1


class _HalfFloat(_Float):
    """Round to a float of 16 bits, and to its largest finite number what lies beyond that.

    Wire: [numel x 2 bytes | zeros to a multiple of 4].
    """

    _dtype: ClassVar[torch.dtype]

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(2 * numel)

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        numel, largest = rows.shape[1], torch.finfo(self._dtype).max
        wire[:, 2 * numel :].zero_()
        narrow = field(wire, self._dtype, 0, numel)
        if rows.device.type != "cpu":
            # Without a temporary as large as the rows, and without waiting for the device.
            narrow.copy_(rows).clamp_(-largest, largest)
            return
        for tile, place in tiles(rows, narrow):
            place.copy_(tile)
            # Finite only if all addends are: half the time of a clamp, which few tiles need.
            if not math.isfinite(place.sum().item()):
                place.copy_(tile.clamp(-largest, largest))

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        rows.copy_(field(wire, self._dtype, 0, rows.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Fp32(_Float):
    """Numbers as they are: C(x) = x, for steps and tensors that a compressor leaves out.

    Wire: [numel x 4 bytes].
    """

    name: ClassVar[str] = "fp32"
    is_identity: ClassVar[bool] = True

    @override
    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        field(wire, torch.float32, 0, rows.shape[1]).copy_(rows)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        rows.copy_(field(wire, torch.float32, 0, rows.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Bf16(_HalfFloat):
    """Round to bfloat16: C(x) = x (1 + e), |e| <= 2^-8, in 2 bytes an element.

    The range is that of fp32 (Kalamkar et al. 2019, "A study of BFLOAT16 for deep learning
    training"). Below 2^-126 the error is at most 2^-134.
    """

    name: ClassVar[str] = "bf16"
    _dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Fp16(_HalfFloat):
    """Round to IEEE half precision: C(x) = x (1 + e), |e| <= 2^-11, in 2 bytes an element.

    That holds from 2^-14 to 65504. Below, the error is at most 2^-25, so that smaller numbers are
    lost, which is why Micikevicius et al. 2018, "Mixed precision training", scale losses; beyond,
    65504 is sent. Error feedback makes good for both where it happens now and then.
    """

    name: ClassVar[str] = "fp16"
    largest: ClassVar[float] = torch.finfo(torch.float16).max
    _dtype: ClassVar[torch.dtype] = torch.float16
