"""Messages that arrive late on purpose: the start-up latency (alpha) of a slower network."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

MESSAGE_DELAY_VARIABLE = "LIGHTNING_DEAR_MESSAGE_DELAY_S"
"""Seconds by which strategy="dear" holds back each message it sends through gloo."""

_Item = tuple[float, Callable[[], Any], "Future[Any]"]


class DelayedSends:
    """Starts every send `delay_s` after it was asked to, in order, on a thread of its own.

    On a link that sends in order, starting all messages later by the same time makes all of them
    arrive later by that time, and the link is as busy as before: this emulates the latency of a
    longer way, or of a slower start of each message. It does not emulate time that a start costs
    the processor, nor the latency inside a collective of gloo's own: DDP's all-reduce, with its
    2(P-1) dependent messages, is not delayed. To compare with DDP, delay the links themselves
    (`EmulatedCluster(delay_ms=...)`, which needs netem), or have a communication hook of DDP's
    wait for the latencies that its all-reduce would meet.

    Args:
        delay_s: Seconds, positive.

    Raises:
        ValueError: `delay_s` is not a positive, finite number.
    """

    def __init__(self, delay_s: float) -> None:
        if not 0 < delay_s < math.inf:
            raise ValueError(f"a message's delay must be a positive number of s, not {delay_s}")
        self.delay_s = delay_s
        self._todo: SimpleQueue[_Item | None] = SimpleQueue()
        threading.Thread(target=_start_in_time, args=(self._todo,), daemon=True).start()
        # The thread holds the queue and not `self`, so that `self` can go, which ends it.
        weakref.finalize(self, self._todo.put, None)

    def send(self, start: Callable[[], Any]) -> DelayedWork:
        """Call `start`, which sends and returns a work, in `delay_s`; return at once."""
        started: Future[Any] = Future()
        self._todo.put((time.monotonic() + self.delay_s, start, started))
        return DelayedWork(started)


class DelayedWork:
    """A message that may not have been sent yet; `wait` is that of torch's own works."""

    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def wait(self) -> None:
        """Blocks until the buffer may be written again; raises what the sending raised."""
        self._started.result().wait()


def _start_in_time(todo: SimpleQueue[_Item | None]) -> None:
    # No local name outlives a turn: it would keep the process group, and its threads, alive.
    while _start_next(todo.get()):
        pass


def _start_next(item: _Item | None) -> bool:
    if item is None:
        return False
    due_s, start, started = item
    time.sleep(max(0.0, due_s - time.monotonic()))
    try:
        started.set_result(start())
    except BaseException as error:  # whoever waits gets it
        started.set_exception(error)
    return True


def message_delay_s() -> float:
    """The delay that the environment asks for, in seconds; 0 where it asks for none.

    Raises:
        ValueError: The variable is not a number.
    """
    text = os.environ.get(MESSAGE_DELAY_VARIABLE) or "0"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{MESSAGE_DELAY_VARIABLE} must be seconds, not {text!r}") from None
