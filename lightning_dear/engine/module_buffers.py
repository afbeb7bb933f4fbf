"""Module buffers (BatchNorm statistics) follow rank 0, as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from lightning_dear.collectives.work import Collectives, Work


class BufferBroadcast:
    """Broadcasts all buffers of a module from rank 0, one flat message per dtype.

    DistributedDataParallel does so in front of each forward and waits; we launch it when the step
    begins, behind the last gradients, and wait when the step ends.

    Args:
        module: Whose buffers; ranks other than 0 have theirs overwritten.
        collectives: What moves them.
    """

    def __init__(self, module: Module, collectives: Collectives) -> None:
        self._module = module
        self._collectives = collectives
        self._launched: list[tuple[Work, Tensor, Sequence[Tensor]]] = []

    @torch.no_grad()
    def launch(self) -> None:
        """Starts the broadcast of the buffers' present values. Does not block."""
        if self._collectives.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for number, buffers in enumerate(by_dtype.values()):
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            work = self._collectives.launch_broadcast(flat, number)
            self._launched.append((work, flat, buffers))

    @property
    def is_under_way(self) -> bool:
        """Whether a broadcast has been launched and not been waited for."""
        return bool(self._launched)

    @torch.no_grad()
    def wait(self) -> None:
        """Blocks until the broadcast is here, then writes rank 0's values into the buffers."""
        for work, flat, buffers in self._launched:
            work.wait()
            if self._collectives.rank != 0:
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))
        self._launched.clear()
