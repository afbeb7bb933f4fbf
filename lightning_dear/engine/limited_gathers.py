"""A limit on how many all-gathers are in flight at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lightning_dear.bucket import Bucket
from lightning_dear.collectives.work import Work
from lightning_dear.exchange.dense import DenseExchange


class LimitedGathers:
    """Launches gathers in the order given, at most `depth` at a time.

    What does not fit is launched by a thread as earlier ones arrive, never by whoever waits: ranks
    wait at other times, and if a launch came with a wait, two ranks could wait for each other. The
    thread ends when everything has arrived.

    Args:
        exchange: Prepares gathers, called by the caller of `launch_gather`, and starts them, called
            by whoever has room, the caller or the thread.
        depth: Most gathers in flight.
    """

    def __init__(self, exchange: DenseExchange, depth: int) -> None:
        self._exchange = exchange
        self._depth = depth
        self._lock = threading.Lock()
        self._queued: deque[_Ticket] = deque()
        self._in_flight: deque[_Ticket] = deque()
        self._is_running = False

    def expect_gather(self, bucket: Bucket) -> None:
        """Lets other ranks' shards arrive from now on, which takes nothing of this rank's link."""
        self._exchange.expect_gather(bucket)

    def launch_gather(self, bucket: Bucket) -> Work:
        """Starts the bucket's gather, now or when earlier ones have arrived. Does not block."""
        if bucket.is_all_reduced:
            # Has nothing to wait for, and would wait for all those before it.
            return self._exchange.launch_gather(bucket)
        ticket = _Ticket(self._exchange.prepare_gather(bucket))
        with self._lock:
            self._queued.append(ticket)
            self._start_queued()
            if self._in_flight and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._drive, name="dear gathers", daemon=True).start()
        if ticket.work is not None and ticket.work.is_done:
            return ticket.work
        return Work(ticket.wait)

    def _start_queued(self) -> None:
        """Starts what may be in flight; under the lock."""
        while self._queued and len(self._in_flight) < self._depth:
            ticket = self._queued.popleft()
            try:
                ticket.work = ticket.launch()
            except BaseException as error:
                ticket.end(error)
                continue
            if ticket.work.is_done:
                ticket.end()
            else:
                self._in_flight.append(ticket)

    def _drive(self) -> None:
        while True:
            with self._lock:
                if not self._in_flight:
                    self._is_running = False
                    return
                ticket = self._in_flight[0]
            failure = _failure_of(ticket)
            with self._lock:
                self._in_flight.popleft()
                self._start_queued()
            ticket.end(failure)


class _Ticket:
    """A gather that was or will be launched, and how it ended."""

    def __init__(self, launch: Callable[[], Work]) -> None:
        self.launch = launch
        self.work: Work | None = None
        self._failure: BaseException | None = None
        self._has_ended = threading.Event()

    def end(self, failure: BaseException | None = None) -> None:
        self._failure = failure
        self._has_ended.set()

    def wait(self) -> None:
        self._has_ended.wait()
        if self._failure is not None:
            raise RuntimeError(f"An all-gather failed: {self._failure}") from self._failure
        assert self.work is not None
        # What the data is for (a backward may still need the old values) is the reader's to do.
        self.work.arrive = _has_arrived
        self.work.wait()


def _has_arrived() -> None:
    return None


def _failure_of(ticket: _Ticket) -> BaseException | None:
    assert ticket.work is not None
    try:
        ticket.work.arrive()
    except BaseException as error:
        return error
    return None
