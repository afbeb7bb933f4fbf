"""Messages in rounds: their order, what they wait for, their errors, and the sums they bring."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear.rounds import Rounds
from tests.distributed.harness import distributed


class FakeWork:
    """A receive that arrives when told to; like gloo's, it answers one waiter alone."""

    def __init__(self, error: Exception | None = None) -> None:
        self._arrived = threading.Semaphore(0)
        self.error = error

    def arrive(self) -> None:
        self._arrived.release()

    def wait(self) -> None:
        assert self._arrived.acquire(timeout=10)
        if self.error is not None:
            raise self.error


class Link:
    """Notes what is sent; a send is done at once."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, name: str) -> FakeWork:
        self.sent.append(name)
        work = FakeWork()
        work.arrive()
        return work

    def sends(self, *names: str) -> list[Any]:
        return [partial(self.send, name) for name in names]

    def settled(self) -> list[str]:
        time.sleep(0.1)
        return self.sent


LARGE = 1 << 20


def test_a_round_begins_when_the_one_before_has_brought_its_message() -> None:
    link, rounds = Link(), Rounds()
    receives = [FakeWork() for _ in range(4)]
    first = rounds.put(receives[:2], link.sends("a1", "a2"), LARGE)
    second = rounds.put(receives[2:], link.sends("b1", "b2"), LARGE)
    assert link.settled() == ["a1"]
    receives[1].arrive()  # of a later round: does not count
    assert link.settled() == ["a1"]
    receives[0].arrive()
    assert link.settled() == ["a1", "a2", "b1"]
    first.wait()
    receives[2].arrive()
    receives[3].arrive()
    second.wait()
    assert link.sent == ["a1", "a2", "b1", "b2"]


def test_it_is_waited_for_until_the_last_message_has_come() -> None:
    link, rounds = Link(), Rounds()
    receives = [FakeWork(), FakeWork()]
    work = rounds.put(receives, link.sends("1", "2"), LARGE)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    receives[0].arrive()
    assert link.settled() == ["1", "2"]
    assert waiter.is_alive()
    receives[1].arrive()
    waiter.join(timeout=5)
    assert not waiter.is_alive()


def test_small_messages_go_out_together() -> None:
    link, rounds = Link(), Rounds()
    receives = [FakeWork() for _ in range(3)]
    rounds.put(receives, link.sends("1", "2", "3"), 64 << 10)
    assert link.settled() == ["1", "2", "3"]
    for receive in receives:
        receive.arrive()


def test_after_a_failed_receive_nothing_more_is_sent_and_every_waiter_hears_of_it() -> None:
    link, rounds = Link(), Rounds()
    broken = FakeWork(ConnectionError("peer closed"))
    broken.arrive()
    works = [
        rounds.put([broken, FakeWork()], link.sends("1", "2"), LARGE),
        rounds.put([FakeWork()], link.sends("3"), LARGE),
    ]
    for work in works:
        with pytest.raises(ConnectionError, match="peer closed"):
            work.wait()
    assert link.sent == ["1"]


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    rounds = Rounds()
    (thread,) = set(threading.enumerate()) - before
    del rounds
    thread.join(timeout=5)
    assert not thread.is_alive()


@distributed(world_sizes=(3, 4))
def test_every_rank_gets_every_message_of_many_exchanges(world_size: int) -> None:
    rank, rounds, hops = dist.get_rank(), Rounds(), range(1, world_size)
    results = []
    for number in range(20):
        own = torch.full((1 << 16,), 100.0 * number + rank)
        rows = {(rank - hop) % world_size: torch.empty_like(own) for hop in hops}
        receives = [dist.irecv(row, src=source, tag=number) for source, row in rows.items()]
        sends = [
            partial(dist.isend, own, dst=(rank + hop) % world_size, tag=number) for hop in hops
        ]
        results.append((number, own, rows, rounds.put(receives, sends, own.nbytes * len(sends))))
    for number, _, rows, work in results:
        work.wait()
        for source, row in rows.items():
            assert torch.equal(row, torch.full_like(row, 100.0 * number + source))
