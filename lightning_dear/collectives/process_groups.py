"""What gloo's and NCCL's collectives have in common: process groups of our own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.work import (
    Collectives,
    Signal,
    Streams,
    T,
    WireLedger,
    Work,
    WorkObserver,
    ranks_on_each_host,
    shard_of,
)

# Weak, since nobody is to be kept by this once its training is over.
alive: WeakSet[GroupCollectives] = WeakSet()
"""All that may hold groups."""

reusable_groups: dict[timedelta | None, tuple[Any, list[Any]]] = {}
"""Timeout -> the default group and ours made under it; else every fit would open new sockets."""

Waits = Sequence[tuple[Any, ...]]
"""Torch's own works, each behind its peer, or None where only the backend knows whom it waits for.
Behind the work stands what must be held until then."""

_AT_ONCE = timedelta(milliseconds=1)


@dataclass(eq=False)
class GroupCollectives(Collectives):
    """Rank, size, ledger and the blocking object exchange, shared by both backends.

    Attributes:
        reduce_group: Process group of the reduce-scatters.
        gather_group: Process group of the all-gathers.
        object_group: Process group of `all_gather_object`, on gloo. Nothing else in it may be
            matched by its order: a rank that broke off its backward has launched less than others.
        rank: This rank in all groups.
        world_size: Number of ranks in all.
        calls: What is called to send and receive: torch.distributed, or what stands in for it,
            where messages are late on purpose or a device is simulated.
        streams: Those of the parameters' device.
        hosts: See `Collectives`.
    """

    reduce_group: Any
    gather_group: Any
    object_group: Any
    rank: int
    world_size: int
    calls: Any = dist
    streams: Streams = field(default_factory=Streams)
    hosts: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.ledger, self.signal = WireLedger(), Signal()
        self.observer: WorkObserver | None = None
        self.was_discarded = self.was_aborted = self.has_given_up = False
        self._size = ranks_on_each_host(self.hosts)
        alive.add(self)

    def _column(self, buffer: Tensor, rank: int | None = None) -> list[Tensor]:
        """The shards of all ranks with the place of `rank` on their hosts, by host; None: ours."""
        first = (self.rank if rank is None else rank) % self._size
        places = range(first, self.world_size, self._size)
        return [shard_of(buffer, place, self.world_size) for place in places]

    @property
    def device_groups(self) -> list[Any]:
        """Process groups for what a device sends."""
        return [self.reduce_group, self.gather_group]

    def forget_groups(self) -> None:
        """Lets go of them: nothing can be sent any more."""
        self.reduce_group = self.gather_group = self.object_group = None

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
        waits = self.start("all_reduce", self.reduce_group, buffer)
        self.ledger.all_reduce_bytes += 2 * self.ring_bytes(buffer)
        # In this lane since it takes the reduce-scatters' place in backward.
        return self.new_work("reduce_scatter", f"bucket {bucket}", waits)

    def start(self, call: str, group: Any, *arguments: Any) -> Waits:
        """Launches the backend's own collective `call`, which does not say whom it waits for."""
        self.check()
        work = getattr(self.calls, call)(*arguments, group=group, async_op=True)
        return [(None, work, arguments)]

    @override
    def check(self) -> None:
        if self.was_aborted:
            raise RuntimeError("another rank has failed, and the communicator was aborted")

    def ring_bytes(self, buffer: Tensor) -> int:
        """What a rank sends to reduce-scatter, or to gather, the flat `buffer`."""
        return buffer.nbytes // self.world_size * (self.world_size - 1)

    @override
    def discard(self) -> None:
        self.was_discarded = True
        reusable_groups.clear()

    def new_work(
        self, lane: str, name: str, waits: Waits, finish: Callable[[], object] | None = None
    ) -> Work:
        """A work that waits for all of `waits`, and is seen by the observer; see `Work`."""
        arrive = self.arriving(lane, name, waits)
        work = Work(self.observed(lane, name, arrive) if waits else arrive, finish)
        work.is_done = not waits and finish is None
        return work

    def observed(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """`arrive`, seen by the observer if there is one."""
        # Read once: a thread that gathers may be here when a recording ends.
        observe = self.observer
        return observe(lane, name, arrive) if observe else arrive

    def arriving(self, lane: str, name: str, waits: Waits) -> Callable[[], None]:
        """What waits for all of `waits`, seen by nobody.

        What fails in it names the peer. Afterwards nobody waits for anything else: who was silent
        for a whole timeout would be waited for again.
        """

        def arrive() -> None:
            for peer, work, *_ in waits:
                begin_s = time.monotonic()
                try:
                    self.check()
                    work.wait(*([_AT_ONCE] if self.has_given_up else []))
                except RuntimeError as error:
                    self.has_given_up = True
                    how = _blame(peer, time.monotonic() - begin_s, str(error))
                    raise RuntimeError(f"{name}, {lane.replace('_', '-')}: {how}") from error

        return arrive


def _blame(peer: int | None, late_s: float, said: str) -> str:
    """Who was silent, or has closed the connection, in words that `FailureBoard` reads as well."""
    who = f"rank {peer}" if peer is not None else "a rank that the backend does not name"
    if re.search("[Tt]imed out|[Tt]imeout", said):
        return f"nothing from {who} for {late_s:.0f} s: link or rank. ({said})"
    is_closed = re.search("closed|reset|[Bb]roken pipe", said)
    return (f"connection closed by {who}" if is_closed else f"with {who}") + f". ({said})"
