"""Ctrl-C and SIGTERM while the main thread is blocked where Python cannot interrupt it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DONE = b"\0"


@contextmanager
def call_if_unheard(
    heard: threading.Event, after_s: float, act: Callable[[], None]
) -> Iterator[None]:
    """Within, calls `act` if the first SIGINT or SIGTERM goes unheard.

    Python runs a signal's handler in the main thread, once that thread runs Python again: never, if
    it waits in a collective for a rank that hangs. Does nothing outside the main thread, or where
    somebody else uses `signal.set_wakeup_fd`, such as asyncio.

    Args:
        heard: Set by what the handlers do.
        after_s: Seconds that they have for it.
        act: Called once, in a thread of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)
        yield
        return

    def listen() -> None:
        has_waited = False
        # Read to the end: whoever writes into a pipe that nobody reads is told so on stderr.
        with os.fdopen(read_end, "rb", buffering=0) as signals:
            while (number := signals.read(1)) not in (b"", _DONE):
                if has_waited or number[0] not in (signal.SIGINT, signal.SIGTERM):
                    continue
                has_waited = True
                if not heard.wait(after_s):
                    act()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        heard.set()
        os.close(write_end)
