"""A sparse all-reduce of one bucket among the threads of one process, and what is true of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import allocate
from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from lightning_dear.compression import GTopk, OkTopk, SparseAllReduce
from lightning_dear.exchange import Traffic, new_exchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning.plan import BucketPlan, BucketSpec, Slice, aligned

ROUNDING = 1e-6
"""Of the largest number: what adding up a few ranks' fp32 numbers rounds off."""


class Room:
    """Where the ranks of one process meet.

    Attributes:
        boxes: Source -> target -> messages on their way.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=20.0)
        self._brought: list[Any] = [None] * world_size
        ranks = range(world_size)
        self.boxes: list[list[Queue[Tensor]]] = [[Queue() for _ in ranks] for _ in ranks]

    def swap(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values, in rank order. Blocks."""
        self._brought[rank] = value
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        return brought

    def leave(self) -> None:
        """Nobody need wait for this rank any more."""
        self._barrier.abort()


class InRoom:
    """What a sparse exchange needs of `Collectives`, among threads; every launch blocks."""

    wait_blocks_host = True
    showing = None

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self.world = room, World(rank, room.world_size)
        self.ledger = Counter()

    def scratch_numel(self, numel: int) -> int:
        return numel

    def launch_messages(
        self,
        lane: str,
        messages: Mapping[int, Tensor],
        sources: Collection[int],
        incoming: Tensor,
        bucket: int,
        num_notes: int = 1,
    ) -> Work:
        for target, message in messages.items():
            if target != self.world.rank:
                self._room.boxes[self.world.rank][target].put(message)
        for source in {*sources} - {self.world.rank}:
            message = self._room.boxes[source][self.world.rank].get(timeout=20.0)
            incoming[source, : len(message)] = message
        return Work.done()

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        total = sum(self._room.swap(self.world.rank, buffer.clone()))
        assert isinstance(total, Tensor)
        out.copy_(total.view(self.world.size, -1)[self.world.rank])
        return Work.done()

    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        rows = buffer.view(self.world.size, -1)
        for source, row in enumerate(
            self._room.swap(self.world.rank, rows[self.world.rank].clone())
        ):
            rows[source] = row
        return Work.done()

    def launch_all_reduce(self, buffer: Tensor, bucket: int) -> Work:
        buffer.copy_(sum(self._room.swap(self.world.rank, buffer.clone())))  # type: ignore[arg-type]
        return Work.done()


class Rank:
    """One rank's exchange of a bucket that is one vector."""

    def __init__(self, codec: SparseAllReduce, numel: int, collectives: Any) -> None:
        padded_numel = aligned(numel, collectives.world.size)
        spec = BucketSpec("one", (Slice(0, 0, numel, 0),), padded_numel, 4)
        plan = BucketPlan("one", collectives.world.size, (spec,), (0,))
        weight = Parameter(torch.zeros(numel))
        options = ExchangeOptions("gradients", compressor=codec)
        role_of = partial(options.role_of, plan)
        flat = allocate(plan, [weight], role_of, 0, lambda _: 0, keeps_gradients=True)
        self._bucket = flat.buckets[0]
        self._numel = numel
        traffic = Traffic(collectives, 0, flat, options.is_of_gradients)
        self.exchange = new_exchange(options, [], traffic)

    def step(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """U and the residual, after a step."""
        self._bucket.gradients.zero_()[: self._numel] = gradient
        self.exchange.launch_reduce(self._bucket).wait()
        self.exchange.note_used([True], keeps=True)
        self.exchange.launch_gather(self._bucket).wait()
        self.exchange.commit()
        residual = self.exchange.coded[0].worker.kept["residual"]
        return self._bucket.gradients[: self._numel].clone(), residual[: self._numel].clone()


def in_ranks(world_size: int, run: Callable[[InRoom], Any]) -> list[Any]:
    """What `run` returns on each rank."""
    room = Room(world_size)

    def guarded(rank: int) -> Any:
        try:
            return run(InRoom(room, rank))
        except BaseException:
            room.leave()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size)))


def sums_up(codec: SparseAllReduce, rows: Tensor) -> None:
    """Three steps of as many ranks as there are rows, the last of which brings nothing new."""
    world_size, numel = rows.shape
    if not numel:
        return
    # As means are made. Three times the largest number would be too much.
    rows = rows / world_size / 2
    some = [rows, rows, torch.zeros_like(rows)]

    def run(collectives: InRoom) -> list[tuple[Tensor, Tensor]]:
        rank = Rank(codec, numel, collectives)
        return [rank.step(one[collectives.world.rank]) for one in some]

    of_ranks = in_ranks(world_size, run)
    k = codec.entries(numel)
    before = torch.zeros_like(rows, dtype=torch.float64)
    for step, gradients in enumerate(some):
        us = [of_rank[step][0] for of_rank in of_ranks]
        residuals = torch.stack([of_rank[step][1] for of_rank in of_ranks]).double()
        assert all(torch.equal(u, us[0]) for u in us), "ranks differ"
        assert torch.isfinite(us[0]).all()
        waiting = before + gradients.double()
        slack = ROUNDING * float(waiting.abs().max())
        off = (waiting.sum(0) - us[0].double() - residuals.sum(0)).abs()
        assert not (off > slack).any(), "something is lost, or counted twice"
        if codec.saves(numel, world_size):
            most = k if isinstance(codec, (OkTopk, GTopk)) else k * world_size
            assert int(us[0].count_nonzero()) <= most, "more than k"
        else:
            assert not residuals.any()
        before = residuals
