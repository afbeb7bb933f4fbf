"""Equal shards of a flat buffer, and how shards of several ranks become one."""

from collections.abc import Sequence

import torch
from torch import Tensor

SUMMED_IN_FP32 = (torch.float16, torch.bfloat16)


def shard_of(buffer: Tensor, number: int, num_shards: int) -> Tensor:
    """Returns a view of shard `number` of the flat `buffer`, cut into `num_shards` equal shards."""
    size = buffer.numel() // num_shards
    return buffer[number * size : (number + 1) * size]


def take_largest(rows: Sequence[Tensor], out: Tensor) -> None:
    """Replaces each element of `out` by the maximum of itself and that element of all rows."""
    for row in rows:
        torch.maximum(out, row, out=out)


def sum_in_source_order(rows: Sequence[Tensor], out: Tensor, size: int = 1) -> None:
    """Writes `rows[0] + rows[1] + ...`, added up from left to right, into `out`.

    The order is that of the ranks, so that the bits depend only on the number of ranks, and on how
    many a host has. 16-bit rows are summed in fp32, and rounded once if `out` has 16 bits. May
    overwrite any row.

    Args:
        rows: Rows of all ranks, or of all hosts, in their order.
        out: One of the rows, or an fp32 tensor.
        size: Number of ranks on a host. Each host's rows are summed first, and rounded to their
            dtype; then the hosts' sums are summed.
    """
    if size > 1:
        for begin in range(0, len(rows), size):
            sum_in_source_order(rows[begin : begin + size], rows[begin])
        rows = rows[::size]
    total = rows[0]
    if total.dtype in SUMMED_IN_FP32:
        total = total.float()
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total)
        return
    # Only the last sum is written to `out`, which may be a row that has not been added yet.
    for number, row in enumerate(rows[1:], start=2):
        torch.add(total, row, out=out if number == len(rows) else total)
    if len(rows) == 1 and total.data_ptr() != out.data_ptr():
        out.copy_(total)
