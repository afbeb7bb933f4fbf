"""The only module that talks to torch.distributed: what moves a bucket, asynchronously.

Two process groups of our own, one for reduce-scatters and one for all-gathers, so that the host's
collectives on the default group (Lightning broadcasts a flag before every batch) never queue
behind ours, nor ours behind theirs.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dear.message_delay import DelayedSends, message_delay_s
from lightning_dear.summing import assign, nbytes_of, shard_of, sum_in_source_order
from lightning_dear.work import Collectives, T, WireLedger, Work, WorkObserver

_FLAGS_TAG = 1 << 20
_BUFFERS_TAG = 1 << 21


_alive: WeakSet[_Groups] = WeakSet()


class _Groups(Collectives):
    """Rank, size, ledger and the blocking object exchange, shared by both backends."""

    @override
    def expect_reduce_scatter(self, received: Tensor, bucket: int) -> None:
        return None

    @override
    def expect_all_gather(self, buffer: Tensor, bucket: int) -> None:
        return None

    def __init__(self, reduce_group: Any, gather_group: Any, rank: int, world_size: int) -> None:
        self.reduce_group = reduce_group
        self.gather_group = gather_group
        self.rank = rank
        self.world_size = world_size
        self.ledger = WireLedger()
        self.observer: WorkObserver | None = None
        _alive.add(self)

    @override
    def all_gather_object(self, value: T) -> list[T]:
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.reduce_group)
        return values

    @override
    def launch_all_reduce(self, buffer: Tensor, bucket: int) -> Work:
        if self.world_size == 1:
            return Work.done()
        work = dist.all_reduce(buffer, group=self.reduce_group, async_op=True)
        self.ledger.all_reduce_bytes += 2 * self._ring_bytes(buffer)
        # In this lane since it takes the reduce-scatters' place in backward.
        return self._work("reduce_scatter", f"bucket {bucket}", [work])

    def _ring_bytes(self, buffer: Tensor) -> int:
        return buffer.nbytes // self.world_size * (self.world_size - 1)

    @override
    def discard(self) -> None:
        _reusable.clear()

    def _work(
        self, lane: str, name: str, waits: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> Work:
        def arrive() -> None:
            for work in waits:
                work.wait()

        observed = self.observer(lane, name, arrive) if self.observer and waits else arrive
        work = Work(observed, finish)
        work.is_done = not waits and finish is None
        return work


class PairwiseCollectives(_Groups):
    """Point-to-point exchange for gloo, which has no reduce-scatter of its own.

    gloo's `reduce_scatter` runs a whole all-reduce; sending every shard straight to its owner moves
    (P-1)/P of the buffer instead. Receives are posted before sends (a send without a posted receive
    costs 1.7x), peers are rotated so that ranks do not all send to rank 0 first, and gloo's own
    threads make the progress. With one rank there are no peers and every call is a no-op.

    Args:
        reduce_group: Process group of the reduce-scatters.
        gather_group: Process group of the all-gathers.
        rank: This rank in both groups.
        world_size: Number of ranks in both.
        message_delay_s: Seconds by which every message comes late, for measurements: see
            `DelayedSends` for what that emulates and what it does not. 0 costs nothing.
    """

    reads_flags_freely = True

    def __init__(
        self,
        reduce_group: Any,
        gather_group: Any,
        rank: int,
        world_size: int,
        *,
        message_delay_s: float = 0.0,
    ) -> None:
        super().__init__(reduce_group, gather_group, rank, world_size)
        self._late = DelayedSends(message_delay_s) if message_delay_s else None
        self._expected: dict[tuple[str, int], tuple[int, list[Any]]] = {}

    def _peers(self) -> list[int]:
        return [(self.rank + hop) % self.world_size for hop in range(1, self.world_size)]

    def _sources(self) -> list[int]:
        return [(self.rank - hop) % self.world_size for hop in range(1, self.world_size)]

    @override
    def scratch_numel(self, numel: int) -> int:
        return numel // self.world_size * (self.world_size - 1)

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        own = shard_of(buffer, self.rank, self.world_size)
        rows = self._reduce_rows(received)
        outgoing = {peer: shard_of(buffer, peer, self.world_size) for peer in self._peers()}
        receives = self._take_expected("reduce_scatter", received, bucket)
        waits = self._exchange(rows, outgoing, self.reduce_group, bucket, receives)
        self.ledger.reduce_scatter_bytes += nbytes_of(outgoing)
        by_source = [row for _, row in sorted({**rows, self.rank: own}.items(), key=itemgetter(0))]
        return self._work(
            "reduce_scatter",
            f"bucket {bucket}",
            waits,
            lambda: sum_in_source_order(by_source, out),
        )

    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        own = shard_of(buffer, self.rank, self.world_size)
        rows = self._gather_rows(buffer)
        outgoing = dict.fromkeys(self._peers(), own)
        receives = self._take_expected("all_gather", buffer, bucket)
        waits = self._exchange(rows, outgoing, self.gather_group, bucket, receives)
        self.ledger.all_gather_bytes += nbytes_of(outgoing)
        return self._work("all_gather", f"bucket {bucket}", waits)

    @override
    def launch_any(self, flags: Tensor) -> Work:
        rows = {source: torch.empty_like(flags) for source in self._sources()}
        outgoing = dict.fromkeys(self._peers(), flags.clone())
        waits = self._exchange(rows, outgoing, self.reduce_group, _FLAGS_TAG)
        self.ledger.other_bytes += nbytes_of(outgoing)

        def combine() -> None:
            for row in rows.values():
                torch.maximum(flags, row, out=flags)

        return self._work("other", "used parameters", waits, combine)

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        rows = {} if self.rank == 0 else {0: buffer}
        outgoing = dict.fromkeys(self._peers(), buffer) if self.rank == 0 else {}
        waits = self._exchange(rows, outgoing, self.gather_group, _BUFFERS_TAG + index)
        self.ledger.other_bytes += nbytes_of(outgoing)
        return self._work("other", "module buffers", waits)

    @override
    def expect_reduce_scatter(self, received: Tensor, bucket: int) -> None:
        rows = self._reduce_rows(received)
        self._expect("reduce_scatter", received, rows, self.reduce_group, bucket)

    @override
    def expect_all_gather(self, buffer: Tensor, bucket: int) -> None:
        self._expect("all_gather", buffer, self._gather_rows(buffer), self.gather_group, bucket)

    def _reduce_rows(self, received: Tensor) -> dict[int, Tensor]:
        return {
            source: shard_of(received, place, self.world_size - 1)
            for place, source in enumerate(self._sources())
        }

    def _gather_rows(self, buffer: Tensor) -> dict[int, Tensor]:
        return {peer: shard_of(buffer, peer, self.world_size) for peer in self._sources()}

    def _expect(
        self, lane: str, buffer: Tensor, rows: dict[int, Tensor], group: Any, tag: int
    ) -> None:
        if (lane, tag) not in self._expected:
            self._expected[lane, tag] = buffer.data_ptr(), _receive(rows, group, tag)

    def _take_expected(self, lane: str, buffer: Tensor, tag: int) -> list[Any] | None:
        data_ptr, receives = self._expected.pop((lane, tag), (0, None))
        if receives is not None and data_ptr != buffer.data_ptr():
            raise RuntimeError(f"bucket {tag} is expected in another buffer: {lane}")
        return receives

    def _exchange(
        self,
        rows: dict[int, Tensor],
        outgoing: dict[int, Tensor],
        group: Any,
        tag: int,
        receives: list[Any] | None = None,
    ) -> list[Any]:
        if receives is None:
            receives = _receive(rows, group, tag)
        sends = [self._send(row, peer, group, tag) for peer, row in outgoing.items()]
        return [*receives, *sends]

    def _send(self, row: Tensor, peer: int, group: Any, tag: int) -> Any:
        if self._late is None:
            return dist.isend(row, group=group, dst=peer, tag=tag)
        return self._late.send(partial(dist.isend, row, group=group, dst=peer, tag=tag))


class NativeCollectives(_Groups):
    """The backend's own reduce-scatter and all-gather (NCCL): stream-ordered, no host block.

    NCCL orders a collective behind the stream that launches it, and `wait` orders the current
    stream behind the collective, so neither side ever blocks the host. Order is the same on all
    ranks within a group and between both groups, because launches follow the plan.
    """

    reads_flags_freely = False

    @override
    def scratch_numel(self, numel: int) -> int:
        return 0

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        own = shard_of(buffer, self.rank, self.world_size)
        work = _reduce_scatter(own, buffer, group=self.reduce_group, async_op=True)
        self.ledger.reduce_scatter_bytes += self._ring_bytes(buffer)
        finish = None if out.dtype == own.dtype else partial(assign, out, own)
        return self._work("reduce_scatter", f"bucket {bucket}", [work], finish)

    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        own = shard_of(buffer, self.rank, self.world_size)
        work = _all_gather(buffer, own, group=self.gather_group, async_op=True)
        self.ledger.all_gather_bytes += self._ring_bytes(buffer)
        return self._work("all_gather", f"bucket {bucket}", [work])

    @override
    def launch_any(self, flags: Tensor) -> Work:
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.reduce_group, async_op=True)
        self.ledger.other_bytes += 2 * self._ring_bytes(flags)
        return self._work("other", "used parameters", [work])

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        work = dist.broadcast(buffer, src=0, group=self.gather_group, async_op=True)
        self.ledger.other_bytes += buffer.nbytes
        return self._work("other", "module buffers", [work])


# torch 2.13 renamed both; the old names warn there and are the only ones before it.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _receive(rows: dict[int, Tensor], group: Any, tag: int) -> list[Any]:
    return [dist.irecv(row, group=group, src=source, tag=tag) for source, row in rows.items()]


def new_collectives(device: torch.device, timeout: timedelta | None = None) -> Collectives:
    """Both process groups over all ranks, new or those of the fit before. Collective, blocks.

    Args:
        device: Where parameters live.
        timeout: How long a collective may take before it raises; None keeps torch's default.

    Returns:
        Collectives of one rank if torch.distributed is not initialised.

    Raises:
        ValueError: If parameters on an accelerator are to travel through gloo.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return PairwiseCollectives(None, None, 0, 1)
    backend = dist.get_backend()
    if backend == "gloo" and device.type != "cpu":
        raise ValueError(
            f"strategy='dear' cannot send parameters on {device} through gloo;"
            " use process_group_backend='nccl'."
        )
    groups = _process_groups(timeout)
    place = groups[0], groups[1], dist.get_rank(), dist.get_world_size()
    collectives: Collectives
    if backend == "gloo":
        collectives = PairwiseCollectives(*place, message_delay_s=message_delay_s())
    else:
        collectives = NativeCollectives(*place)
    _connect(collectives, device)
    return collectives


_reusable: dict[timedelta | None, tuple[Any, list[Any]]] = {}
"""Timeout -> the default group and ours made under it; else every fit would open new sockets."""


def _process_groups(timeout: timedelta | None) -> list[Any]:
    default_group, groups = _reusable.get(timeout, (None, []))
    can_reuse: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(can_reuse, default_group is dist.group.WORLD)
    if not all(can_reuse):
        groups = [dist.new_group(timeout=timeout) for _ in range(2)]
        _reusable.clear()
        _reusable[timeout] = dist.group.WORLD, groups
    return groups


def forget_process_groups() -> None:
    """Drops every reference to our groups, so that torch can end their threads.

    For the end of a job, so that no group outlives `destroy_process_group` until the interpreter
    is taken down. Afterwards nothing can be sent through collectives made before.
    """
    _reusable.clear()
    for one in _alive:
        one.reduce_group = one.gather_group = None


atexit.register(forget_process_groups)


def _connect(collectives: Collectives, device: torch.device) -> None:
    """Opens every connection now, in one order, instead of in the midst of the first backward."""
    collectives.launch_any(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
    collectives.launch_all_gather(torch.zeros(collectives.world_size, device=device), 0).wait()
    collectives.ledger = WireLedger()
