"""Packs several values of one or two bits into each byte, and unpacks them, in few torch calls.

Eight bytes that hold 0 or 1 are viewed as one int64. One multiplication moves all eight bits into
its highest byte. To unpack, another multiplication and a mask spread them again. Element 0 is in
the lowest bits of byte 0. Products overflow on purpose: torch's integers wrap, and only the result
modulo 2^64 (2^32 for pairs) matters.
"""

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError("This machine is big-endian. Use a little-endian one, such as x86-64.")

# Byte k of a word holds bit b_k, which is bit 8 k of the word. Multiplied by 2^(56 - 7 k) it is bit
# 56 + k. No two of the 64 products b_j 2^(8 j + 56 - 7 k) are the same bit, so nothing carries.
_GATHER_BITS = sum(1 << (56 - 7 * k) for k in range(8))
# Copies the packed byte into each of eight bytes. Of byte k only bit k is kept; adding a constant
# carries it to bit 7, from where it is shifted to bit 0.
_REPEAT_BYTE = 0x0101010101010101
_BIT_K_OF_BYTE_K = 0x8040201008040201 - (1 << 64)
_CARRY_BIT_K = sum((0x80 - (1 << k)) << (8 * k) for k in range(8))

# Byte k of a word of four bytes holds a pair of bits, from bit 8 k on. It goes to bit 24 + 2 k.
_GATHER_PAIRS = sum(1 << (24 - 6 * k) for k in range(4))
# First each half of a byte gets two bytes of its own, then each pair of bits a byte. The copies of
# a multiplication never overlap.
_SPREAD_HALVES, _HALVES = 1 + (1 << 12), 0x000F000F
_SPREAD_PAIRS, _PAIRS = 1 + (1 << 6), 0x03030303


def pack_bits(bits: Tensor, packed: Tensor) -> None:
    """Packs eight values that are 0 or 1 into each byte.

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
        [..., n] uint8; a view of [..., 8 ceil(n / 8)].
    """
    words = packed.flatten().to(torch.int64).mul_(_REPEAT_BYTE).bitwise_and_(_BIT_K_OF_BYTE_K)
    words.add_(_CARRY_BIT_K).bitwise_right_shift_(7).bitwise_and_(_REPEAT_BYTE)
    return _rows(words.view(torch.uint8), packed, 8)[..., :numel]


def pack_pairs(codes: Tensor, packed: Tensor) -> None:
    """Packs four values from 0 to 3 into each byte.

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
        [..., n] uint8; a view of [..., 4 ceil(n / 4)].
    """
    words = packed.flatten().to(torch.int32).mul_(_SPREAD_HALVES).bitwise_and_(_HALVES)
    words.mul_(_SPREAD_PAIRS).bitwise_and_(_PAIRS)
    return _rows(words.view(torch.uint8), packed, 4)[..., :numel]


def _words(small: Tensor, size: int) -> Tensor:
    """Flattens rows of bytes, each filled up with zeros to a multiple of `size` bytes.

    The result can be viewed as words of `size` bytes; torch refuses that view of rows whose
    strides or offset are not multiples of `size`.
    """
    numel = small.shape[-1]
    if not numel % size and small.is_contiguous() and not small.storage_offset() % size:
        return small.flatten()
    padded = small.new_zeros((*small.shape[:-1], numel + -numel % size))
    padded[..., :numel].copy_(small)
    return padded.flatten()


def _rows(flat: Tensor, packed: Tensor, size: int) -> Tensor:
    """Reshapes flat unpacked values to [..., n size], where `packed` is [..., n]."""
    return flat.view(*packed.shape[:-1], packed.shape[-1] * size)
