"""Sums what ranks have sent: left to right in rank order, so that bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shard_of(buffer: Tensor, number: int, num_shards: int) -> Tensor:
    """View of the `number`-th of `num_shards` equal, contiguous parts of the flat `buffer`."""
    size = buffer.numel() // num_shards
    return buffer[number * size : (number + 1) * size]


def nbytes_of(rows: dict[int, Tensor]) -> int:
    """Bytes of all rows together."""
    return sum(row.nbytes for row in rows.values())


def sum_in_source_order(rows: Sequence[Tensor], out: Tensor) -> None:
    """Writes `rows[0] + rows[1] + ...` into `out` (one of the rows, or fp32), left to right.

    Left to right in rank order, so that the bits depend on the number of ranks alone. 16-bit rows
    are summed in fp32, and rounded once if `out` is as narrow. May overwrite any row.
    """
    total = rows[0]
    if total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total)
        return
    for number, row in enumerate(rows[1:], start=2):
        torch.add(total, row, out=out if number == len(rows) else total)
    if len(rows) == 1 and total.data_ptr() != out.data_ptr():
        out.copy_(total)


def assign(out: Tensor, value: Tensor) -> None:
    """Copies `value` into `out`, which may have another dtype."""
    out.copy_(value)
