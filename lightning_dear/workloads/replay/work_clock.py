"""For how long a thread has had something to do, whether or not it got a core for it."""

from __future__ import annotations

import os
import threading
import time
from typing import BinaryIO

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Of the thread that opens it: ns computed, ns ready to run without a core, turns (Linux)."""

_of_thread = threading.local()


def work_clock() -> float:
    """Seconds for which the calling thread has computed, or would have if a core had been free.

    What is left of a time span is what the thread was blocked for. Where the kernel does not tell
    of waits for a core, they count as blocked.
    """
    return time.thread_time() + _queued_s()


def _queued_s() -> float:
    owner, file = getattr(_of_thread, "schedstat", (None, None))
    if owner != threading.get_native_id():
        # A forked child has its parent's file.
        file = _opened()
        _of_thread.schedstat = threading.get_native_id(), file
    return int(os.pread(file.fileno(), 64, 0).split()[1]) / 1e9 if file else 0.0


def _opened() -> BinaryIO | None:
    try:
        return open(_SCHEDSTAT, "rb", buffering=0)
    except OSError:
        return None
