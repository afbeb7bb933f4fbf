"""Messages that arrive late on purpose: the start-up latency (alpha) of a slower network."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dear.collectives.background import Background

MESSAGE_DELAY_VARIABLE = "LIGHTNING_DEAR_MESSAGE_DELAY_S"
"""Seconds by which strategy="dear" holds back each message it sends through gloo."""


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
        calls: What sends and receives; see `Collectives`, for which this stands in for it.

    Raises:
        ValueError: `delay_s` is not a positive, finite number.
    """

    def __init__(self, delay_s: float, calls: Any = dist) -> None:
        if not 0 < delay_s < math.inf:
            raise ValueError(f"a message's delay must be a positive number of s, not {delay_s}")
        self.delay_s = delay_s
        self._calls = calls
        self._thread = Background("dear-late-sends")

    def __getattr__(self, name: str) -> Any:
        # All but sends: late messages make whoever receives them late.
        return getattr(self._calls, name)

    def isend(self, *args: Any, **kwargs: Any) -> DelayedWork:
        """Send in `delay_s`; return at once."""
        due_s, calls = time.monotonic() + self.delay_s, self._calls

        def start() -> Any:
            time.sleep(max(0.0, due_s - time.monotonic()))
            return calls.isend(*args, **kwargs)

        return DelayedWork(self._thread.submit(start))


class DelayedWork:
    """A message that may not have been sent yet; `wait` is that of torch's own works."""

    def __init__(self, started: Future[Any]) -> None:
        self._started = started

    def wait(self, *timeout: timedelta) -> None:
        """Blocks until the buffer may be written again; raises what the sending raised."""
        self._started.result().wait(*timeout)


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
