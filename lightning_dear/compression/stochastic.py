"""Codecs that round at random, so that C(x) is x on average and no error has to be kept.

torch draws multiples of 2^-24 in [0, 1). The mean of C(x) may therefore be off by 2^-24 of the
distance between the two levels that x is rounded to, which is about fp32's own precision.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.bits import pack_pairs, unpack_pairs
from lightning_dear.compression.blocks import largest_of_blocks, tiles
from lightning_dear.compression.codec import Codec, Kind, Randomness, padded_bytes
from lightning_dear.compression.integers import ScaledIntegers

_FP32 = torch.finfo(torch.float32)
_MANTISSA_BITS = 23


class _BlockLevels(ScaledIntegers):
    """Base of codecs that round q = x / step at random to an integer; decoding returns q step.

    q is floor(x / step), plus 1 with the probability x / step - floor(x / step), so that
    E[q] = x / step. Each block has its own step. It is at least 2^-126, the smallest normal number,
    so that blocks of zeros and of denormals need no case of their own.
    """

    kind: ClassVar[Kind] = "unbiased"
    randomness: ClassVar[Randomness] = "private"

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        generator = _given(generator, self.name)
        wire[:, self._ends(rows.shape[1])[1] :].zero_()
        for tile, values, steps, levels, floor, draw in self._tiles(rows, wire, num_scratch=3):
            self._scale(tile, steps, levels)
            torch.floor(levels, out=floor)
            draw.uniform_(generator=generator)
            # Strictly less, since a draw may be 0 and integers must not be changed. The result is
            # written as fp32, for the addition below; a bool mask would need memory of its own.
            torch.lt(draw, levels.sub_(floor), out=draw)
            self._pack(floor.add_(draw), values)

    @abstractmethod
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        """Writes steps [r, b, 1] for the blocks of `tile` [r, b, elements], and tile / steps.

        Args:
            tile: [r, b, elements of a block]; not mutated.
            steps: Overwritten.
            levels: Overwritten with tile / steps, in the shape of `tile`.
        """


@dataclass(frozen=True, kw_only=True)
class QSGD(_BlockLevels):
    """Rounds to s levels of either sign, relative to each block's 2-norm: 1 + 4 / B bytes each.

    The distance of two levels is step = |x|_2 / s, so that in a block of n elements
    E|C(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 (Alistarh et al. 2017, "QSGD", section 3.1,
    without the entropy code). More levels are more exact, and take as many bytes. The norm is
    computed of x / max|x|, so that no square overflows. It is limited to the largest fp32 number,
    which is enough since no |x| is larger.

    Args:
        num_levels: s, from 1 to 127. The default is 64.
        block_size: B, number of elements that share a norm: a multiple of 8 from 8 to 65536. The
            default is 512.
        halves: See `Codec`.
        error_feedback: Must not be True, as for all unbiased codecs.
    """

    name: ClassVar[str] = "qsgd"
    _bits: ClassVar[int] = 8

    num_levels: int = 64
    block_size: int = 512

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.num_levels, int) or not 1 <= self.num_levels <= 127:
            raise ValueError(f"num_levels of qsgd must be from 1 to 127, got {self.num_levels!r}.")

    @override
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        largest = largest_of_blocks(tile).clamp_(min=_FP32.tiny)
        # The norm of x / max|x|: squares of x itself could overflow.
        torch.div(tile, largest, out=levels)
        norm = torch.linalg.vector_norm(levels, dim=2, keepdim=True)
        # FP32.max / s may have been rounded up; a bit less, so that s times it does not overflow.
        most = _FP32.max / self.num_levels * (1 - _FP32.eps)
        steps.copy_(norm.div_(self.num_levels).mul_(largest).clamp_(_FP32.tiny, most))
        # Rounding may make the largest level a bit larger than s, and 128 does not fit an int8.
        levels.mul_(largest / steps).clamp_(-self.num_levels, self.num_levels)


@dataclass(frozen=True, kw_only=True)
class TernGrad(_BlockLevels):
    """Rounds to -s, 0 or s, s being the largest |x| of each block: 1 / 4 + 4 / B bytes each.

    An element becomes s sign(x) with probability |x| / s, and 0 otherwise. In a block
    E|C(x) - x|^2 = s |x|_1 - |x|_2^2 (Wen et al. 2017, "TernGrad", section 3). The paper's
    clipping (section 5) is left out: it lowers that variance, but C(x) would be biased.

    Args:
        block_size: B, number of elements that share s: a multiple of 8 from 8 to 65536. The
            default is 512.
        halves: See `Codec`.
        error_feedback: Must not be True, as for all unbiased codecs.
    """

    name: ClassVar[str] = "terngrad"
    _bits: ClassVar[int] = 2

    block_size: int = 512

    @override
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        largest_of_blocks(tile, steps).clamp_(min=_FP32.tiny)
        torch.div(tile, steps, out=levels)

    @override
    def _pack(self, integers: Tensor, values: Tensor) -> None:
        # The two lowest bits of an int8 are a signed integer of two bits: -1 becomes 3.
        pack_pairs(integers.to(torch.int8).bitwise_and_(3).view(torch.uint8), values)

    @override
    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        codes = unpack_pairs(values, integers.shape[2]).view(torch.int8)
        return integers.copy_(codes.bitwise_xor_(2).sub_(2))


@dataclass(frozen=True, kw_only=True)
class Natural(Codec):
    """Rounds at random to a power of two, and sends its sign and exponent in one byte.

    With e = floor(log2 |x|), |x| becomes 2^(e + 1) with probability |x| / 2^e - 1, and 2^e
    otherwise, so that E|C(x) - x|^2 <= x^2 / 8 (Horvath et al. 2019, "Natural compression", section
    2). Zero is exact. There are no scales.

    Seven bits hold a code: zero, or one of the 127 exponents from -62 to `max_exponent`, 64. With
    low = 2^-62, values below low are rounded at random to 0 or low. They stay unbiased up to
    low 2^-24, with E|C(x) - x|^2 <= low |x|, and values below 2^-86 are lost. Values beyond 2^64
    are clipped to it, and so biased. (The square of 2^64 is beyond fp32, so that a norm or Adam
    would fail with such gradients anyway.)

    Wire: [128 (x < 0) + code | zeros to a multiple of 4]. Code 0 is zero. Any other code is the
    exponent + 63.
    """

    name: ClassVar[str] = "natural"
    kind: ClassVar[Kind] = "unbiased"
    block_size: ClassVar[int] = 1
    randomness: ClassVar[Randomness] = "private"
    max_exponent: ClassVar[int] = 64

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(numel)

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        generator = _given(generator, self.name)
        # Padding is sent, too. Zeros, so that the bytes depend on values alone, not on old memory.
        wire[:, rows.shape[1] :].zero_()
        low, top = 2.0 ** (self.max_exponent - 126), 2.0**self.max_exponent
        for tile, values, magnitude, other in tiles(rows, wire[:, : rows.shape[1]], num_scratch=2):
            torch.abs(tile, out=magnitude).clamp_(max=top)
            # Doubles |x|, or adds low to it if it is less: the sum lies between low and 2 low as
            # |x| between 0 and low. Then a random mantissa is added. It carries into the exponent
            # with the probability mantissa / 2^23, which is the probability of rounding up.
            magnitude.add_(torch.clamp(magnitude, min=low, out=other))
            codes, noise = magnitude.view(torch.int32), other.view(torch.int32)
            codes.add_(noise.random_(0, 1 << _MANTISSA_BITS, generator=generator))
            codes.bitwise_right_shift_(_MANTISSA_BITS).sub_(self.max_exponent + 1)
            sign = torch.bitwise_right_shift(tile.view(torch.int32), 24, out=noise)
            values.copy_(codes.bitwise_or_(sign.bitwise_and_(128)))

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, values, *scratch in tiles(rows, wire[:, : rows.shape[1]], num_scratch=2):
            sign, code = (each.view(torch.int32) for each in scratch)
            torch.bitwise_and(sign.copy_(values), 127, out=code).add_(self.max_exponent)
            magnitude = code.bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
            # Code 0 has become low / 2, which the threshold makes 0. A mask is slow on a CPU.
            torch.threshold_(magnitude, 2.0 ** (self.max_exponent - 127), 0.0)
            sign.bitwise_and_(128).bitwise_left_shift_(24)
            torch.bitwise_or(code, sign, out=tile.view(torch.int32))


def _given(generator: Generator | None, name: str) -> Generator:
    """Refuses a missing generator, for which torch would use the user's random numbers."""
    if generator is None:
        raise ValueError(f"{name} rounds at random, so encode needs a generator: pass generator=.")
    return generator
