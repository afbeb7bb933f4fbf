"""Packs several values of one or two bits into each byte, and unpacks them, in few torch calls.

Eight bytes that hold 0 or 1 are viewed as one int64. One multiplication moves all eight bits into
its highest byte. To unpack, another multiplication and a mask spread the bits over eight bytes
again. A pair is a value of two bits, from 0 to 3; four bytes that hold pairs are viewed as one
int32. Element 0 is in the lowest bits of packed byte 0. Products overflow on purpose: torch's
integers wrap, and only the result modulo 2^64 (2^32 for pairs) matters.
"""

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError("This machine is big-endian. Use a little-endian one, such as x86-64.")

# Byte k of a word holds bit b_k, which is bit 8 k of the word. Multiplied by 2^(56 - 7 k) it is bit
# 56 + k. No two of the 64 products b_j 2^(8 j + 56 - 7 k) are the same bit, so nothing carries.
_GATHER_BITS = sum(1 << (56 - 7 * k) for k in range(8))
# To unpack, the packed byte is copied into each of eight bytes. Of the copy in byte k only bit k is
# kept. Adding 0x80 - 2^k to byte k carries this bit to bit 7, from where it is shifted to bit 0.
_REPEAT_BYTE = 0x0101010101010101
_BIT_K_OF_BYTE_K = 0x8040201008040201 - (1 << 64)
_CARRY_BIT_K = sum((0x80 - (1 << k)) << (8 * k) for k in range(8))

# Byte k of a word of four bytes holds a pair, from bit 8 k of the word on. The multiplication moves
# the pair to bit 24 + 2 k.
_GATHER_PAIRS = sum(1 << (24 - 6 * k) for k in range(4))
# To unpack, the two halves of the packed byte are moved to separate pairs of bytes. Then the two
# pairs in each half are moved to separate bytes. The copies that a multiplication makes do not
# overlap, so that nothing carries.
_SPREAD_HALVES, _HALVES = 1 + (1 << 12), 0x000F000F
_SPREAD_PAIRS, _PAIRS = 1 + (1 << 6), 0x03030303


def pack_bits(bits: Tensor, packed: Tensor) -> None:
    """Packs values that are 0 or 1 into bytes, eight values in each.

    Args:
        bits: [..., n] uint8, less than 2; not mutated.
        packed: [..., ceil(n / 8)] uint8; overwritten. Bits of the last byte beyond n are 0.
    """
    words = _words(bits, 8).view(torch.int64)
    packed.copy_((words * _GATHER_BITS).view(torch.uint8)[7::8].view(packed.shape))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Returns the values that `pack_bits` packed.

    Args:
        packed: [..., ceil(numel / 8)] uint8; not mutated.
        numel: n, number of values in the last dimension.

    Returns:
        [..., n] uint8. If n is no multiple of 8, a view of a larger tensor, and not contiguous.
    """
    words = packed.flatten().to(torch.int64).mul_(_REPEAT_BYTE).bitwise_and_(_BIT_K_OF_BYTE_K)
    words.add_(_CARRY_BIT_K).bitwise_right_shift_(7).bitwise_and_(_REPEAT_BYTE)
    return words.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * 8)[..., :numel]


def pack_pairs(codes: Tensor, packed: Tensor) -> None:
    """Packs values from 0 to 3 into bytes, four values in each.

    Args:
        codes: [..., n] uint8, less than 4; not mutated.
        packed: [..., ceil(n / 4)] uint8; overwritten. Bits of the last byte beyond n are 0.
    """
    words = _words(codes, 4).view(torch.int32)
    packed.copy_((words * _GATHER_PAIRS).view(torch.uint8)[3::4].view(packed.shape))


def unpack_pairs(packed: Tensor, numel: int) -> Tensor:
    """Returns the values that `pack_pairs` packed.

    Args:
        packed: [..., ceil(numel / 4)] uint8; not mutated.
        numel: n, number of values in the last dimension.

    Returns:
        [..., n] uint8. If n is no multiple of 4, a view of a larger tensor, and not contiguous.
    """
    words = packed.flatten().to(torch.int32).mul_(_SPREAD_HALVES).bitwise_and_(_HALVES)
    words.mul_(_SPREAD_PAIRS).bitwise_and_(_PAIRS)
    return words.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * 4)[..., :numel]


def _words(small: Tensor, size: int) -> Tensor:
    """Returns rows of bytes, flattened, each row filled up with zeros to a multiple of `size`.

    The result can be viewed as words of `size` bytes. torch refuses such a view of rows whose
    strides or storage offset are not multiples of `size`, so that they are copied. Other rows are
    returned as a view of `small`.
    """
    numel = small.shape[-1]
    if not numel % size and small.is_contiguous() and not small.storage_offset() % size:
        return small.flatten()
    padded = small.new_zeros((*small.shape[:-1], numel + -numel % size))
    padded[..., :numel].copy_(small)
    return padded.flatten()
