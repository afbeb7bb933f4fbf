"""Exchanges among three or more ranks, message after message, so that no two meet at a receiver."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

SMALL_EXCHANGE_BYTES = 64 << 10
"""An exchange that sends no more than that, well under a millisecond of a link, is one round."""


class Rounds:
    """Makes the exchanges of one process group in order, on a thread of its own.

    In round k every rank sends to the rank k places on and receives from the one k places back.
    When all ranks do so in step, each link carries one message at a time; when each sends to all
    at once, several meet in front of one receiver while another has none, and links fall idle. A
    rank goes on to the next round, or the next exchange, when it has what it receives in this one.
    So ranks keep in step without a message for that.

    All ranks must put the same exchanges in the same order, or they wait for each other for ever.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[_Exchange | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._todo,), daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def put(
        self, receives: Sequence[Any], sends: Sequence[Callable[[], Any]], nbytes: int
    ) -> RoundsWork:
        """Queue an exchange and return at once.

        Args:
            receives: Works of posted receives, by round. Nobody else may wait for them.
            sends: By round: starts the send and returns its work. Called on the thread.
            nbytes: Bytes of all sends together.
        """
        exchange = _Exchange(receives, sends, nbytes, Future())
        self._todo.put(exchange)
        return RoundsWork(exchange.sent)


class RoundsWork:
    """A queued exchange; wait for it once, as for torch's own works."""

    def __init__(self, sent: Future[list[Any]]) -> None:
        self._sent = sent

    def wait(self) -> None:
        """Blocks until all has arrived and the sent buffers may be written again.

        Raises what a receive or a send has raised, of this exchange or of one before it, since
        nothing is sent after a failure.
        """
        for work in self._sent.result():
            work.wait()


@dataclass(frozen=True)
class _Exchange:
    receives: Sequence[Any]
    sends: Sequence[Callable[[], Any]]
    nbytes: int
    sent: Future[list[Any]]

    def run(self) -> list[Any]:
        """Send and receive, round by round; return the works of the sends."""
        num_rounds = len(self.sends)
        step = num_rounds if self.nbytes <= SMALL_EXCHANGE_BYTES else 1
        works: list[Any] = []
        for start in range(0, num_rounds, step):
            works += [send() for send in self.sends[start : start + step]]
            for receive in self.receives[start : start + step]:
                receive.wait()
        return works


def _run(todo: SimpleQueue[_Exchange | None]) -> None:
    # No local name outlives a turn: it would keep the process group, and its threads, alive.
    failure: BaseException | None = None
    while True:
        is_over, failure = _run_next(todo.get(), failure)
        if is_over:
            return


def _run_next(
    exchange: _Exchange | None, failure: BaseException | None
) -> tuple[bool, BaseException | None]:
    if exchange is None:
        return True, failure
    if failure is None:
        try:
            exchange.sent.set_result(exchange.run())
        except BaseException as error:  # whoever waits gets it
            # Without the frames, which hold tensors and works.
            failure = error.with_traceback(None)
    if failure is not None:
        exchange.sent.set_exception(failure)
    return False, failure
