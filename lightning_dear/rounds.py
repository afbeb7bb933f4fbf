"""Exchanges among three or more ranks, message after message, so that no two meet at a receiver."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

MAX_BYTES_IN_FLIGHT = 128 << 10
"""So many bytes of small messages may be under way at once: less than a millisecond of a link."""


class Rounds:
    """Sends the messages of all exchanges of one process group in order, on a thread of its own.

    In round k every rank sends to the rank k places on and receives from the one k places back.
    When all ranks do so in step, each link carries one message at a time; when each sends to all
    at once, several meet in front of one receiver while another has none, and links fall idle. A
    rank sends the next message when the one before has its counterpart: what it was to receive in
    the same round. So ranks keep in step without a message for that, and over any number of
    exchanges.

    All ranks must put the same exchanges in the same order, or they wait for each other for ever.

    Args:
        max_bytes_in_flight: Messages go out together as long as they are no more bytes than that.
    """

    def __init__(self, max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT) -> None:
        self._todo: SimpleQueue[_Message | None] = SimpleQueue()
        stream = _Stream(self._todo, max_bytes_in_flight)
        threading.Thread(target=stream.run, daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def put(
        self, receives: Sequence[Any], sends: Sequence[Callable[[], Any]], message_bytes: int
    ) -> list[Any]:
        """Queue an exchange; return at once what to wait for, in place of torch's works.

        Args:
            receives: Works of posted receives, by round. Only what is returned may wait for them.
            sends: By round: starts the send and returns its work. Called on the thread.
            message_bytes: Size of each of these messages.

        Returns:
            Waitables for all receives and sends, each to be waited for once by the caller. `wait`
            blocks, and raises what the receive
            or the send raised, or an earlier message without whose counterpart none is sent.
        """
        messages = [
            _Message(_Once(receive), send, Future(), message_bytes)
            for receive, send in zip(receives, sends, strict=True)
        ]
        for message in messages:
            self._todo.put(message)
        return [*(one.receive for one in messages), *(_Sent(one.sent) for one in messages)]


class _Once:
    """A receive that two threads wait for; of gloo's own work only one would get its answer."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    work.wait()
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error


class _Sent:
    """A send that may not have been started yet."""

    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def wait(self) -> None:
        self._started.result().wait()


@dataclass(frozen=True)
class _Message:
    receive: _Once
    send: Callable[[], Any]
    sent: Future[Any]
    nbytes: int


class _Stream:
    def __init__(self, todo: SimpleQueue[_Message | None], max_bytes: int) -> None:
        self._todo = todo
        self._max_bytes = max_bytes
        self._unanswered: deque[tuple[_Once, int]] = deque()

    def run(self) -> None:
        # No local name outlives a turn: it would keep the process group, and its threads, alive.
        while self._send_next(self._todo.get()):
            pass

    def _send_next(self, message: _Message | None) -> bool:
        if message is None:
            return False
        try:
            self._wait_for_room(message.nbytes)
            message.sent.set_result(message.send())
        except BaseException as error:  # whoever waits for the message gets it
            message.sent.set_exception(error)
        else:
            self._unanswered.append((message.receive, message.nbytes))
        return True

    def _wait_for_room(self, nbytes: int) -> None:
        waiting = self._unanswered
        while waiting and sum(size for _, size in waiting) + nbytes > self._max_bytes:
            # Left in place if it raises: what comes later must not be sent either.
            waiting[0][0].wait()
            waiting.popleft()
