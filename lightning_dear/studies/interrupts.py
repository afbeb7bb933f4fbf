"""SIGINT and SIGTERM: a thread ends the process in good order, whatever its main thread does.

An exception that a signal's handler raises is not enough. Raised inside a destructor it is dropped,
and the program goes on; raised in a library it may be taken for another failure; and while the main
thread waits for other ranks no handler runs at all.
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
"""What a signal calls, with its number, in a thread of its own."""


class Interrupts:
    """What SIGINT and SIGTERM do to this process."""

    def __init__(self) -> None:
        self._acts: list[tuple[Act, bool]] = []
        self._write_end = -1
        self._is_settled = threading.Event()

    @contextmanager
    def call(self, act: Act, *, ends: bool = True) -> Iterator[None]:
        """Within, a signal calls `act` instead of what it would call outside.

        To be entered in the main thread. Is left when all signals so far have been acted on, and so
        never once the process is to end: what the main thread met since is of no interest then, and
        must not be printed.

        Args:
            act: Told the signal.
            ends: The process ends after it, with exit code 128 + the signal's number.
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
        """Within, both raise a KeyboardInterrupt here, whose argument is the exit code."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt(128 + number)

        with self.call(lambda number: None, ends=False), _handled_by(interrupt):
            yield

    @contextmanager
    def _listening(self) -> Iterator[None]:
        read_end, self._write_end = os.pipe()
        # `set_wakeup_fd` refuses a descriptor that blocks.
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
                # Neither `sys.exit` nor an exception ends a process from a thread.
                os._exit(128 + number)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, `handler` is Python's for both signals; not for one that is ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Whoever starts a program in the background may want it to ignore Ctrl-C.
    mine = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


INTERRUPTS = Interrupts()
"""This process's."""
