"""Ctrl-C and SIGTERM: heard where Python cannot interrupt the main thread, and asked for freely.

From version 2.6 on Lightning broadcasts before every batch whether rank 0 was told to end, on the
default group, and all ranks wait for it. When a batch starts, the link is full of all-gathers, and
the answer queues behind them: the overlap with forward would be lost. So the answer travels with
the flags of the reduce-scatters instead (`Signal`), and is known when the batch starts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dear.collectives.work import Signal

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
    # `set_wakeup_fd` refuses a descriptor that blocks.
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


_QUESTION = "_broadcast_sigterm_tensor"


def answer_sigterm(trainer: Any, signal: Signal) -> None:
    """Lets the trainer's loop take the answer from `signal`; it asks itself where there is none.

    Undone by `ask_sigterm_again`. Does nothing where this Lightning does not ask.
    """
    loop = trainer.fit_loop.epoch_loop
    ask = getattr(loop, _QUESTION, None)
    if ask is None:
        return
    signal.ask = lambda: bool(getattr(trainer, "received_sigterm", False))

    def answer() -> None:
        heard, signal.heard = signal.heard, None
        # All ranks have heard the same; if there was a signal, Lightning does what it does then.
        if heard is not False:
            ask()

    setattr(loop, _QUESTION, answer)


def ask_sigterm_again(trainer: Any) -> None:
    """Undoes `answer_sigterm`."""
    trainer.fit_loop.epoch_loop.__dict__.pop(_QUESTION, None)
