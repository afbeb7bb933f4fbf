"""How far a comparison is, and when it will be done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_LINE_EVERY_S = 15.0
_REDRAWN_EVERY_S = 0.5


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
        self._shown_s = -_LINE_EVERY_S
        self._done = 0
        self._what = ""

    def begin(self, what: str) -> None:
        """Say what runs now."""
        self._what = what
        self._show()

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        self._show()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.close()
        self._stream.write(f"{line}\n")
        self._stream.flush()
        self._shown_s = -_LINE_EVERY_S

    def leave_out(self, num_steps: int) -> None:
        """Count steps that need not be taken, as something that was never to be done."""
        self._num_steps -= num_steps

    def close(self) -> None:
        """Leave the terminal's line empty."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self) -> str:
        """Return the bar, what runs, and the time left once a step is done."""
        share = min(self._done / max(self._num_steps, 1), 1.0)
        filled = int(_WIDTH * share)
        bar = "#" * filled + "." * (_WIDTH - filled)
        left = ""
        if self._done:
            left_s = (self._now_s() - self._began_s) * (1 / share - 1)
            left = f", {_clock(left_s)} left"
        return f"[{bar}] {share:.0%}, now {self._what}{left}"

    def _show(self) -> None:
        is_terminal = self._stream.isatty()
        if self._now_s() - self._shown_s < (_REDRAWN_EVERY_S if is_terminal else _LINE_EVERY_S):
            return
        self._shown_s = self._now_s()
        start, end = ("\r\x1b[K", "") if is_terminal else ("", "\n")
        self._stream.write(f"{start}{self.line()}{end}")
        self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
