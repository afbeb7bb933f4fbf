"""Narrower floats: half the bytes, and errors that only the smallest numbers see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, Kind, field, padded_bytes


@dataclass(frozen=True, kw_only=True)
class Bf16(Codec):
    """Round to bfloat16: C(x) = x (1 + e), |e| <= 2^-9, in 2 bytes an element."""

    name: ClassVar[str] = "bf16"

    @property
    @override
    def kind(self) -> Kind:
        return "contractive"

    @property
    @override
    def block_size(self) -> int:
        return 1

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(2 * numel)

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        numel = rows.shape[1]
        wire[:, 2 * numel :].zero_()
        field(wire, torch.bfloat16, 0, numel).copy_(rows)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        rows.copy_(field(wire, torch.bfloat16, 0, rows.shape[1]))
