"""How codecs go through long rows: in tiles that a cache holds, in blocks that share statistics."""

import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, padded_bytes
from lightning_dear.torch_modes import saves_calls

TILE_ELEMENTS = 1 << 19
"""What a codec works on at once on a CPU: 2 MiB of fp32, so that the next pass finds it cached."""

BLOCK_SIZES = range(8, 65536 + 1, 8)
"""Numbers of elements that may share statistics: whole bytes of bits, and a block fits a cache."""


Tiles = Iterator[tuple[Tensor, ...]]
"""Pieces of several tensors that belong together, one tuple after another."""


def tiles(*tensors: Tensor, num_scratch: int = 0) -> Tiles:
    """Cuts tensors alike into pieces of at most `TILE_ELEMENTS`, or of one item if that has more.

    Several short rows make a piece, or a part of a long one. On a device that is not a CPU there is
    one piece: fewer launches are what counts.

    Args:
        tensors: [R, items, ...] each; the elements of the first one count.
        num_scratch: How many temporaries to add to each piece.

    Yields:
        Views of all tensors, and temporaries of the shape and type of the first, uninitialized and
        contiguous; nothing where the first one is empty.
    """
    first = tensors[0]
    if not first.numel():
        return
    pieces: Iterable[tuple[Tensor, ...]] = (tensors,)
    # Of buckets that hold one small tensor each, cutting would be a third of the time.
    if first.device.type == "cpu" and first.numel() > TILE_ELEMENTS:
        num_rows, num_items = first.shape[:2]
        num_elements = first.numel() // (num_rows * num_items)
        width = max(1, min(num_items, TILE_ELEMENTS // num_elements))
        height = max(1, TILE_ELEMENTS // (width * num_elements))
        # Not slices: they take microseconds each, which is as long as some operations on a piece.
        pieces = (
            piece
            for group in zip(*(torch.split(each, height) for each in tensors), strict=True)
            for piece in zip(*(torch.split(each, width, 1) for each in group), strict=True)
        )
    scratch: tuple[Tensor, ...] = ()
    for piece in pieces:
        # Kept from tile to tile: on a CPU new pages cost more than the work.
        if num_scratch and (not scratch or scratch[0].shape != piece[0].shape):
            scratch = piece[0].new_empty((num_scratch, *piece[0].shape)).unbind()
        yield *piece, *scratch


def largest_of_blocks(tile: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns max|x| of each block, [r, b, 1] of [r, b, elements]; written into `out` if given."""
    if saves_calls(tile.device):
        norm: Tensor = torch.linalg.vector_norm(tile, math.inf, -1, keepdim=True, out=out)
        return norm
    # Slow there, and |x| itself would be a temporary.
    above, below = torch.amax(tile, -1, True, out=out), torch.amin(tile, -1, True)
    return torch.maximum(above, below.neg_(), out=out)


def block_tiles(
    rows: Tensor, values: Tensor, *statistics: Tensor, block_size: int, bits: int, num_scratch: int
) -> Tiles:
    """Returns `tiles` of the whole blocks of rows, and of the short block that may end each.

    Args:
        rows: [R, numel].
        values: [R, ceil(numel bits / 8)], the bytes of the elements.
        statistics: [R, num_blocks, ...] each.
        block_size: Elements of a block; together they are whole bytes.
        bits: Of an element.
        num_scratch: See `tiles`.

    Yields:
        Views of `rows` [r, b, elements of a block], `values` [r, b, bytes of a block] and
        `statistics` [r, b, ...], and temporaries like the first.
    """
    num_blocks, short = divmod(rows.shape[1], block_size)
    elements, nbytes = num_blocks * block_size, num_blocks * block_size * bits // 8
    if num_blocks:
        shape = (len(rows), num_blocks)
        blocks = (
            rows[:, :elements].view(*shape, block_size),
            values[:, :nbytes].view(*shape, block_size * bits // 8),
        )
        whole = (each[:, :num_blocks] for each in statistics)
        yield from tiles(*blocks, *whole, num_scratch=num_scratch)
    if short:
        ends = rows[:, None, elements:], values[:, None, nbytes:]
        last = (each[:, num_blocks:] for each in statistics)
        yield from tiles(*ends, *last, num_scratch=num_scratch)


class BlockCodec(Codec):
    """Lays out a row: statistics of its blocks, then the elements, a fixed number of bits each.

    Wire: [num_blocks x num_statistics, fp32 | values | zeros to a multiple of 4]. The last block
    may be short; its statistics are those of the elements that it has.

    Args:
        block_size: Elements that share statistics: a multiple of 8 from 8 to 65536.
    """

    _bits: ClassVar[int]
    _num_statistics: ClassVar[int] = 1

    # A field of the subclasses, whose defaults differ.
    block_size: int

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block_size of {self.name} must be a multiple of {BLOCK_SIZES.step} from"
                f" {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, got {self.block_size!r}."
            )

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(self._ends(numel)[1])

    def _ends(self, numel: int) -> tuple[int, int]:
        """Behind which byte the statistics end, and the values."""
        begin = -(-numel // self.block_size) * self._num_statistics * 4
        return begin, begin + -(-numel * self._bits // 8)

    def _tiles(self, rows: Tensor, wire: Tensor, num_scratch: int = 0) -> Tiles:
        """Views [r, b, elements] of `rows`, [r, b, bytes] of values, and of the statistics.

        The latter are [r, b, num_statistics] fp32. Behind them temporaries, as `tiles` has them.
        """
        begin, end = self._ends(rows.shape[1])
        # torch views no empty rows of bytes as wider numbers.
        if begin:
            shape = (len(rows), -1, self._num_statistics)
            parts = rows, wire[:, begin:end], wire[:, :begin].view(torch.float32).view(shape)
            size, bits = self.block_size, self._bits
            yield from block_tiles(*parts, block_size=size, bits=bits, num_scratch=num_scratch)
