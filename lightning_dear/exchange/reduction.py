"""How the bytes that all ranks have encoded of one shard become its sum, at the shard's owner.

    all-to-all, decode world_size rows, sum them        any codec
    reduce-scatter, which sums, decode one row          codecs whose bytes add up

Both send as many bytes. The latter decodes fewer, and is what backends are fastest at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import Collectives, Work, shard_of
from lightning_dear.compression import Codec


class Reduction(ABC):
    """Moves the bytes of one bucket to the shards' owners.

    Args:
        collectives: What moves them.
        outgoing: [world_size, nbytes] uint8, contiguous: row r is for rank r.

    Attributes:
        wires: [n, nbytes] uint8: after `wait`, what is to be decoded; the sum of the n rows of
            numbers that come out is the sum over ranks.
        rows: Which n of a bucket's world_size rows to decode them into.
    """

    wires: Tensor
    rows: slice

    def __init__(self, collectives: Collectives, outgoing: Tensor) -> None:
        self._collectives, self._outgoing = collectives, outgoing

    @abstractmethod
    def expect(self, number: int) -> None:
        """Lets others' bytes arrive from now on; `launch` must follow, of the same number."""

    @abstractmethod
    def launch(self, number: int) -> Work:
        """Starts sending `outgoing`, which belongs to the collective until `wait`. Does not block.

        Args:
            number: The bucket's among all that travel at once, equal on all ranks.
        """


class DecodeThenSum(Reduction):
    """Any codec's: bytes arrive as they are, those of each rank for themselves."""

    def __init__(self, collectives: Collectives, outgoing: Tensor) -> None:
        super().__init__(collectives, outgoing)
        self.wires = torch.empty_like(outgoing)
        self.rows = slice(0, collectives.world_size)

    @override
    def expect(self, number: int) -> None:
        self._collectives.expect_all_to_all(self.wires, number)

    @override
    def launch(self, number: int) -> Work:
        return self._collectives.launch_all_to_all(self._outgoing, self.wires, number)


class SumThenDecode(Reduction):
    """Where bytes are fp32 numbers that add up: summed as dense gradients are, in fp32.

    The sum takes the place of this rank's own row of `outgoing`.
    """

    def __init__(self, collectives: Collectives, outgoing: Tensor) -> None:
        super().__init__(collectives, outgoing)
        rank, world_size = collectives.rank, collectives.world_size
        self._numbers = outgoing.view(torch.float32).view(-1)
        self._received = self._numbers.new_empty(collectives.scratch_numel(self._numbers.numel()))
        self._sum = shard_of(self._numbers, rank, world_size)
        self.rows = slice(rank, rank + 1)
        self.wires = outgoing[self.rows]

    @override
    def expect(self, number: int) -> None:
        self._collectives.expect_reduce_scatter(self._received, number)

    @override
    def launch(self, number: int) -> Work:
        launch = self._collectives.launch_reduce_scatter
        return launch(self._numbers, self._received, self._sum, number)


def new_reduction(codec: Codec, collectives: Collectives, outgoing: Tensor) -> Reduction:
    """What moves the bytes that `codec` writes into `outgoing`."""
    kind = SumThenDecode if codec.is_summable else DecodeThenSum
    return kind(collectives, outgoing)
