"""Messages held back: by the time asked for, in parallel, and at no cost to the caller."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.delay import DelayedSends, message_delay_s
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.work import shard_of
from tests.distributed.harness import distributed, run_ranks

VARIABLE = "LIGHTNING_DEAR_MESSAGE_DELAY_S"
DELAY_S = 0.25


def _exchange(num_buckets: int) -> tuple[float, float]:
    """Seconds that launching takes, and until all gathers of different buckets have arrived."""
    collectives = new_collectives(torch.device("cpu"))
    buffers = [torch.zeros(collectives.world_size) for _ in range(num_buckets)]
    for buffer in buffers:
        shard_of(buffer, collectives.rank, collectives.world_size).fill_(collectives.rank + 1)
    collectives.all_gather_object(None)  # starts all ranks together
    start_s = time.monotonic()
    works = [collectives.launch_all_gather(buffer, n) for n, buffer in enumerate(buffers)]
    launched_s = time.monotonic() - start_s
    for work in works:
        work.wait()
    arrived_s = time.monotonic() - start_s
    for buffer in buffers:
        assert buffer.tolist() == [1.0, 2.0]
    return launched_s, arrived_s


def test_messages_arrive_late_side_by_side_and_launching_does_not_wait() -> None:
    measured = run_ranks(_exchange, 2, 8, env={VARIABLE: str(DELAY_S)})
    for launched_s, arrived_s in measured:
        assert launched_s < DELAY_S / 2
        assert DELAY_S * 0.9 < arrived_s < 3 * DELAY_S


@distributed(world_sizes=(2,))
def test_reductions_and_flags_are_late_too_and_right() -> None:
    plain = new_collectives(torch.device("cpu"))
    assert isinstance(plain, PairwiseCollectives)
    groups = plain.reduce_group, plain.gather_group, plain.object_group
    collectives = PairwiseCollectives(*groups, plain.rank, plain.world_size, DelayedSends(DELAY_S))
    collectives.all_gather_object(None)
    start_s = time.monotonic()
    buffer, out = torch.arange(4.0) + collectives.rank, torch.empty(2)
    scratch = torch.empty(collectives.scratch_numel(4))
    collectives.launch_reduce_scatter(buffer, scratch, out, 0).wait()
    assert time.monotonic() - start_s > DELAY_S * 0.9
    assert out.tolist() == [[1.0, 3.0], [5.0, 7.0]][collectives.rank]
    flags = torch.tensor([collectives.rank], dtype=torch.uint8)
    collectives.launch_any(flags).wait()
    assert flags.tolist() == [1]
    assert time.monotonic() - start_s > 2 * DELAY_S * 0.9


@distributed(world_sizes=(2,))
def test_without_a_delay_nothing_is_started_for_it() -> None:
    collectives = new_collectives(torch.device("cpu"))
    assert isinstance(collectives, PairwiseCollectives)
    assert collectives.calls is dist
    assert not any("late-sends" in thread.name for thread in threading.enumerate())


def test_what_the_sending_raises_is_raised_to_whoever_waits() -> None:
    def fail() -> None:
        raise RuntimeError("connection closed")

    late = DelayedSends(0.01, mock.Mock(isend=fail))
    for _ in range(2):  # the thread outlives the first
        with pytest.raises(RuntimeError, match="connection closed"):
            late.isend().wait()


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    late = DelayedSends(0.01, mock.Mock())
    late.isend().wait()
    (thread,) = set(threading.enumerate()) - before
    del late
    thread.join(timeout=5)
    assert not thread.is_alive()


@pytest.mark.parametrize("delay_s", [-1.0, float("nan"), float("inf")])
def test_a_wrong_delay_is_refused(delay_s: float) -> None:
    with pytest.raises(ValueError, match="positive number of s"):
        DelayedSends(delay_s)


def test_a_delay_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "soon")
    with pytest.raises(ValueError, match=f"{VARIABLE} must be seconds, not 'soon'"):
        message_delay_s()
    monkeypatch.setenv(VARIABLE, "")
    assert message_delay_s() == 0.0
