"""Random rounding: what comes back is x on average, so that nothing has to be kept.

Random numbers are the multiples of 2^-24 in [0, 1): an average is off by up to 2^-24 of the
distance of the two levels that a number is rounded to, which is what fp32 itself rounds off.
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
    """q = x / step, rounded at random to one of the two integers beside it; decodes to q step.

    E[q] = x / step: q is floor(x / step), plus one with the probability of what floor takes away.
    A step belongs to a block. It is at least 2^-126, the smallest normal number, so that blocks of
    zeros and of denormals need no case of their own.
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
            # Strictly less: a draw may be 0, and what is an integer already must stay one. In fp32
            # at once, since it is added next, and a mask would need memory of its own.
            torch.lt(draw, levels.sub_(floor), out=draw)
            self._pack(floor.add_(draw), values)

    @abstractmethod
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        """Write the steps [r, b, 1] of [r, b, elements], and x / step."""


@dataclass(frozen=True, kw_only=True)
class QSGD(_BlockLevels):
    """Rounds to s levels of either sign, relative to each block's 2-norm: 1 + 4 / B bytes each.

    step = |x|_2 / s, and E|C(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 in a block of n elements
    (Alistarh et al. 2017, "QSGD", section 3.1, without the entropy code). More levels are more
    exact at the same size. The norm is taken of x / max|x|, so that no square overflows, and is
    limited to the largest fp32 number: no |x| is larger, so that s such steps reach all of them.

    Args:
        num_levels: s, from 1 to 127.
        block_size: B, elements that share a norm: a multiple of 8 from 8 to 65536.
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
        # Squares of the numbers themselves could overflow.
        torch.div(tile, largest, out=levels)
        norm = torch.linalg.vector_norm(levels, dim=2, keepdim=True)
        # Rounded to nearest, LARGEST / s times s may be more than LARGEST.
        most = _FP32.max / self.num_levels * (1 - _FP32.eps)
        steps.copy_(norm.div_(self.num_levels).mul_(largest).clamp_(_FP32.tiny, most))
        # Rounding may carry the largest number beyond s, and 128 is no int8.
        levels.mul_(largest / steps).clamp_(-self.num_levels, self.num_levels)


@dataclass(frozen=True, kw_only=True)
class TernGrad(_BlockLevels):
    """Rounds to -s, 0 or s, s being the largest |x| of each block: 1 / 4 + 4 / B bytes each.

    An element is s sign(x) with probability |x| / s, so that E|C(x) - x|^2 = s |x|_1 - |x|_2^2 in a
    block (Wen et al. 2017, "TernGrad", section 3). The clipping of its section 5 is left out: it
    lowers that variance, but what is clipped is lost on average too.

    Args:
        block_size: B, elements that share s: a multiple of 8 from 8 to 65536.
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
        # -1 is 3: the two lowest bits of an integer are an integer of two bits.
        pack_pairs(integers.to(torch.int8).bitwise_and_(3).view(torch.uint8), values)

    @override
    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        codes = unpack_pairs(values, integers.shape[2]).view(torch.int8)
        return integers.copy_(codes.bitwise_xor_(2).sub_(2))


@dataclass(frozen=True, kw_only=True)
class Natural(Codec):
    """Sends sign and exponent in one byte: x is rounded at random to a power of two.

    With e = floor(log2 |x|), |x| becomes 2^(e + 1) with probability |x| / 2^e - 1, and 2^e
    otherwise, so that E|C(x) - x|^2 <= x^2 / 8 (Horvath et al. 2019, "Natural compression", section
    2). Zero is exact, and there are no scales.

    Seven bits are zero and 127 exponents, from -62 to `max_exponent`. Beside the smallest power,
    low, the next level is zero: numbers below low stay unbiased up to low 2^-24, with
    E|C(x) - x|^2 <= low |x|, and what is below 2^-86 is lost. Beyond the largest power, 2^64, it is
    what is sent: such numbers are biased, as if they had been clipped. Its square is beyond fp32,
    so that a norm or Adam would fail there too.

    Wire: [128 (x < 0) + code | zeros to a multiple of 4]; a code is 0, or an exponent less that of
    low, plus 1.
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
        # Padding travels too, and bytes are to depend on numbers alone, not on what memory held.
        wire[:, rows.shape[1] :].zero_()
        low, top = 2.0 ** (self.max_exponent - 126), 2.0**self.max_exponent
        for tile, values, magnitude, other in tiles(rows, wire[:, : rows.shape[1]], num_scratch=2):
            torch.abs(tile, out=magnitude).clamp_(max=top)
            # 2 |x|, and below low: |x| + low, which lies between low and 2 low as x between 0 and
            # low. A random mantissa is added: it carries as often as the mantissa is large.
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
            # Code 0 has become low / 2. (On a CPU, masks are slow.)
            torch.threshold_(magnitude, 2.0 ** (self.max_exponent - 127), 0.0)
            sign.bitwise_and_(128).bitwise_left_shift_(24)
            torch.bitwise_or(code, sign, out=tile.view(torch.int32))


def _given(generator: Generator | None, name: str) -> Generator:
    """The generator; torch would otherwise take the user's random numbers."""
    if generator is None:
        raise ValueError(f"{name} rounds at random: encode needs a generator.")
    return generator
