"""Ways to reduce-scatter and to gather one bucket over gloo, for `exchanges.py` to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.shards import shard_of, sum_in_source_order
from tests.benchmarks.rounds import Rounds

Wait = Callable[[], object]
Launch = Callable[[], Wait]

CHUNK_NUMEL = (1 << 20) // 4


@cache
def rounds() -> Rounds:
    """The one stream of this process."""
    return Rounds()


class Exchanges:
    """One bucket of `numel` fp32 elements on this rank, and every way to exchange it.

    Each method launches and returns what waits for the result: this rank's shard of the sum in
    `out`, or `buffer` with all ranks' shards. `number` tells buckets in flight apart.
    """

    driver = ThreadPoolExecutor(1)

    def __init__(self, numel: int, number: int = 0) -> None:
        collectives = new_collectives(torch.device("cpu"))
        assert isinstance(collectives, PairwiseCollectives)
        self.ours = collectives
        self.rank, self.world_size = collectives.world.rank, collectives.world.size
        self.number = number
        self.buffer = torch.empty(numel)
        self.received = torch.empty(numel)
        self.out = torch.empty(numel // self.world_size)
        self.group = collectives.reduce_group

    def methods(self, kind: str) -> dict[str, Launch]:
        """Names and launches of one kind: reduce_scatter, all_gather or all_reduce."""
        if kind == "all_reduce":
            return {"native": self._all_reduce}
        if kind == "reduce_scatter":
            return {
                "pairwise": self._reduce_pairwise,
                "pairwise_chunks": lambda: self._reduce(self._chunks),
                "pairwise_rounds": lambda: self._reduce(self._rounds),
                "pairwise_stream": lambda: self._reduce(self._streamed),
                "all_to_all": self._reduce_all_to_all,
                "native": self._reduce_native,
                "ring_thread": lambda: self._driven(self._reduce_ring),
            }
        return {
            "pairwise": lambda: self.ours.launch_all_gather(self.buffer, self.number).wait,
            "pairwise_chunks": lambda: self._gather(self._chunks),
            "pairwise_rounds": lambda: self._gather(self._rounds),
            "pairwise_stream": lambda: self._gather(self._streamed),
            "native": self._gather_native,
            "ring_thread": lambda: self._driven(self._gather_ring),
        }

    def fill(self) -> None:
        """Values that tell ranks and shards apart."""
        self.buffer.copy_(torch.arange(self.buffer.numel()) % 1000 + self.rank)

    def check(self, kind: str) -> None:
        """Raises if the exchange of `fill`'s values has a wrong result."""
        plain = torch.arange(self.buffer.numel()) % 1000
        ranks = sum(range(self.world_size))
        if kind == "reduce_scatter":
            expected = shard_of(plain * self.world_size + ranks, self.rank, self.world_size)
            assert torch.equal(self.out, expected.float())
        elif kind == "all_reduce":
            assert torch.equal(self.buffer, (plain * self.world_size + ranks).float())
        else:
            owner = torch.arange(self.world_size).repeat_interleave(self.out.numel())
            assert torch.equal(self.buffer, (plain + owner).float())

    def _shard(self, number: int) -> Tensor:
        return shard_of(self.buffer, number % self.world_size, self.world_size)

    def _row(self, number: int) -> Tensor:
        return shard_of(self.received, number % self.world_size, self.world_size)

    def _all_reduce(self) -> Wait:
        return dist.all_reduce(self.buffer, group=self.group, async_op=True).wait

    def _reduce_pairwise(self) -> Wait:
        scratch = self.received[: self.ours.scratch_numel(self.received.numel())]
        return self.ours.launch_reduce_scatter(self.buffer, scratch, self.out, self.number).wait

    def _reduce_native(self) -> Wait:
        return dist.reduce_scatter_tensor(
            self.out, self.buffer, group=self.group, async_op=True
        ).wait

    def _gather_native(self) -> Wait:
        own = self._shard(self.rank)
        return dist.all_gather_into_tensor(self.buffer, own, group=self.group, async_op=True).wait

    def _reduce_all_to_all(self) -> Wait:
        work = dist.all_to_all_single(self.received, self.buffer, group=self.group, async_op=True)
        rows = [self._row(rank) for rank in range(self.world_size)]

        def wait() -> None:
            work.wait()
            sum_in_source_order(rows, self.out)

        return wait

    def _reduce(self, exchange: Callable[..., Wait]) -> Wait:
        arrive = exchange(self._row, self._shard)
        rows = [self._row(rank) for rank in range(self.world_size)]
        rows[self.rank] = self._shard(self.rank)

        def wait() -> None:
            arrive()
            sum_in_source_order(rows, self.out)

        return wait

    def _gather(self, exchange: Callable[..., Wait]) -> Wait:
        return exchange(self._shard, lambda peer: self._shard(self.rank))

    def _chunks(self, row: Callable[[int], Tensor], sent: Callable[[int], Tensor]) -> Wait:
        """Messages of 1 MiB, the first of every peer before the second of any."""
        hops = range(1, self.world_size)
        receives = [self._pieces(row(self.rank - hop), hop, is_receive=True) for hop in hops]
        sends = [self._pieces(sent(self.rank + hop), hop, is_receive=False) for hop in hops]
        posted = [post() for turn in zip(*receives, strict=True) for post in turn]
        posted += [post() for turn in zip(*sends, strict=True) for post in turn]
        return lambda: _wait_all(posted)

    def _pieces(self, whole: Tensor, hop: int, *, is_receive: bool) -> list[Callable[[], Any]]:
        if is_receive:
            return [
                lambda piece=piece: self._receive(piece, hop) for piece in whole.split(CHUNK_NUMEL)
            ]
        return [lambda piece=piece: self._send(piece, hop) for piece in whole.split(CHUNK_NUMEL)]

    def _receive(self, row: Tensor, hop: int) -> Any:
        source = (self.rank - hop) % self.world_size
        return dist.irecv(row, src=source, group=self.group, tag=self.number)

    def _send(self, row: Tensor, hop: int) -> Any:
        peer = (self.rank + hop) % self.world_size
        return dist.isend(row, dst=peer, group=self.group, tag=self.number)

    def _rounds(self, row: Callable[[int], Tensor], sent: Callable[[int], Tensor]) -> Wait:
        """The peer at distance k only when this rank is done with the one at k - 1."""
        hops = range(1, self.world_size)
        receives = [self._receive(row(self.rank - hop), hop) for hop in hops]

        def drive() -> None:
            for hop, receive in zip(hops, receives, strict=True):
                self._send(sent(self.rank + hop), hop).wait()
                receive.wait()

        return self._driven(drive)

    def _streamed(self, row: Callable[[int], Tensor], sent: Callable[[int], Tensor]) -> Wait:
        """The same, in order over all buckets: what `Rounds` does."""
        hops = range(1, self.world_size)
        receives = [self._receive(row(self.rank - hop), hop) for hop in hops]
        sends = [partial(self._send, sent(self.rank + hop), hop) for hop in hops]
        nbytes = sent(self.rank + 1).nbytes * len(sends)
        return rounds().put(receives, sends, nbytes).wait

    def _driven(self, drive: Callable[[], None]) -> Wait:
        future: Future[None] = self.driver.submit(drive)
        return future.result

    def _reduce_ring(self) -> None:
        rank = self.rank
        for turn in range(self.world_size - 1):
            row = self._row(turn)
            receive, send = self._receive(row, 1), self._send(self._shard(rank - turn - 1), 1)
            receive.wait()
            self._shard(rank - turn - 2).add_(row)
            send.wait()
        self.out.copy_(self._shard(rank))

    def _gather_ring(self) -> None:
        for turn in range(self.world_size - 1):
            receive = self._receive(self._shard(self.rank - turn - 1), 1)
            send = self._send(self._shard(self.rank - turn), 1)
            receive.wait()
            send.wait()


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
