"""Codecs that round at random, so that C(x) is x on average and no error has to be kept.

x is rounded up or down to one of the two nearest levels (values that can be sent). torch's random
numbers in [0, 1) are multiples of 2^-24. So the mean of C(x) may differ from x by 2^-24 of the
distance between these two levels, which is about the precision of fp32.
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
    """Base of codecs that round x / step at random to an integer q; decoding returns q step.

    q is floor(x / step), plus 1 with the probability x / step - floor(x / step), so that
    E[q] = x / step. Each block of elements has its own step, the distance of two levels. The step
    is at least 2^-126, the smallest normal fp32 number, so that blocks of zeros or of denormal
    numbers need no separate code.
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
            # `lt` and not `le`: a draw may be 0, and an x / step that is an integer must not be
            # rounded up. The comparison is written as fp32 into `draw`, for the addition below; a
            # bool mask would need further memory.
            torch.lt(draw, levels.sub_(floor), out=draw)
            self._pack(floor.add_(draw), values)

    @abstractmethod
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        """Computes the step of each block, and divides the elements by it.

        Args:
            tile: [r, b, elements of a block] fp32: b blocks of each of r rows; not mutated.
            steps: [r, b, 1] fp32; overwritten with the step of each block.
            levels: [r, b, elements of a block] fp32; overwritten with tile / steps.
        """


@dataclass(frozen=True, kw_only=True)
class QSGD(_BlockLevels):
    """Rounds to s levels of either sign, relative to the 2-norm |x|_2 of each block.

    An element takes 1 byte, and a block 4 bytes more. The distance of two levels is
    step = |x|_2 / s, so that in a block of n elements
    E|C(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 (Alistarh et al. 2017, "QSGD", section 3.1,
    without the entropy code). More levels make the error smaller and do not take more bytes. The
    norm of x / max|x| is computed and multiplied by max|x|, so that no square overflows. The
    product is limited to the largest fp32 number, which is no loss since no |x| is larger.

    Args:
        num_levels: s, from 1 to 127. The default is 64.
        block_size: Number of elements that share a norm: a multiple of 8 from 8 to 65536. The
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
        is_valid = isinstance(self.num_levels, int) and 1 <= self.num_levels <= 127
        self._check_value("num_levels", "from 1 to 127", is_valid=is_valid)

    @override
    def _scale(self, tile: Tensor, steps: Tensor, levels: Tensor) -> None:
        largest = largest_of_blocks(tile).clamp_(min=_FP32.tiny)
        # The norm of x / max|x| is computed, since squares of x itself could overflow.
        torch.div(tile, largest, out=levels)
        norm = torch.linalg.vector_norm(levels, dim=2, keepdim=True)
        # FP32.max / s may have been rounded up. The factor makes it a bit smaller, so that s x most
        # does not overflow.
        most = _FP32.max / self.num_levels * (1 - _FP32.eps)
        steps.copy_(norm.div_(self.num_levels).mul_(largest).clamp_(_FP32.tiny, most))
        # A rounding error may make |x| / step a bit larger than s. Rounded up it would be s + 1,
        # which does not fit into an int8 if s is 127.
        levels.mul_(largest / steps).clamp_(-self.num_levels, self.num_levels)


@dataclass(frozen=True, kw_only=True)
class TernGrad(_BlockLevels):
    """Rounds to -s, 0 or s, where s is the largest |x| of each block.

    An element takes 2 bits, and a block 4 bytes more. An element becomes s sign(x) with
    probability |x| / s, and 0 otherwise. In a block E|C(x) - x|^2 = s |x|_1 - |x|_2^2 (Wen et al.
    2017, "TernGrad", section 3). The paper's clipping (section 5) is left out: it lowers this
    variance, but C(x) would be biased.

    Args:
        block_size: Number of elements that share s: a multiple of 8 from 8 to 65536. The default is
            512.
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
        # The two lowest bits of the int8 -1 are 3, those of 0 are 0, and those of 1 are 1.
        pack_pairs(integers.to(torch.int8).bitwise_and_(3).view(torch.uint8), values)

    @override
    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        codes = unpack_pairs(values, integers.shape[2]).view(torch.int8)
        # Makes -1 of 3 again: (3 ^ 2) - 2. 0 and 1 stay as they are.
        return integers.copy_(codes.bitwise_xor_(2).sub_(2))


class Natural(Codec):
    """Rounds at random to a power of two, and sends its sign and exponent in one byte.

    With e = floor(log2 |x|), |x| becomes 2^(e + 1) with probability |x| / 2^e - 1, and 2^e
    otherwise, so that E|C(x) - x|^2 <= x^2 / 8 (Horvath et al. 2019, "Natural compression", section
    2). Zero arrives as zero. Blocks share no scale.

    Seven bits hold a code: that of zero, or of one of the 127 exponents from -62 to `max_exponent`,
    64. Let low = 2^-62. If |x| is below low, it is rounded at random to 0 or low, with
    E|C(x) - x|^2 <= low |x|. Down to low 2^-24 = 2^-86 that is unbiased; below, x is lost. If |x|
    is beyond 2^64, it is clipped to 2^64, so that C(x) is biased. (The square of 2^64 is beyond
    fp32, so that a norm or Adam would fail with such gradients anyway.)

    Bytes of a row: for each element 128 (x < 0) + code, then zeros up to a multiple of 4 bytes.
    Code 0 means zero. Any other code is the exponent + 63.
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
        # Bytes beyond the row's elements are sent, too. They are set to 0, since every byte must
        # depend on the values alone, not on what was in memory.
        wire[:, rows.shape[1] :].zero_()
        low, top = 2.0 ** (self.max_exponent - 126), 2.0**self.max_exponent
        for tile, values, magnitude, other in tiles(rows, wire[:, : rows.shape[1]], num_scratch=2):
            torch.abs(tile, out=magnitude).clamp_(max=top)
            # Doubles |x|, which keeps the mantissa. If |x| < low, low is added instead: the sum
            # lies between low and 2 low as |x| lies between 0 and low. Then a random mantissa is
            # added. That carries into the exponent with the probability mantissa / 2^23, which is
            # the probability of rounding up.
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
            # Code 0 has become 2^-63 = low / 2, which `threshold_` makes 0. A mask would be slower
            # on a CPU.
            torch.threshold_(magnitude, 2.0 ** (self.max_exponent - 127), 0.0)
            sign.bitwise_and_(128).bitwise_left_shift_(24)
            torch.bitwise_or(code, sign, out=tile.view(torch.int32))


def _given(generator: Generator | None, name: str) -> Generator:
    """Returns `generator`, or raises a ValueError if it is None.

    With None, torch would draw from its global generator, and so change the user's random numbers.
    """
    if generator is None:
        raise ValueError(f"{name} rounds at random, so encode needs a generator: pass generator=.")
    return generator
