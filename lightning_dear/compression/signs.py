"""Codecs that send one bit for each element, its sign, and perhaps scales for each block.

A bit is 1 where x < 0, so that zero, of either sign, counts as positive. Scales belong to blocks,
not to buckets: fusing tensors of different scale into one bucket then costs no accuracy.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.bits import pack_bits, unpack_bits
from lightning_dear.compression.blocks import BLOCK_SIZES, BlockCodec, Tiles, block_tiles
from lightning_dear.compression.codec import Codec, Kind, padded_bytes
from lightning_dear.compression.error_feedback import Memory

_LARGEST = torch.finfo(torch.float32).max


class _BlockSigns(BlockCodec):
    """Base of codecs that send signs and statistics of each block; subclasses choose these.

    Bit i of a row is 1 where x_i < 0.
    """

    kind: ClassVar[Kind] = "contractive"
    _bits: ClassVar[int] = 1
    _num_scratch: ClassVar[int] = 0
    """Number of temporary tensors that decoding a tile needs."""

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, self._ends(rows.shape[1])[1] :].zero_()
        for tile, packed, scales, negative in self._tiles(rows, wire, num_scratch=1):
            _pack(torch.lt(tile, 0, out=negative), packed)
            self._measure(tile, negative, scales)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, packed, scales, *scratch in self._tiles(rows, wire, self._num_scratch):
            self._scale(unpack_bits(packed, tile.shape[2]), scales, tile, scratch)

    @abstractmethod
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        """Writes the statistics of each block into `scales`.

        Args:
            tile: [r, b, elements of a block]; not mutated.
            negative: 1 where an element is less than zero, 0 elsewhere, in fp32; may be changed.
            scales: [r, b, num_statistics]; overwritten.
        """

    @abstractmethod
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        """Writes decoded elements into `tile`; `negative` is uint8 (0 or 1), and may be changed."""


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(_BlockSigns):
    """Sends C(x) = mean|x| sign(x) for each block: 32 B / (B + 32) times fewer bytes than fp32.

    |C(x) - x|^2 = (1 - d) |x|^2 with d = |x|_1^2 / (n |x|_2^2) in each block of n elements
    (Karimireddy et al. 2019, "Error feedback fixes SignSGD", section 4). The mean is computed as
    the sum of |x| / n, which cannot overflow. It loses digits where |x| is below n 2^-126; there d
    is smaller, though not negative.

    Args:
        block_size: B, number of elements that share a mean: a multiple of 8 from 8 to 65536. The
            default is 1024.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "efsignsgd"
    block_size: int = 1024

    @override
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        parts = torch.abs(tile, out=negative).mul_(1 / tile.shape[2])
        # Rounding may make the mean of the largest fp32 numbers overflow.
        scales.copy_(parts.sum(2, keepdim=True).clamp_(max=_LARGEST))

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        tile.copy_(_signs(negative)).mul_(scales)


