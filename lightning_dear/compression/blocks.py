"""How codecs work through long rows, in tiles and in blocks.

A tile is a part of the rows that fits into a CPU's cache. A block is a fixed number of neighbouring
elements of a row that share statistics, such as a scale.
"""

import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, padded_bytes
from lightning_dear.torch_modes import saves_calls

TILE_ELEMENTS = 1 << 19
"""Most elements that a codec works on at once on a CPU: 2 MiB of fp32, which stay in its cache."""

BLOCK_SIZES = range(8, 65536 + 1, 8)
"""Valid block sizes, in elements. So a block of one-bit elements is a whole number of bytes, and a
block is at most 256 KiB of fp32."""


Tiles = Iterator[tuple[Tensor, ...]]
"""Iterator over tiles. A tile is a tuple of views, one of each tensor: the same part of all."""


def tiles(*tensors: Tensor, num_scratch: int = 0) -> Tiles:
    """Cuts several tensors in the same way, into tiles of at most `TILE_ELEMENTS` elements.

    A tile is several short rows, or a part of one long row. It holds at least one item, even if an
    item has more than `TILE_ELEMENTS` elements. On accelerators there is one tile with everything,
    since a kernel launch costs more there than a pass over memory.

    Args:
        tensors: [R, items, ...] each, with the same R and number of items. Only the elements of the
            first tensor are counted.
        num_scratch: Number of temporary tensors to add to each tile.

    Yields:
        Views of all tensors, then temporaries of the shape and dtype of the first view, contiguous
        and uninitialized. Yields nothing if the first tensor is empty. The next tile may overwrite
        the temporaries, as it may use the same memory.
    """
    first = tensors[0]
    if not first.numel():
        return
    parts: Iterable[tuple[Tensor, ...]] = (tensors,)
    # A short tensor is not cut: cutting would take a third of the codec's time.
    if first.device.type == "cpu" and first.numel() > TILE_ELEMENTS:
        num_rows, num_items = first.shape[:2]
        num_elements = first.numel() // (num_rows * num_items)
        width = max(1, min(num_items, TILE_ELEMENTS // num_elements))
        height = max(1, TILE_ELEMENTS // (width * num_elements))
        # `split`, since slicing would take microseconds for each tile, as long as some operations
        # on a tile.
        parts = (
            part
            for group in zip(*(torch.split(each, height) for each in tensors), strict=True)
            for part in zip(*(torch.split(each, width, 1) for each in group), strict=True)
        )
    scratch: tuple[Tensor, ...] = ()
    for part in parts:
        # Tiles of one shape use the same memory: on a CPU, mapping new pages would cost more time
        # than the codec's computations.
        if num_scratch and (not scratch or scratch[0].shape != part[0].shape):
            scratch = part[0].new_empty((num_scratch, *part[0].shape)).unbind()
        yield *part, *scratch


def largest_of_blocks(tile: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns max|x| of each block of `tile`.

    Args:
        tile: [r, b, elements of a block]; not mutated.
        out: [r, b, 1], overwritten with the result. None means a new tensor.

    Returns:
        [r, b, 1]: `out`, or a new tensor.
    """
    if saves_calls(tile.device):
        norm: Tensor = torch.linalg.vector_norm(tile, math.inf, -1, keepdim=True, out=out)
        return norm
    # On a CPU the norm is slow. `tile.abs().amax(...)` would need a temporary as large as the tile.
    above, below = torch.amax(tile, -1, True, out=out), torch.amin(tile, -1, True)
    return torch.maximum(above, below.neg_(), out=out)


def block_tiles(
    rows: Tensor, values: Tensor, *statistics: Tensor, block_size: int, bits: int, num_scratch: int
) -> Tiles:
    """Cuts rows into blocks, and groups the blocks into `tiles`.

    If the last block of the rows is shorter than the others, it is in separate tiles.

    Args:
        rows: [R, numel].
        values: [R, ceil(numel x bits / 8)] uint8, the bytes of the encoded elements.
        statistics: [R, number of blocks, ...] each.
        block_size: Elements of a block; block_size x bits must be a multiple of 8.
        bits: Bits of an encoded element.
        num_scratch: Number of temporary tensors to add to each tile.

    Yields:
        Views of `rows` [r, b, elements of a block], `values` [r, b, bytes of a block] and
        `statistics` [r, b, ...], then temporaries of the shape and dtype of the view of `rows`. r
        is the number of rows in the tile, and b the number of blocks in each.
    """
    num_blocks, short = divmod(rows.shape[1], block_size)
    elements, nbytes = num_blocks * block_size, num_blocks * block_size * bits // 8
    if num_blocks:
        shape = (len(rows), num_blocks)
        blocks = rows[:, :elements].view(*shape, block_size)
        coded = values[:, :nbytes].view(*shape, block_size * bits // 8)
        whole = (each[:, :num_blocks] for each in statistics)
        yield from tiles(blocks, coded, *whole, num_scratch=num_scratch)
    if short:
        ends = rows[:, None, elements:], values[:, None, nbytes:]
        last = (each[:, num_blocks:] for each in statistics)
        yield from tiles(*ends, *last, num_scratch=num_scratch)


class BlockCodec(Codec):
    """Base of codecs that send fp32 statistics of each block, and a few bits for each element.

    Bytes of a row: `_num_statistics` fp32 values for each block, then the encoded elements, `_bits`
    bits each, then zeros up to a multiple of 4 bytes. The last block of a row may have fewer
    elements than the others; its statistics are computed from these.

    Args:
        block_size: Number of elements that share statistics: a multiple of 8 from 8 to 65536.

    Raises:
        ValueError: If `block_size` is invalid.
    """

    _bits: ClassVar[int]
    _num_statistics: ClassVar[int] = 1

    # A dataclass field of the subclasses, which have different defaults.
    block_size: int

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = f"a multiple of {BLOCK_SIZES.step} from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
        is_valid = isinstance(self.block_size, int) and self.block_size in BLOCK_SIZES
        self._check_value("block_size", sizes, is_valid=is_valid)

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(self._ends(numel)[1])

    def _ends(self, numel: int) -> tuple[int, int]:
        """Returns where the encoded elements begin and end in a row's bytes, as two byte indices.

        Statistics are before them, and zeros behind them.
        """
        begin = -(-numel // self.block_size) * self._num_statistics * 4
        return begin, begin + -(-numel * self._bits // 8)

    def _tiles(self, rows: Tensor, wire: Tensor, num_scratch: int = 0) -> Tiles:
        """Yields tiles of `rows`, of their encoded elements, and of their fp32 statistics.

        A tile is rows [r, b, elements], encoded elements [r, b, bytes], statistics
        [r, b, number of statistics], and then `num_scratch` temporaries in the shape of the rows;
        see `tiles`. Yields nothing if the rows have no elements.
        """
        begin, end = self._ends(rows.shape[1])
        # torch refuses to view empty rows of bytes as wider values.
        if begin:
            shape = (len(rows), -1, self._num_statistics)
            parts = rows, wire[:, begin:end], wire[:, :begin].view(torch.float32).view(shape)
            size, bits = self.block_size, self._bits
            yield from block_tiles(*parts, block_size=size, bits=bits, num_scratch=num_scratch)
