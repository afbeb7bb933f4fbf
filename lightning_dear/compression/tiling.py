"""How codecs go through long rows: in tiles that a cache holds, in blocks that share a scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 19
"""What a codec works on at once on a CPU: 2 MiB of fp32, so that the next pass finds it cached."""

BLOCK_SIZES = range(8, 65536 + 1, 8)
"""Numbers of elements that may share statistics: whole bytes of bits, and a block fits a cache."""


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors alike into pieces of at most `TILE_ELEMENTS`, or of one item if that has more.

    Several short rows make a piece, or a part of a long one. On a device that is not a CPU there is
    one piece: fewer launches are what counts.

    Args:
        tensors: [R, items, ...] each; the elements of the first one count.

    Yields:
        Views of all tensors; nothing where the first one is empty.
    """
    num_rows, num_items = tensors[0].shape[:2]
    if not tensors[0].numel():
        return
    # Of buckets that hold one small tensor each, cutting would be a third of the time.
    if tensors[0].device.type != "cpu" or tensors[0].numel() <= TILE_ELEMENTS:
        yield tensors
        return
    num_elements = tensors[0].numel() // (num_rows * num_items)
    width = max(1, min(num_items, TILE_ELEMENTS // num_elements))
    height = max(1, TILE_ELEMENTS // (width * num_elements))
    # Not slices: they take microseconds each, which is as long as some operations on a piece.
    for group in zip(*(torch.split(each, height) for each in tensors), strict=True):
        yield from zip(*(torch.split(each, width, 1) for each in group), strict=True)


class Scratch:
    """Memory for temporaries, kept from tile to tile: on a CPU new pages cost more than the work.

    Args:
        count: How many temporaries.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._memory: Tensor | None = None

    def like(self, tile: Tensor) -> tuple[Tensor, ...]:
        """`count` tensors of the shape and type of `tile`, uninitialized and contiguous."""
        if self._memory is None or self._memory.shape[1:] != tile.shape:
            self._memory = tile.new_empty((self._count, *tile.shape))
        return self._memory.unbind()


def check_block_size(name: str, block_size: int) -> None:
    """Refuse what is not in `BLOCK_SIZES`.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size of {name} must be a multiple of {BLOCK_SIZES.step} from"
            f" {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, got {block_size!r}."
        )


def block_tiles(
    rows: Tensor, values: Tensor, *statistics: Tensor, block_size: int, bits: int
) -> Iterator[tuple[Tensor, ...]]:
    """`tiles` of the whole blocks of rows, and of the short block that may end each row.

    Args:
        rows: [R, numel].
        values: [R, ceil(numel bits / 8)], the bytes of the elements.
        statistics: [R, num_blocks, ...] each.
        block_size: Elements of a block; together they are whole bytes.
        bits: Of an element.

    Yields:
        Views of `rows` [r, b, elements of a block], `values` [r, b, bytes of a block] and
        `statistics` [r, b, ...].
    """
    num_blocks, short = divmod(rows.shape[1], block_size)
    elements, nbytes = num_blocks * block_size, num_blocks * block_size * bits // 8
    if num_blocks:
        shape = (len(rows), num_blocks)
        blocks = (
            rows[:, :elements].view(*shape, block_size),
            values[:, :nbytes].view(*shape, block_size * bits // 8),
        )
        yield from tiles(*blocks, *(each[:, :num_blocks] for each in statistics))
    if short:
        ends = rows[:, None, elements:], values[:, None, nbytes:]
        yield from tiles(*ends, *(each[:, num_blocks:] for each in statistics))
