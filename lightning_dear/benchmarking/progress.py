"""How far a comparison is, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_LINE_EVERY_S = 15.0


class Progress:
    """A bar over blocks: redrawn on a terminal, a line now and then elsewhere.

    Args:
        num_blocks: How many there will be.
        stream: Where to; None: stderr.
        now_s: The clock.
    """

    def __init__(
        self,
        num_blocks: int,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_blocks = num_blocks
        self._stream = sys.stderr if stream is None else stream
        self._now_s = now_s
        self._began_s = now_s()
        self._printed_s = -_LINE_EVERY_S
        self._done = 0

    def begin(self, what: str) -> None:
        """Show what runs now."""
        is_terminal = self._stream.isatty()
        if not is_terminal and self._now_s() - self._printed_s < _LINE_EVERY_S:
            return
        self._printed_s = self._now_s()
        start, end = ("\r\x1b[K", "") if is_terminal else ("", "\n")
        self._stream.write(f"{start}{self.line(what)}{end}")
        self._stream.flush()

    def end(self) -> None:
        """Count what ran as done."""
        self._done += 1

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, what: str) -> str:
        """Return the bar, what runs, and the time left once a block has been timed."""
        filled = _WIDTH * self._done // max(self._num_blocks, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        left = ""
        if self._done:
            per_block_s = (self._now_s() - self._began_s) / self._done
            left = f", {_clock(per_block_s * (self._num_blocks - self._done))} left"
        return f"[{bar}] block {self._done + 1} of {self._num_blocks}: {what}{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