@dataclass(frozen=True, kw_only=True)
class OneBit(_BlockSigns):
    """Sends two means for each block of B elements: of those below zero, and of all others.

    A bit says which of the block's two means an element decodes to, in 32 B / (B + 64) times fewer
    bytes than fp32. With N the sum of the c elements below zero and P the sum of the n - c others,
    |C(x) - x|^2 = |x|^2 - N^2 / c - P^2 / (n - c) in each block. That is never more than with
    `EFSignSGD` (Seide et al. 2014, "1-bit stochastic gradient descent", section 3). Where |x| is
    below n 2^-126, means lose digits.

    Args:
        block_size: B, number of elements that share two means: a multiple of 8 from 8 to 65536.
            The default is 2048.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "onebit"
    _num_statistics: ClassVar[int] = 2
    _num_scratch: ClassVar[int] = 1

    block_size: int = 2048

    @override
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        numel = tile.shape[2]
        count = negative.sum(2)
        below = torch.clamp(tile, max=0, out=negative).mul_(1 / numel).sum(2)
        others = torch.clamp(tile, min=0, out=negative).mul_(1 / numel).sum(2)
        # The mean of no elements is 0.
        below.mul_(numel / count.clamp(min=1)).clamp_(min=-_LARGEST)
        others.mul_(numel / (numel - count).clamp_(min=1)).clamp_(max=_LARGEST)
        torch.stack((below, others), 2, out=scales)

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        # `where` takes ten times as long on a CPU, and `lerp` may overflow.
        tile.copy_(negative)
        others = torch.sub(1, tile, out=scratch[0]).mul_(scales[..., 1:])
        tile.mul_(scales[..., :1]).add_(others)


@dataclass(frozen=True, kw_only=True)
class SignSGD(Codec):
    """Sends the sign of each element, for a vote: C(x) = -1 where x < 0, otherwise +1.

    Each rank sends signs, the owner adds them up, and the sign of the sum comes back. The sign of 0
    is +1; so is a tie of an even number of ranks. There is no scale: the learning rate is the size
    of each element's step. 32 times fewer bytes than fp32 (Bernstein et al. 2018, "signSGD",
    section 2, and "signSGD with majority vote").

    Wire: [bit i is x_i < 0 | zeros to a multiple of 4].

    Args:
        halves: "both" (the default), or "reduce": then the mean of the signs comes back.
        error_feedback: Must not be True, since errors of votes are not kept.
    """

    name: ClassVar[str] = "signsgd"
    kind: ClassVar[Kind] = "vote"
    block_size: ClassVar[int] = 1

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(_packed_bytes(numel))

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, _packed_bytes(rows.shape[1]) :].zero_()
        for tile, packed, negative in self._tiles(rows, wire, num_scratch=1):
            _pack(torch.lt(tile, 0, out=negative), packed)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, packed in self._tiles(rows, wire):
            tile.copy_(_signs(unpack_bits(packed, tile.shape[2])))

    def _tiles(self, rows: Tensor, wire: Tensor, num_scratch: int = 0) -> Tiles:
        """Yields tiles of rows [r, b, elements], bits [r, b, bytes], temporaries like the rows."""
        packed, size = wire[:, : _packed_bytes(rows.shape[1])], BLOCK_SIZES[0]
        return block_tiles(rows, packed, block_size=size, bits=1, num_scratch=num_scratch)


@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """Sends the signs of a running mean, m = momentum m + (1 - momentum) g, for a vote.

    A `RunningMean` keeps m on each rank. Votes are counted as in `SignSGD`. The optimizer must have
    no momentum (Bernstein et al. 2018, "signSGD", algorithm 2).

    Args:
        momentum: Factor by which m decays in each step, in [0, 1). The default is 0.9.
        halves: See `SignSGD`.
        error_feedback: Must not be True, since errors of votes are not kept.
    """

    name: ClassVar[str] = "signum"
    brings_momentum: ClassVar[bool] = True

    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of signum must be in [0, 1), got {self.momentum!r}.")

    @property
    @override
    def takes_weight_decay(self) -> bool:
        # A vote is +1 or -1 with any momentum, so that weight decay always weighs the same.
        return True

    @override
    def worker_memory(self, numel: int, device: torch.device) -> Memory:
        return RunningMean(numel, device, momentum=self.momentum)


class RunningMean(Memory):
    """Keeps Signum's running mean, m = momentum m + (1 - momentum) g, whose signs are sent.

    Bernstein et al. 2018, "signSGD", algorithm 2.
    """

    names: ClassVar[tuple[str, ...]] = ("running_mean",)

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        # Only the first round of a step decays m; later rounds add their gradients to it.
        decay = 1.0 if self._has_pending else self.momentum
        before, mean = self._latest("running_mean", rows), self._next("running_mean", rows)
        torch.mul(before, decay, out=mean)
        gradients = rows if scale is None else rows.div_(scale)
        rows.copy_(mean.add_(gradients, alpha=1 - self.momentum))
        if scale is not None:
            rows.mul_(scale)
        self._has_pending = True


def _packed_bytes(numel: int) -> int:
    return -(-numel // 8)


def _pack(negative: Tensor, packed: Tensor) -> None:
    """Packs fp32 values that are 0 or 1; through int8, as CPUs convert slowly to bool or uint8."""
    pack_bits(negative.to(torch.int8).view(torch.uint8), packed)


def _signs(negative: Tensor) -> Tensor:
    """Returns int8 -1 or +1 for uint8 1 or 0, in the same memory."""
    return negative.view(torch.int8).mul_(-2).add_(1)
