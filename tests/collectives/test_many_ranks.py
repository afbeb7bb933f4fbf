"""Flags and module buffers among many ranks: what arrives, by how many messages, after what delay.

Ranks are threads, and the network is simulated: a message arrives one delay after it was sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil, log2
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.collectives import gloo
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.launch_log import TAGS_OF_ONE_OPTIMIZER
from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from tests.distributed.strict import Strict

TIMEOUT_S = 60


class _Network:
    """Messages between ranks, matched by sender, receiver, tag and order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # (sender, receiver, tag) -> its messages with the delays after which they arrive.
        self.messages: dict[tuple[int, int, int], list[tuple[Tensor, int]]] = {}
        self._num_received = Counter[tuple[int, int, int]]()
        self._clock = threading.local()
        self.num_sent = Counter[int]()
        self.num_without_receive = 0
        self.latest = 0

    def send(self, message: Tensor, way: tuple[int, int, int]) -> None:
        arrives = getattr(self._clock, "now", 0) + 1
        with self._changed:
            # Read when it is received: until then a send may read its memory.
            self.messages.setdefault(way, []).append((message, arrives))
            self.num_without_receive += len(self.messages[way]) > self._num_received[way]
            self.num_sent[way[0]] += 1
            self.latest = max(self.latest, arrives)
            self._changed.notify_all()

    def receive(self, row: Tensor, way: tuple[int, int, int]) -> Callable[[], None]:
        with self._changed:
            number = self._num_received[way]
            self._num_received[way] += 1

        def wait() -> None:
            with self._changed:
                is_there = self._changed.wait_for(
                    lambda: len(self.messages.get(way, ())) > number, TIMEOUT_S
                )
                assert is_there, f"nothing from {way[0]}"
                message, arrives = self.messages[way][number]
            row.copy_(message)
            self._clock.now = max(getattr(self._clock, "now", 0), arrives)

        return wait


class _Calls:
    """What stands in for torch.distributed on one rank."""

    def __init__(self, network: _Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def isend(self, tensor: Tensor, dst: int, group: Any, tag: int) -> Any:
        self._network.send(tensor, (self._rank, dst, tag))
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor: Tensor, src: int, group: Any, tag: int) -> Any:
        return SimpleNamespace(wait=self._network.receive(tensor, (src, self._rank, tag)))


def _on_ranks(size: int, body: Callable[[PairwiseCollectives], None]) -> _Network:
    """Runs `body` on all ranks at once."""
    network = _Network()

    def run(rank: int) -> None:
        calls: Any = Strict(_Calls(network, rank))
        # A group need only be something.
        body(PairwiseCollectives(network, network, None, World(rank, size), calls))

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    return network


def _flags_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 200, (50,), dtype=torch.uint8, generator=generator)


def _steps(size: int, num_steps: int) -> Callable[[PairwiseCollectives], None]:
    """Sends buffers and flags, as a step does. Checks what arrives."""

    def body(collectives: PairwiseCollectives) -> None:
        rank = collectives.world.rank
        for step in range(num_steps):
            buffer = torch.full((7,), float(step if rank == 0 else -1))
            flags = _flags_of(rank, step)
            works: list[Work] = [collectives.launch_broadcast(buffer, 0)]
            works.append(collectives.launch_max(flags))
            for work in works:
                work.wait()
            expected = torch.stack([_flags_of(one, step) for one in range(size)]).amax(0)
            assert torch.equal(flags, expected)
            assert torch.equal(buffer, torch.full((7,), float(step)))

    return body


@given(st.integers(1, 40))
@settings(deadline=None, max_examples=15)
def test_all_ranks_get_the_maximum_and_rank_0s_buffers(size: int) -> None:
    _on_ranks(size, _steps(size, 3))


@pytest.mark.parametrize("size", [9, 12, 16, 17, 32, 64])
def test_no_rank_sends_to_all(size: int) -> None:
    network = _on_ranks(size, _steps(size, 1))
    assert max(network.num_sent.values()) <= 2 * ceil(log2(size)) + 2
    # Buffers and flags travel at the same time.
    assert network.latest <= ceil(log2(size)) - 1


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12])
def test_receives_of_expected_flags_are_posted_before_they_are_sent(size: int) -> None:
    together = threading.Barrier(size)

    def body(collectives: PairwiseCollectives) -> None:
        for step in range(3):
            numbers = [0, 1] if collectives.world.rank % 2 else [1, 0]
            for number in [*numbers, *numbers]:
                collectives.expect_max(50, number)
            together.wait(TIMEOUT_S)
            flags = {number: _flags_of(collectives.world.rank, number + step) for number in numbers}
            works = [collectives.launch_max(flags[number], number) for number in numbers]
            for work in works:
                work.wait()
            for number in numbers:
                of_ranks = [_flags_of(one, number + step) for one in range(size)]
                assert torch.equal(flags[number], torch.stack(of_ranks).amax(0))

    assert _on_ranks(size, body).num_without_receive == 0


