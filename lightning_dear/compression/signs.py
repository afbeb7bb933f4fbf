"""One bit an element: signs, and what a block of them is scaled by.

Every bit is 1 where x < 0, so that zero, of either sign, counts as positive. Scales belong to
blocks, not to buckets: merging tensors of different scale then costs no accuracy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.bits import pack_bits, unpack_bits
from lightning_dear.compression.blocks import BlockCodec
from lightning_dear.compression.codec import Codec, padded_bytes
from lightning_dear.compression.compressor import Kind, Lag
from lightning_dear.compression.tiling import BLOCK_SIZES, Scratch, block_tiles

_LARGEST = torch.finfo(torch.float32).max


class _BlockSigns(BlockCodec):
    """Signs, and scales for the blocks; what the scales are is up to subclasses.

    A bit is 1 where x_i < 0.
    """

    _bits: ClassVar[int] = 1

    @property
    @override
    def kind(self) -> Kind:
        return "contractive"

    @property
    @override
    def lag(self) -> Lag:
        return "large"

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        self._clear_padding(rows, wire)
        scratch = Scratch(1)
        for tile, packed, scales in self._tiles(rows, wire):
            (negative,) = scratch.like(tile)
            _pack(torch.lt(tile, 0, out=negative), packed)
            self._measure(tile, negative, scales)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        scratch = Scratch(1)
        for tile, packed, scales in self._tiles(rows, wire):
            self._scale(unpack_bits(packed, tile.shape[2]), scales, tile, scratch)

    @abstractmethod
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        """Write the scales [r, b, num_statistics] of [r, b, elements].

        `negative` is 1 where an element is less than zero, otherwise 0; fp32, may be changed.
        """

    @abstractmethod
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: Scratch) -> None:
        """Write what elements decode to; `negative` is uint8 and may be changed."""


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(_BlockSigns):
    """C(x) = mean|x| sign(x) for each block of B: 32 B / (B + 32) times fewer bytes than fp32.

    |C(x) - x|^2 = (1 - d) |x|^2 with d = |x|_1^2 / (n |x|_2^2) in each block of n elements
    (Karimireddy et al. 2019, "Error feedback fixes SignSGD", section 4). A mean is a sum of
    |x| / n, which cannot overflow but loses digits below n 2^-126. There d is smaller, though still
    not negative.

    Args:
        block_size: B, elements that share a mean: a multiple of 8 from 8 to 65536.
    """

    name: ClassVar[str] = "efsignsgd"
    block_size: int = 1024

    @override
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        parts = torch.abs(tile, out=negative).mul_(1 / tile.shape[2])
        # Rounding may carry the mean of the largest numbers beyond all of them.
        scales.copy_(parts.sum(2, keepdim=True).clamp_(max=_LARGEST))

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: Scratch) -> None:
        tile.copy_(_signs(negative)).mul_(scales)


@dataclass(frozen=True, kw_only=True)
class OneBit(_BlockSigns):
    """The mean of the numbers below zero, or that of the others, for each block of B.

    32 B / (B + 64) times fewer bytes than fp32. With N the sum of the c numbers below zero and P
    that of the n - c others, |C(x) - x|^2 = |x|^2 - N^2 / c - P^2 / (n - c) in each block: never
    more than with `EFSignSGD` (Seide et al. 2014, "1-bit stochastic gradient descent", section 3).
    Below n 2^-126 digits are lost, as there.

    Args:
        block_size: B, elements that share two means: a multiple of 8 from 8 to 65536.
    """

    name: ClassVar[str] = "onebit"
    _num_statistics: ClassVar[int] = 2

    block_size: int = 2048

    @override
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        numel = tile.shape[2]
        count = negative.sum(2)
        below = torch.clamp(tile, max=0, out=negative).mul_(1 / numel).sum(2)
        others = torch.clamp(tile, min=0, out=negative).mul_(1 / numel).sum(2)
        # Of none, the mean is defined as zero.
        below.mul_(numel / count.clamp(min=1)).clamp_(min=-_LARGEST)
        others.mul_(numel / (numel - count).clamp_(min=1)).clamp_(max=_LARGEST)
        torch.stack((below, others), 2, out=scales)

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: Scratch) -> None:
        # Not a `where`, which on a CPU takes ten times as long; nor a `lerp`, which overflows.
        (others,) = scratch.like(tile)
        tile.copy_(negative)
        torch.sub(1, tile, out=others).mul_(scales[..., 1:])
        tile.mul_(scales[..., :1]).add_(others)


@dataclass(frozen=True, kw_only=True)
class SignSGD(Codec):
    """The sign of each number, for a majority vote: C(x) = -1 where x < 0, otherwise +1.

    So the sign of zero is +1, and with an even number of voters so is a tie. There is no scale: the
    learning rate is the size of a step. 32 times fewer bytes than fp32 (Bernstein et al. 2018,
    "signSGD", section 2, and "signSGD with majority vote").

    Wire: [bit i is x_i < 0 | zeros to a multiple of 4].
    """

    name: ClassVar[str] = "signsgd"

    @property
    @override
    def kind(self) -> Kind:
        return "vote"

    @property
    @override
    def block_size(self) -> int:
        return 1

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(_packed_bytes(numel))

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, _packed_bytes(rows.shape[1]) :].zero_()
        scratch = Scratch(1)
        for tile, packed in self._tiles(rows, wire):
            (negative,) = scratch.like(tile)
            _pack(torch.lt(tile, 0, out=negative), packed)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, packed in self._tiles(rows, wire):
            tile.copy_(_signs(unpack_bits(packed, tile.shape[2])))

    def _tiles(self, rows: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """[r, b, elements] of `rows` and [r, b, bytes] of bits."""
        packed = wire[:, : _packed_bytes(rows.shape[1])]
        return block_tiles(rows, packed, block_size=BLOCK_SIZES[0], bits=1)


@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """`SignSGD` of a running mean of the gradients, m = momentum m + (1 - momentum) g.

    The exchange keeps m, before it encodes; the codec holds the option only. To be paired with an
    optimizer without momentum (Bernstein et al. 2018, "signSGD", algorithm 2).

    Args:
        momentum: What remains of m in a step, in [0, 1).
    """

    name: ClassVar[str] = "signum"

    momentum: float = 0.9

    @property
    @override
    def brings_momentum(self) -> bool:
        return True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of signum must be in [0, 1), got {self.momentum!r}.")


def _packed_bytes(numel: int) -> int:
    return -(-numel // 8)


def _pack(negative: Tensor, packed: Tensor) -> None:
    """Write fp32 that is 0 or 1; of the types between, a CPU is slow at bool and at uint8."""
    pack_bits(negative.to(torch.int8).view(torch.uint8), packed)


def _signs(negative: Tensor) -> Tensor:
    """-1 or +1 in int8 for 1 or 0 in uint8, which are overwritten."""
    return negative.view(torch.int8).mul_(-2).add_(1)
