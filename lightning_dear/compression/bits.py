"""Several small numbers in a byte, and back, without a loop and without a table.

Eight bytes that hold 0 or 1 are one int64: a multiplication brings all eight to its highest byte,
and another, with a mask, scatters them again. Element 0 is the lowest bits of byte 0. The products
overflow; what matters is modulo 2^64 (2^32 for pairs), as integers of torch wrap.
"""

import sys

import torch
from torch import Tensor

if sys.byteorder != "little":
    raise ImportError("lightning_dear.compression packs bits on little-endian machines only.")

# Byte k holds bit b_k, the bit 8 k of a word. Times 2^(56 - 7 k) it is bit 56 + k. No two of the
# 64 products b_j 2^(8 j + 56 - 7 k) are the same bit, so that nothing carries.
_GATHER_BITS = sum(1 << (56 - 7 * k) for k in range(8))
# The byte in each of eight bytes; of byte k only bit k remains, and carries to bit 7.
_REPEAT_BYTE = 0x0101010101010101
_BIT_K_OF_BYTE_K = 0x8040201008040201 - (1 << 64)
_CARRY_BIT_K = sum((0x80 - (1 << k)) << (8 * k) for k in range(8))

# Byte k holds two bits, from bit 8 k of a word of four bytes on; they go to bit 24 + 2 k.
_GATHER_PAIRS = sum(1 << (24 - 6 * k) for k in range(4))
# Half a byte in each half word, then a pair in each byte; what is copied never overlaps.
_SPREAD_HALVES, _HALVES = 1 + (1 << 12), 0x000F000F
_SPREAD_PAIRS, _PAIRS = 1 + (1 << 6), 0x03030303


def pack_bits(bits: Tensor, packed: Tensor) -> None:
    """Write eight numbers that are 0 or 1 to a byte.

    Args:
        bits: [..., n] uint8, less than 2; not mutated.
        packed: [..., ceil(n / 8)] uint8; overwritten. Bits of the last byte beyond n are 0.
    """
    words = _words(bits, 8).view(torch.int64)
    packed.copy_((words * _GATHER_BITS).view(torch.uint8)[7::8].view(packed.shape))


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Undoes `pack_bits`.

    Args:
        packed: [..., ceil(numel / 8)] uint8; not mutated.
        numel: n, numbers side by side.

    Returns:
        [..., n] uint8; a view of [..., 8 ceil(n / 8)].
    """
    words = packed.flatten().to(torch.int64).mul_(_REPEAT_BYTE).bitwise_and_(_BIT_K_OF_BYTE_K)
    words.add_(_CARRY_BIT_K).bitwise_right_shift_(7).bitwise_and_(_REPEAT_BYTE)
    return _rows(words.view(torch.uint8), packed, 8)[..., :numel]


def pack_pairs(codes: Tensor, packed: Tensor) -> None:
    """Write four numbers from 0 to 3 to a byte.

    Args:
        codes: [..., n] uint8, less than 4; not mutated.
        packed: [..., ceil(n / 4)] uint8; overwritten. Bits of the last byte beyond n are 0.
    """
    words = _words(codes, 4).view(torch.int32)
    packed.copy_((words * _GATHER_PAIRS).view(torch.uint8)[3::4].view(packed.shape))


def unpack_pairs(packed: Tensor, numel: int) -> Tensor:
    """Undoes `pack_pairs`.

    Args:
        packed: [..., ceil(numel / 4)] uint8; not mutated.
        numel: n, numbers side by side.

    Returns:
        [..., n] uint8; a view of [..., 4 ceil(n / 4)].
    """
    words = packed.flatten().to(torch.int32).mul_(_SPREAD_HALVES).bitwise_and_(_HALVES)
    words.mul_(_SPREAD_PAIRS).bitwise_and_(_PAIRS)
    return _rows(words.view(torch.uint8), packed, 4)[..., :numel]


def _words(small: Tensor, size: int) -> Tensor:
    """The bytes of all rows in one, each with zeros up to the next multiple of `size`.

    Flat, since torch views bytes as words only where all strides and the offset allow it.
    """
    numel = small.shape[-1]
    if not numel % size and small.is_contiguous() and not small.storage_offset() % size:
        return small.flatten()
    padded = small.new_zeros((*small.shape[:-1], numel + -numel % size))
    padded[..., :numel].copy_(small)
    return padded.flatten()


def _rows(flat: Tensor, packed: Tensor, size: int) -> Tensor:
    """[..., n size] of what [..., n] bytes were unpacked to."""
    return flat.view(*packed.shape[:-1], packed.shape[-1] * size)
