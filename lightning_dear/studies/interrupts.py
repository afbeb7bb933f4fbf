"""SIGINT and SIGTERM: a thread cleans up and ends the process, whatever its main thread does.

An exception from a signal handler is not enough. Inside a destructor it is dropped, and the program
continues. Inside a library it may be taken for another failure. While the main thread waits for
other ranks, no handler runs at all.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Act = Callable[[int], None]
"""Function that a signal calls with its number, in a separate thread."""


class Interrupts:
    """Stack of functions that SIGINT and SIGTERM call in this process."""

    def __init__(self) -> None:
        self._acts: list[tuple[Act, bool]] = []
        self._write_end = -1
        self._is_settled = threading.Event()

    @contextmanager
    def call(self, act: Act, *, ends: bool = True) -> Iterator[None]:
        """Within, a signal calls `act` instead of the function of an enclosing `call`.

        Must be entered in the main thread. Leaving blocks until `act` has returned for all signals
        so far. If the process is to end, leaving blocks forever, so that the main thread does not
        print errors that the signal has caused.

        Args:
            act: Called with the signal's number.
            ends: Whether the process ends after `act`, with exit code 128 + the signal's number.
        """
        with nullcontext() if self._acts else self._listening():
            self._acts.append((act, ends))
            try:
                yield
            finally:
                self._is_settled.clear()
                os.write(self._write_end, b"\0")
                self._is_settled.wait()
                self._acts.pop()

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Within, both signals raise a KeyboardInterrupt in the main thread.

        Its argument is the exit code.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt(128 + number)

        with self.call(lambda number: None, ends=False), _handled_by(interrupt):
            yield

    @contextmanager
    def _listening(self) -> Iterator[None]:
        read_end, self._write_end = os.pipe()
        # `set_wakeup_fd` requires a non-blocking descriptor.
        os.set_blocking(self._write_end, False)
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(read_end,), daemon=True).start()
        try:
            with _handled_by(lambda number, frame: None):
                yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(self._write_end)

    def _hear(self, read_end: int) -> None:
        with os.fdopen(read_end, "rb", buffering=0) as signals:
            while heard := signals.read(1):
                if heard[0] in SIGNALS:
                    self._act_on(heard[0])
                elif heard == b"\0":
                    self._is_settled.set()

    def _act_on(self, number: int) -> None:
        act, ends = self._acts[-1] if self._acts else (lambda number: None, True)
        try:
            act(number)
        finally:
            if ends:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                # In a thread, neither `sys.exit` nor an exception ends the process.
                os._exit(128 + number)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, `handler` is Python's handler of both signals, except of a signal that is ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # A shell may have started this program in the background with SIGINT ignored.
    mine = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


INTERRUPTS = Interrupts()
"""The one instance of this process, since signal handlers are global."""
