"""Codecs whose blocks of elements have statistics of their own, which travel inside the row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Codec, field, padded_bytes
from lightning_dear.compression.tiling import block_tiles, check_block_size


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
        check_block_size(self.name, self.block_size)

    @override
    def wire_bytes(self, numel: int) -> int:
        return padded_bytes(self._end(numel))

    def _begin(self, numel: int) -> int:
        """First byte of the values: statistics stand in front of them."""
        return -(-numel // self.block_size) * self._num_statistics * 4

    def _end(self, numel: int) -> int:
        return self._begin(numel) + -(-numel * self._bits // 8)

    def _clear_padding(self, rows: Tensor, wire: Tensor) -> None:
        wire[:, self._end(rows.shape[1]) :].zero_()

    def _tiles(self, rows: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Views [r, b, elements] of `rows`, [r, b, bytes] of values, and of the statistics.

        The latter are [r, b, num_statistics] fp32.
        """
        begin, end = self._begin(rows.shape[1]), self._end(rows.shape[1])
        shape = (len(rows), begin // 4 // self._num_statistics, self._num_statistics)
        statistics = field(wire, torch.float32, 0, begin // 4).view(shape)
        values, size = wire[:, begin:end], self.block_size
        return block_tiles(rows, values, statistics, block_size=size, bits=self._bits)
