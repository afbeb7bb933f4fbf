"""Codecs that send one bit for each element, its sign, and perhaps scales for each block.

A bit is 1 if x < 0, so that zero, of either sign, counts as positive. A scale is computed for each
block (a fixed number of neighbouring elements), not for a bucket. So if tensors of different
magnitude are fused into one bucket, only blocks that contain elements of two tensors lose accuracy.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression import bits, blocks, codec, error_feedback

_LARGEST = torch.finfo(torch.float32).max


class _BlockSigns(blocks.BlockCodec):
    """Base of codecs that send the signs of a block's elements, and fp32 statistics of the block.

    Subclasses say which statistics. Bit i of a row is 1 if x_i < 0.
    """

    kind: ClassVar[codec.Kind] = "contractive"
    _bits: ClassVar[int] = 1
    _num_scratch: ClassVar[int] = 0
    """Number of temporary tensors in the shape of a tile that `_scale` needs."""

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, self._ends(rows.shape[1])[1] :].zero_()
        for tile, packed, scales, negative in self._tiles(rows, wire, num_scratch=1):
            _pack(torch.lt(tile, 0, out=negative), packed)
            self._measure(tile, negative, scales)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, packed, scales, *scratch in self._tiles(rows, wire, self._num_scratch):
            self._scale(bits.unpack_bits(packed, tile.shape[2]), scales, tile, scratch)

    @abstractmethod
    def _measure(self, tile: Tensor, negative: Tensor, scales: Tensor) -> None:
        """Computes the statistics of each block and writes them into `scales`.

        Args:
            tile: [r, b, elements of a block] fp32: b blocks of each of r rows; not mutated.
            negative: fp32 in the shape of `tile`: 1 where an element is below 0, and 0 elsewhere.
                May be mutated.
            scales: [r, b, number of statistics] fp32; overwritten.
        """

    @abstractmethod
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        """Writes decoded elements into `tile`.

        Args:
            negative: [r, b, elements of a block] uint8: 1 where an element was below 0, and 0
                elsewhere. May be mutated.
            scales: [r, b, number of statistics] fp32, as `_measure` wrote them; not mutated.
            tile: [r, b, elements of a block] fp32; overwritten.
            scratch: `_num_scratch` temporary tensors in the shape of `tile`; may be overwritten.
        """


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(_BlockSigns):
    """Sends the sign of each element, and the mean magnitude of each block: C(x) = mean|x| sign(x).

    That is 1 / 32 + 1 / B of the bytes of fp32, for blocks of B elements.
    |C(x) - x|^2 = (1 - d) |x|^2 with d = |x|_1^2 / (n |x|_2^2) in each block of n elements
    (Karimireddy et al. 2019, "Error feedback fixes SignSGD", section 4). The mean is computed as
    the sum of |x| / n, to avoid overflow. If |x| is below n 2^-126, the mean loses digits, so that
    d is smaller, though not negative.

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
        # By rounding, the computed mean of numbers near the largest fp32 number may be inf.
        scales.copy_(parts.sum(2, keepdim=True).clamp_(max=_LARGEST))

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        tile.copy_(_signs(negative)).mul_(scales)


