"""Codecs that send integers of 8 or 4 bits, with one fp32 scale for each block of elements.

A block is a fixed number of neighbouring elements. The scale depends on the largest magnitude of
its block, not of the bucket. So if tensors of different magnitude are fused into one bucket, only
blocks that contain elements of two tensors lose accuracy.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear import torch_modes
from lightning_dear.compression import blocks, codec, error_feedback

_FP32 = torch.finfo(torch.float32)


class ScaledIntegers(blocks.BlockCodec):
    """Base of codecs that send integers, and a scale for each block of elements.

    An element decodes to its integer times the scale of its block.
    """

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, values, scales in self._tiles(rows, wire):
            torch.mul(self._unpack(values, tile), scales, out=tile)

    def _pack(self, integers: Tensor, values: Tensor) -> None:
        """Writes integers into bytes. In this base class each becomes one int8.

        Args:
            integers: [rows, blocks, elements of a block] fp32, of integer value; may be mutated.
            values: [rows, blocks, bytes of a block] uint8; overwritten.
        """
        values.view(torch.int8).copy_(integers)

    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        """Returns the integers that `_pack` wrote into `values`.

        Args:
            values: [rows, blocks, bytes of a block] uint8; not mutated.
            integers: [rows, blocks, elements of a block] fp32, for the result; may be overwritten.

        Returns:
            [rows, blocks, elements of a block], of any dtype: `integers`, or another tensor.
        """
        own = values.view(torch.int8)
        return own if torch_modes.saves_calls(values.device) else integers.copy_(own)


class _BlockIntegers(ScaledIntegers):
    """Base of codecs that send q = round(x / s) in [-L, L], with s = max|x| / L of the block.

    q and s are sent, and decoding returns q s. L is `_levels`. The error of an element is at most
    s / 2 (plus about 2^-16 s by rounding in fp32), and never larger than the element. With blocks
    of B elements therefore |C(x) - x|^2 <= (B - 1) / (4 L^2 + B - 1) |x|^2.

    With error feedback, an element whose gradient g stays the same and has |g| < s / 2 is sent as 0
    until its residual reaches s / 2. So it waits for at most s / |g| steps.

    s is at least the smallest normal fp32 number, so that blocks of zeros or of denormal numbers
    need no separate code. It is at most so large that L s cannot overflow.
    """

    kind: ClassVar[codec.Kind] = "contractive"
    lag: ClassVar[codec.Lag] = "small"
    _levels: ClassVar[int]

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, self._ends(rows.shape[1])[1] :].zero_()
        # FP32.max / L may have been rounded up. The factor makes it a bit smaller, so that
        # L x largest does not overflow.
        largest = _FP32.max / self._levels * (1 - _FP32.eps)
        for tile, values, scales, integers in self._tiles(rows, wire, num_scratch=1):
            blocks.largest_of_blocks(tile, scales).div_(self._levels).clamp_(_FP32.tiny, largest)
            # |x| / s needs no clamp: it exceeds L at most by a rounding error of fp32, which
            # `round_` removes.
            self._pack(torch.div(tile, scales, out=integers).round_(), values)


@dataclass(frozen=True, kw_only=True)
class Int8(_BlockIntegers):
    """Rounds to 127 levels of either sign, relative to the largest |x| of each block.

    A block of B elements takes B + 4 bytes. q = round(x / s) is sent, with s = max|x| / 127, so
    that the error of an element is at most s / 2. A large element makes the levels coarse in its
    own block alone (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

    Args:
        block_size: B, number of elements that share a scale: a multiple of 8 from 8 to 65536. The
            default is 256.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "int8"
    _bits: ClassVar[int] = 8
    _levels: ClassVar[int] = 127

    block_size: int = 256


@dataclass(frozen=True, kw_only=True)
class Int4(_BlockIntegers):
    """Rounds to 7 levels of either sign, relative to the largest |x| of each block.

    A block of B elements takes B / 2 + 4 bytes. q = round(x / s) is sent, with s = max|x| / 7, so
    that the error of an element is at most s / 2. Blocks are those of Dettmers et al. 2022, "8-bit
    optimizers via block-wise quantization". With h half the elements of a block, rounded up, byte i
    of a block holds q_i + 16 q_(i + h). So an element shares a byte with one of the other half of
    the block, not with its neighbour, since the halves are contiguous in memory. If the last block
    of a row has an odd number of elements, its last byte holds one element.

    Args:
        block_size: B, number of elements that share a scale: a multiple of 8 from 8 to 65536. The
            default is 128.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "int4"
    _bits: ClassVar[int] = 4
    _levels: ClassVar[int] = 7

    block_size: int = 128

    @override
    def _pack(self, integers: Tensor, values: Tensor) -> None:
        half = values.shape[2]
        low, high = integers[..., :half], integers[..., half:]
        low[..., : high.shape[2]].add_(high, alpha=16)
        # The sum is at most 7 + 16 * 7 = 119 in magnitude, which an int8 holds.
        values.view(torch.int8).copy_(low)

    @override
    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        half = values.shape[2]
        low, high = integers[..., :half], integers[..., half:]
        low.copy_(values.view(torch.int8))
        both = low[..., : high.shape[2]]
        # A byte is q_i + 16 q_(i + h). |q_i| <= 7 is less than half of 16, so that rounding the
        # byte to a multiple of 16 removes q_i.
        torch.mul(both, 1 / 16, out=high).round_()
        both.sub_(high, alpha=16)
        return integers


@dataclass(frozen=True, kw_only=True)
class LoCo(Int4):
    """Encodes as `Int4` does, but its residual e is a moving average of encoding errors.

    After x has been encoded, e becomes (1 - b) e + b (x - C(x)). Most single errors are rounding
    noise, which the average damps. Plain feedback, where e becomes x - C(x), does not (Xie et al.
    2024, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", section 3.2, where b
    is 1 - beta).

    Args:
        rate: b, weight of the newest error, in (0, 1]. 1 means plain feedback. The default is 0.2.
            Any other value is refused with error_feedback=False.
        block_size: See `Int4`.
        halves: See `Codec`.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "loco"

    rate: float = 0.2

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_value("rate", "in (0, 1]", is_valid=0 < self.rate <= 1)
        if not self.has_feedback and self.rate != LoCo.rate:
            raise ValueError(
                "rate of loco has no effect with error_feedback=False. Leave out one of them: the"
                " rate is the weight of the newest error in the feedback."
            )

    @override
    def owner_memory(self, numel: int, device: torch.device) -> error_feedback.Memory:
        if not self.has_feedback:
            return error_feedback.Memory(numel, device)
        return error_feedback.Residual(numel, device, self.rate)
