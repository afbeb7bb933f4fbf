"""How far a comparison is, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_LINE_EVERY_S = 15.0


class Progress:
    """A bar over optimizer steps: redrawn on a terminal, a line now and then elsewhere.

    Args:
        num_steps: How many there will be, in all blocks; their lengths differ.
        stream: Where to; None: stderr.
        now_s: The clock.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
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

    def end(self, num_steps: int) -> None:
        """Count a block's steps as done."""
        self._done += num_steps

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, what: str) -> str:
        """Return the bar, what runs, and the time left once a block has been timed."""
        share = min(self._done / max(self._num_steps, 1), 1.0)
        filled = int(_WIDTH * share)
        bar = "#" * filled + "." * (_WIDTH - filled)
        left = ""
        if self._done:
            left_s = (self._now_s() - self._began_s) * (1 / share - 1)
            left = f", {_clock(left_s)} left"
        return f"[{bar}] {share:.0%}, now {what}{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