@dataclass(frozen=True, kw_only=True)
class OneBit(_BlockSigns):
    """Sends two means for each block: of the elements below 0, and of all other elements.

    A bit for each element says which of the two means of its block it decodes to. For blocks of B
    elements that is 1 / 32 + 2 / B of the bytes of fp32. In a block of n elements, let N be the sum
    of the c elements below 0, and P the sum of the n - c others. Then
    |C(x) - x|^2 = |x|^2 - N^2 / c - P^2 / (n - c), which is at most the error of `EFSignSGD` (Seide
    et al. 2014, "1-bit stochastic gradient descent", section 3). If |x| is below n 2^-126, the
    means lose digits.

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
        # If there are no such elements, their mean is 0.
        below.mul_(numel / count.clamp(min=1)).clamp_(min=-_LARGEST)
        others.mul_(numel / (numel - count).clamp_(min=1)).clamp_(max=_LARGEST)
        torch.stack((below, others), 2, out=scales)

    @override
    def _scale(self, negative: Tensor, scales: Tensor, tile: Tensor, scratch: list[Tensor]) -> None:
        # Computed as negative x first mean + (1 - negative) x second mean, since `where` takes ten
        # times as long on a CPU, and `lerp` may overflow.
        tile.copy_(negative)
        others = torch.sub(1, tile, out=scratch[0]).mul_(scales[..., 1:])
        tile.mul_(scales[..., :1]).add_(others)


class SignSGD(codec.Codec):
    """Sends the sign of each element, for a vote: C(x) = -1 if x < 0, and otherwise +1.

    Each rank sends signs, the owner of a shard adds them up, and the sign of the sum comes back.
    The sign of 0 is +1, and so is the result of a tie. There is no scale. So with plain SGD each
    element of a parameter changes by the learning rate. Takes 1/32 of the bytes of fp32 (Bernstein
    et al. 2018, "signSGD", section 2, and "signSGD with majority vote").

    Bytes of a row: bit i is 1 if x_i < 0; then zeros up to a multiple of 4 bytes.

    Args:
        halves: "both" (the default) means that the sign of the sum comes back. "reduce" means that
            the mean of the signs comes back, uncompressed.
        error_feedback: Must not be True, since errors of votes are not kept.
    """

    name: ClassVar[str] = "signsgd"
    kind: ClassVar[codec.Kind] = "vote"
    block_size: ClassVar[int] = 1

    @override
    def wire_bytes(self, numel: int) -> int:
        return codec.padded_bytes(_packed_bytes(numel))

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, _packed_bytes(rows.shape[1]) :].zero_()
        for tile, packed, negative in self._tiles(rows, wire, num_scratch=1):
            _pack(torch.lt(tile, 0, out=negative), packed)

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, packed in self._tiles(rows, wire):
            tile.copy_(_signs(bits.unpack_bits(packed, tile.shape[2])))

    def _tiles(self, rows: Tensor, wire: Tensor, num_scratch: int = 0) -> blocks.Tiles:
        """Yields tiles of `rows` and of their packed bits, and temporaries; see `block_tiles`.

        A tile is rows [r, b, elements], bits [r, b, bytes], then `num_scratch` temporaries in the
        shape of the rows. Blocks have 8 elements here, a byte of bits.
        """
        packed, size = wire[:, : _packed_bytes(rows.shape[1])], blocks.BLOCK_SIZES[0]
        return blocks.block_tiles(rows, packed, block_size=size, bits=1, num_scratch=num_scratch)


@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """Sends the signs of a running mean of gradients g, m = momentum m + (1 - momentum) g.

    A `RunningMean` keeps m on each rank. The signs are a vote, as in `SignSGD`. An optimizer with
    momentum is refused (Bernstein et al. 2018, "signSGD", algorithm 2).

    Args:
        momentum: Factor by which m decays in each step, in [0, 1). The default is 0.9.
        halves: See `SignSGD`.
        error_feedback: Must not be True, since errors of votes are not kept.
    """

    name: ClassVar[str] = "signum"
    brings_momentum: ClassVar[bool] = True
    # The result of a vote is +1 or -1 with any momentum. So weight decay has the same strength
    # relative to it, with or without momentum.
    takes_weight_decay: ClassVar[bool] = True

    momentum: float = 0.9

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_value("momentum", "in [0, 1)", is_valid=0 <= self.momentum < 1)

    @override
    def worker_memory(self, numel: int, device: torch.device) -> error_feedback.Memory:
        return RunningMean(numel, device, decay=self.momentum)


class RunningMean(error_feedback.Memory):
    """Keeps the running mean of `Signum`, m = momentum m + (1 - momentum) g, whose signs are sent.

    g is the gradient of this rank. See Bernstein et al. 2018, "signSGD", algorithm 2.
    """

    names: ClassVar[tuple[str, ...]] = ("running_mean",)

    @override
    def compensate(self, rows: Tensor, scale: Tensor | None) -> None:
        # m decays once a step: in the first round (see `_now`). Later rounds of the step only add
        # their gradients to it.
        decay = 1.0 if self._has_pending else self.decay
        before, mean = self._latest("running_mean", rows), self._next("running_mean", rows)
        torch.mul(before, decay, out=mean)
        gradients = rows if scale is None else rows.div_(scale)
        mean.add_(gradients, alpha=1 - self.decay)
        rows.copy_(mean) if scale is None else torch.mul(mean, scale, out=rows)
        self._has_pending = True


def _packed_bytes(numel: int) -> int:
    """Returns the number of bytes that hold `numel` bits."""
    return -(-numel // 8)


def _pack(negative: Tensor, packed: Tensor) -> None:
    """Packs fp32 values that are 0 or 1 into the bits of `packed`; see `pack_bits`.

    They are converted to int8 first, since CPUs convert fp32 slowly to bool or uint8.
    """
    bits.pack_bits(negative.to(torch.int8).view(torch.uint8), packed)


def _signs(negative: Tensor) -> Tensor:
    """Turns uint8 1 into int8 -1, and 0 into +1, in place. Returns an int8 view of `negative`."""
    return negative.view(torch.int8).mul_(-2).add_(1)
