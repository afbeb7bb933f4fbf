"""What is sent for a device, through the host: over gloo, host memory standing for the device's."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives import factory
from lightning_dear.collectives.background import Background
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.launch_log import TAGS_OF_ONE_OPTIMIZER
from lightning_dear.collectives.staged import StagedCollectives, _SendsBehindCopies
from lightning_dear.collectives.streams import CudaStreams, Streams
from lightning_dear.collectives.two_hops import TwoHopCollectives
from lightning_dear.collectives.work import Work
from lightning_dear.strategy.failures import is_consequence
from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts, staged

SLOW_S = 0.3


class _SlowCopies(Streams):
    """A copy down ends late, and writes then."""

    @override
    def copy_down(self, tensor: Tensor, host: Tensor) -> Callable[[], None]:
        end_s, first = time.monotonic() + SLOW_S, threading.Lock()

        def copied() -> None:
            time.sleep(max(0.0, end_s - time.monotonic()))
            # Several threads wait, of which one writes.
            with first:
                if not written:
                    written.append(True)
                    host.copy_(tensor)

        written: list[bool] = []
        return copied


def _collectives(timeout_s: float = 30.0) -> StagedCollectives:
    with staged():
        collectives = new_collectives(torch.device("cpu"), timedelta(seconds=timeout_s))
    assert isinstance(collectives, StagedCollectives)
    return collectives


def _with_slow_copies() -> StagedCollectives:
    plain = new_collectives(torch.device("cpu"))
    assert isinstance(plain, PairwiseCollectives)
    return StagedCollectives(plain, _SlowCopies())


def _launches(collectives: StagedCollectives) -> dict[str, Any]:
    """Name of a call -> launches it, and returns the work and what must be there after it."""
    size, rank = collectives.world.size, collectives.world.rank
    buffer, own = torch.full((2 * size,), float(rank)), slice(2 * rank, 2 * rank + 2)
    rows, incoming = torch.full((size, 2), float(rank)), torch.zeros(size, 2)
    sizes = [0 if one == rank else 2 for one in range(size)]
    parts, their_parts = torch.full((sum(sizes),), float(rank)), torch.zeros(sum(sizes))
    total = float(sum(range(size)))
    everyones = [float(number) for number in range(size) for _ in range(2)]
    return {
        "reduce_scatter": lambda: (
            collectives.launch_reduce_scatter(buffer, buffer[:0], buffer[own], 0),
            lambda: buffer[own].tolist() == [total] * 2,
        ),
        "all_gather": lambda: (
            collectives.launch_all_gather(buffer, 0),
            lambda: buffer.tolist() == everyones,
        ),
        "all_reduce": lambda: (
            collectives.launch_all_reduce(buffer, 0),
            lambda: buffer.tolist() == [total] * 2 * size,
        ),
        "all_to_all": lambda: (
            collectives.launch_all_to_all(rows, incoming, 0),
            lambda: incoming.view(-1).tolist() == everyones,
        ),
        "parts": lambda: (
            collectives.launch_parts((parts, sizes), (their_parts, sizes), 0),
            lambda: their_parts.tolist() == [e for e in everyones if e != rank],
        ),
    }


CALLS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "parts")


@pytest.mark.parametrize("call", CALLS)
@distributed(world_sizes=(2, 3))
def test_a_launch_does_not_wait_for_the_copy_and_sends_what_it_brings(call: str) -> None:
    collectives = _with_slow_copies()
    launch = _launches(collectives)[call]
    begin_s = time.monotonic()
    work, is_right = launch()
    assert time.monotonic() - begin_s < SLOW_S / 2
    work.wait()
    assert time.monotonic() - begin_s >= SLOW_S
    assert is_right()


@distributed(world_sizes=(2,))
def test_a_rank_that_sends_nothing_is_named_and_later_waits_end_at_once() -> None:
    collectives = _collectives(timeout_s=1.0)
    dist.barrier()
    if collectives.world.rank == 1:
        time.sleep(2.5)
        return
    work, _ = _launches(collectives)["reduce_scatter"]()
    for most_s in (2.4, 0.3):
        begin_s = time.monotonic()
        with pytest.raises(RuntimeError, match="bucket 0, reduce-scatter: nothing from rank 1"):
            work.wait()
        assert time.monotonic() - begin_s < most_s
    gather = collectives.launch_all_gather(torch.zeros(4), 1)
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match="bucket 1, all-gather"):
        gather.wait()
    assert time.monotonic() - begin_s < 0.5


@distributed(world_sizes=(2,))
def test_what_a_send_raises_in_a_thread_is_raised_by_the_wait() -> None:
    collectives = _collectives(timeout_s=1.0)
    is_failing, why = collectives.world.rank == 0, "nothing from rank 0"
    if is_failing:
        collectives._calls._calls = mock.Mock(wraps=dist)
        collectives._calls._calls.isend.side_effect = RuntimeError("Connection closed by peer")
        why = "connection closed by rank 1"
    work, _ = _launches(collectives)["all_gather"]()
    with pytest.raises(RuntimeError, match=why):
        work.wait()


def test_a_send_of_another_thread_waits_for_the_copy() -> None:
    """As where a rank sends to one peer at a time, or in a second hop."""
    done: list[str] = []
    calls = mock.Mock()
    calls.isend.side_effect = lambda tensor, **options: done.append("sent")
    sends, memory, other = _SendsBehindCopies(calls), torch.zeros(4), Background("other")
    copied = threading.Event()

    def wait() -> None:
        copied.wait()
        done.append("copied")

    sends.behind(wait, memory, Work.done)
    sent = other.submit(lambda: sends.isend(memory[:2], dst=1))
    time.sleep(0.1)
    assert not done
    copied.set()
    sent.result()
    # The launching thread has waited, too.
    assert done[-1] == "sent"
    assert "copied" in done


@distributed(world_sizes=(4,))
def test_the_end_of_encoding_is_waited_for() -> None:
    with on_hosts(2):
        plain = new_collectives(torch.device("cpu"))
    assert isinstance(plain, TwoHopCollectives)
    collectives, encoded = StagedCollectives(plain, _SlowCopies()), list[Tensor]()

    def encode(sums: Tensor) -> Tensor:
        encoded.append(sums.clone())
        return sums.view(torch.uint8).view(2, -1)

    buffer, incoming = torch.ones(8), torch.zeros(2, 8, dtype=torch.uint8)
    work, end = collectives.launch_sums_of_host(buffer, buffer[:0], encode, incoming, 0)
    assert not encoded
    end()
    assert encoded[0].view(-1).tolist() == [2.0] * 4
    work.wait()
    assert incoming.view(torch.float32).view(-1).tolist() == [2.0] * 4


@pytest.mark.parametrize("call", CALLS)
@distributed(world_sizes=(2,))
def test_a_copy_that_fails_is_raised_at_once_and_blames_no_rank(call: str) -> None:
    collectives = _collectives(timeout_s=4.0)

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    if collectives.world.rank == 0:
        with mock.patch.object(collectives.streams, "copy_down", return_value=fail):
            work, _ = _launches(collectives)[call]()
        begin_s = time.monotonic()
        with pytest.raises(RuntimeError, match="^an illegal memory access$"):
            work.wait()
        assert time.monotonic() - begin_s < 1.0


@distributed(world_sizes=(4,))
def test_a_copy_that_fails_ends_the_wait_for_encoding() -> None:
    with on_hosts(2):
        plain = new_collectives(torch.device("cpu"), timedelta(seconds=4))
    assert isinstance(plain, TwoHopCollectives)
    collectives = StagedCollectives(plain, Streams())

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    if collectives.world.rank == 0:
        place = torch.ones(8), torch.empty(0), torch.clone, torch.zeros(2, 2), 0
        with mock.patch.object(collectives.streams, "copy_down", return_value=fail):
            _, end = collectives.launch_sums_of_host(*place)
        with pytest.raises(RuntimeError, match="^an illegal memory access$"):
            end()


@distributed(world_sizes=(2,))
def test_a_wait_ends_once_another_rank_is_known_to_have_failed() -> None:
    collectives = _collectives(timeout_s=6.0)
    dist.barrier()
    if collectives.world.rank == 1:
        time.sleep(3.0)
        return
    work, _ = _launches(collectives)["reduce_scatter"]()
    # By then a thread waits, as long as the timeout.
    time.sleep(0.2)
    collectives.has_given_up = True
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match="A rank failed. Read its error") as raised:
        work.wait()
    assert time.monotonic() - begin_s < 2.0
    assert is_consequence(raised.value)


@distributed(world_sizes=(2,))
def test_all_reduces_are_launched_in_one_order() -> None:
    """gloo matches them by order. On rank 0 the first copy ends long after the second."""
    collectives = _collectives()
    first, second = torch.full((4,), 1.0), torch.full((4,), 10.0)
    if collectives.world.rank == 0:
        copied = [partial(time.sleep, 0.3), partial(time.sleep, 0.0)]
        copy = collectives.streams.copy_down

        def copy_down(tensor: Tensor, host: Tensor) -> Callable[[], None]:
            copy(tensor, host)
            return copied.pop(0)

        collectives.streams.copy_down = copy_down  # type: ignore[method-assign]
    works = [
        collectives.launch_all_reduce(first, 0),
        collectives.launch_all_reduce(second, TAGS_OF_ONE_OPTIMIZER),
    ]
    for work in works:
        work.wait()
    assert (first.tolist(), second.tolist()) == ([2.0] * 4, [20.0] * 4)


def test_two_threads_copy_up_on_one_stream() -> None:
    cuda: Any = mock.MagicMock()
    streams = CudaStreams(torch.device("cpu"), cuda)
    num_made = cuda.Stream.call_count
    for _ in range(2):
        streams.copy_up([])
    assert cuda.Stream.call_count == num_made


@distributed(world_sizes=(2,))
def test_too_much_memory_is_warned_of_before_training() -> None:
    collectives = _collectives()
    parameters = [torch.zeros(1 << 20), torch.zeros(1 << 20)]
    # Two ranks on one host need twice 16 MiB.
    for gib, warns in ((1 / 8, False), (1 / 32, True)):
        pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(gib * (1 << 30))}
        with (
            mock.patch("os.sysconf", side_effect=pages.__getitem__),
            warnings.catch_warnings(record=True) as said,
        ):
            collectives.check_memory(parameters)
        assert bool(said) == warns
        if warns:
            assert "each of its 2 ranks needs 0.0 GiB for messages" in str(said[0].message)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="on xpu through gloo. Train on CUDA or ROCm"):
        factory._check_backend("gloo", torch.device("xpu"))
    factory._check_backend("gloo", torch.device("cuda"))
