"""Integers of 8 and 4 bits, with one scale for each block of elements.

How coarse the grid is depends on the largest element of a block, not of a bucket, so that merging
tensors into buckets does not cost accuracy.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression import error_feedback as feedback
from lightning_dear.compression.blocks import BlockCodec, largest_of_blocks
from lightning_dear.compression.codec import Kind, Lag
from lightning_dear.torch_modes import saves_calls

_FP32 = torch.finfo(torch.float32)


class ScaledIntegers(BlockCodec):
    """Sends integers, times a scale for each block; subclasses say what both are."""

    @override
    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        for tile, values, scales in self._tiles(rows, wire):
            torch.mul(self._unpack(values, tile), scales, out=tile)

    def _pack(self, integers: Tensor, values: Tensor) -> None:
        """Write integers, given as fp32 [rows, blocks, elements], as bytes; may change them."""
        values.view(torch.int8).copy_(integers)

    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        """The inverse of `_pack`: `integers`, or what else has them, in any type."""
        own = values.view(torch.int8)
        return own if saves_calls(values.device) else integers.copy_(own)


class _BlockIntegers(ScaledIntegers):
    """q = round(x / s) in [-L, L], and s = max|x| / L of the block in fp32; decodes to q s.

    The error of an element is at most s / 2 (and some 2^-16 s of rounding in fp32), and never more
    than the element, so that with blocks of B elements
    |C(x) - x|^2 <= (B - 1) / (4 L^2 + B - 1) |x|^2.

    With feedback an element whose gradient stays g, below s / 2, is sent as 0 until its residual
    is s / 2: it waits for at most s / |g| steps.

    s is never less than the smallest normal number: blocks of zeros and denormals need no case of
    their own. It is never so large that L s overflows.
    """

    kind: ClassVar[Kind] = "contractive"
    lag: ClassVar[Lag] = "small"
    _levels: ClassVar[int]

    @override
    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        wire[:, self._ends(rows.shape[1])[1] :].zero_()
        # Rounded to nearest, LARGEST / L times L may be more than LARGEST.
        largest = _FP32.max / self._levels * (1 - _FP32.eps)
        for tile, values, scales, integers in self._tiles(rows, wire, num_scratch=1):
            largest_of_blocks(tile, scales).div_(self._levels).clamp_(_FP32.tiny, largest)
            # No clamp: |x| / s is at most L but for an error of fp32, which rounding has removed.
            self._pack(torch.div(tile, scales, out=integers).round_(), values)


@dataclass(frozen=True, kw_only=True)
class Int8(_BlockIntegers):
    """Round to 127 levels of either sign, relative to the largest of each block: B + 4 bytes.

    q = round(x / s), s = max|x| / 127: the error of an element is at most s / 2. A large number
    spoils its own block alone (Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization").

    Args:
        block_size: Elements that share a scale: a multiple of 8 from 8 to 65536.
    """

    name: ClassVar[str] = "int8"
    _bits: ClassVar[int] = 8
    _levels: ClassVar[int] = 127

    block_size: int = 256


@dataclass(frozen=True, kw_only=True)
class Int4(_BlockIntegers):
    """Round to 7 levels of either sign, relative to the largest of each block: B / 2 + 4 bytes.

    q = round(x / s), s = max|x| / 7: the error of an element is at most s / 2. Blocks are those of
    Dettmers et al. 2022, "8-bit optimizers via block-wise quantization". Byte i of one holds
    q_i + 16 q_(i + h), h being half a block, rounded up: two contiguous halves, not even and odd
    elements. Where the last block is odd, its last byte holds one number.

    Args:
        block_size: Elements that share a scale: a multiple of 8 from 8 to 65536.
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
        # At most 7 + 16 * 7 = 119 of either sign, which an int8 holds.
        values.view(torch.int8).copy_(low)

    @override
    def _unpack(self, values: Tensor, integers: Tensor) -> Tensor:
        half = values.shape[2]
        low, high = integers[..., :half], integers[..., half:]
        low.copy_(values.view(torch.int8))
        both = low[..., : high.shape[2]]
        # |q_i| <= 7 is less than half of 16: rounding finds the other number.
        torch.mul(both, 1 / 16, out=high).round_()
        both.sub_(high, alpha=16)
        return integers


@dataclass(frozen=True, kw_only=True)
class LoCo(Int4):
    """Rounds as `Int4`, with a moving average of errors: e' = (1 - b) e + b (x - C(x)).

    A slower filter than e' = x - C(x): single errors, which are mostly rounding, come back damped
    (Xie et al. 2024, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training",
    section 3.2, in whose terms b = 1 - beta). On the wire it is `Int4`.

    Args:
        rate: b, in (0, 1]; 1 is plain feedback.
    """

    name: ClassVar[str] = "loco"

    rate: float = 0.2

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate of loco must be in (0, 1], got {self.rate!r}.")
        if not self.has_feedback and self.rate != LoCo.rate:
            raise ValueError(
                "rate of loco has no effect with error_feedback=False: it says how feedback is"
                " kept. Leave it out, or error_feedback."
            )

    @override
    def owner_memory(self, numel: int, device: torch.device) -> feedback.Memory:
        if not self.has_feedback:
            return feedback.Memory(numel, device)
        return feedback.Residual(numel, device, self.rate)