def test_other_flags_than_were_expected_are_refused() -> None:
    def body(collectives: PairwiseCollectives) -> None:
        collectives.expect_max(3, 0)
        with pytest.raises(RuntimeError, match="2 flags, not 3"):
            collectives.launch_max(torch.zeros(2, dtype=torch.uint8), 0)

    _on_ranks(2, body)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_few_ranks_send_straight_to_all(size: int) -> None:
    network = _on_ranks(size, _steps(size, 1))
    assert network.num_sent == {0: 2 * (size - 1), **dict.fromkeys(range(1, size), size - 1)}
    assert network.latest == 1


@pytest.mark.parametrize("expected", ["not", "in a ring", "the other way"])
@pytest.mark.parametrize("size", [3, 4, 7])
def test_in_a_ring_each_rank_sends_only_to_the_next(size: int, expected: str) -> None:
    numbers = (0, 1, TAGS_OF_ONE_OPTIMIZER)

    def body(collectives: PairwiseCollectives) -> None:
        rank = collectives.world.rank
        collectives.in_rings.update({0} if expected == "in a ring" else ())
        buffers = {number: torch.full((size, 2), -1.0) for number in numbers}
        for number, buffer in buffers.items():
            buffer[rank] = 100 * number + rank
        for number in () if expected == "not" else numbers:
            collectives.expect_all_gather(buffers[number].view(-1), number)
        collectives.in_rings.add(0)
        works = [collectives.launch_all_gather(buffers[n].view(-1), n) for n in numbers]
        for work in works:
            work.wait()
        for number, buffer in buffers.items():
            column = 100.0 * number + torch.arange(size)
            assert torch.equal(buffer, column[:, None].expand(-1, 2))
        assert collectives.ledger["all_gather"] == 3 * (size - 1) * buffer[0].nbytes

    network = _on_ranks(size, body)
    assert network.num_sent == dict.fromkeys(range(size), 3 * (size - 1))
    for rank in range(size):
        to = Counter[int]()
        for (sender, receiver, _), messages in network.messages.items():
            to[receiver] += len(messages) * (sender == rank)
        others = {other: 1 for other in range(size) if other != rank}
        assert to == {rank: 0, **others, (rank + 1) % size: 1 + 2 * (size - 1)}


@pytest.mark.parametrize("expected", ["not", "in turn", "the other way"])
@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("numel", [1, 3, 40])
def test_in_turn_each_rank_waits_for_the_head_of_a_message_before_it_sends_to_the_next(
    numel: int, size: int, expected: str
) -> None:
    numbers = (0, 1, TAGS_OF_ONE_OPTIMIZER)

    def body(collectives: PairwiseCollectives) -> None:
        rank = collectives.world.rank
        collectives.in_rings.update({0} if expected == "in turn" else ())
        buffers = {number: values(rank, number) for number in numbers}
        received = {number: torch.empty((size - 1) * numel) for number in numbers}
        means = {number: torch.empty(numel) for number in numbers}
        for number in () if expected == "not" else numbers:
            collectives.expect_reduce_scatter(received[number], number)
        collectives.in_rings.add(0)
        works = [
            collectives.launch_reduce_scatter(buffers[n], received[n], means[n], n) for n in numbers
        ]
        for work in works:
            work.wait()
        for number in numbers:
            shards = [values(other, number).view(size, numel)[rank] for other in range(size)]
            total = shards[0].clone()
            for shard in shards[1:]:
                total += shard
            assert torch.equal(means[number], total)
        sent_bytes = 3 * (size - 1) * numel * 4
        assert collectives.ledger == Counter(reduce_scatter=sent_bytes)

    def values(rank: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(size * numel, generator=generator)

    network = _on_ranks(size, body)
    num_parts = 2 if numel == 40 else 1
    assert network.num_sent == dict.fromkeys(range(size), (1 + 2 * num_parts) * (size - 1))
    # A message follows the heads of those to the peers before, of earlier buckets, too.
    for (sender, receiver, tag), messages in network.messages.items():
        if (bucket := tag - gloo._RING_TAGS) in (0, 1):
            earlier = (size - 1) * bucket + (receiver - sender) % size - 1
            assert [arrives for _, arrives in messages] == [earlier + 1] * num_parts


def test_what_was_not_passed_on_in_time_is_told() -> None:
    rounds = gloo.rounds_of(16)
    assert rounds == [[1, 2, 3], [4], [8]]
    held = threading.Event()

    def body(collectives: PairwiseCollectives) -> None:
        if collectives.world.rank:
            held.wait(TIMEOUT_S)
            collectives.launch_max(torch.zeros(1, dtype=torch.uint8))
            return
        work = collectives.launch_max(torch.zeros(1, dtype=torch.uint8))
        collectives.forget_groups()
        held.set()
        with pytest.raises(RuntimeError, match="cannot be sent after training"):
            work.wait()

    _on_ranks(16, body)


@pytest.mark.parametrize("door", ["isend", "irecv"])
def test_posting_to_a_rank_that_is_gone_names_it(door: str) -> None:
    """gloo raises at once then, and does not name the rank."""

    def gone(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Connection reset by peer")

    calls: Any = _Calls(_Network(), 1)
    setattr(calls, door, gone)
    collectives = PairwiseCollectives(calls, calls, None, World(1, 2), calls)
    with pytest.raises(RuntimeError, match="all-gather: connection closed by rank 0: see its out"):
        collectives.launch_all_gather(torch.zeros(4), tag=0)
    assert collectives.has_given_up
