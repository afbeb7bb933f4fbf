"""What gloo's and NCCL's collectives have in common: process groups of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import Collectives, Signal, T, WireLedger, Work, WorkObserver

# Weak, since nobody is to be kept by this once its training is over.
alive: WeakSet[GroupCollectives] = WeakSet()
"""All that may hold groups."""

reusable_groups: dict[timedelta | None, tuple[Any, list[Any]]] = {}
"""Timeout -> the default group and ours made under it; else every fit would open new sockets."""


class GroupCollectives(Collectives):
    """Rank, size, ledger and the blocking object exchange, shared by both backends.

    Args:
        reduce_group: Process group of the reduce-scatters.
        gather_group: Process group of the all-gathers.
        object_group: Process group of `all_gather_object`, on gloo. Nothing else in it may be
            matched by its order: a rank that broke off its backward has launched less than others.
        rank: This rank in all groups.
        world_size: Number of ranks in all.
        calls: What is called to send and receive: torch.distributed, or what stands in for it,
            where messages are late on purpose or a device is simulated.
    """

    def __init__(
        self,
        reduce_group: Any,
        gather_group: Any,
        object_group: Any,
        rank: int,
        world_size: int,
        calls: Any = dist,
    ) -> None:
        self.calls = calls
        self.reduce_group = reduce_group
        self.gather_group = gather_group
        self.object_group = object_group
        self.rank = rank
        self.world_size = world_size
        self.ledger = WireLedger()
        self.observer: WorkObserver | None = None
        self.signal = Signal()
        self.was_discarded = False
        alive.add(self)

    @override
    def all_gather_object(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        self.calls.all_gather_object(values, value, group=self.object_group)
        return values

    @override
    def launch_all_reduce(self, buffer: Tensor, bucket: int) -> Work:
        if self.world_size == 1:
            return Work.done()
        work = self.calls.all_reduce(buffer, group=self.reduce_group, async_op=True)
        self.ledger.all_reduce_bytes += 2 * self.ring_bytes(buffer)
        # In this lane since it takes the reduce-scatters' place in backward.
        return self.new_work("reduce_scatter", f"bucket {bucket}", [work])

    def ring_bytes(self, buffer: Tensor) -> int:
        """What a rank sends to reduce-scatter, or to gather, the flat `buffer`."""
        return buffer.nbytes // self.world_size * (self.world_size - 1)

    @override
    def discard(self) -> None:
        self.was_discarded = True
        reusable_groups.clear()

    def new_work(
        self, lane: str, name: str, waits: Sequence[Any], finish: Callable[[], object] | None = None
    ) -> Work:
        """A work that waits for all of `waits`, and is seen by the observer; see `Work`."""

        def arrive() -> None:
            for work in waits:
                work.wait()

        # Read once: a thread that gathers may be here when a recording ends.
        observe = self.observer
        observed = observe(lane, name, arrive) if observe and waits else arrive
        work = Work(observed, finish)
        work.is_done = not waits and finish is None
        return work
