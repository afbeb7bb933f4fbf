"""How far a study is, and when it will be done."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_LINE_EVERY_S = 15.0
_REDRAWN_EVERY_S = 0.5


class Progress:
    """A bar over optimizer steps: redrawn on a terminal, a line now and then elsewhere.

    Has no thread of its own, which would disturb what is measured.

    Args:
        num_steps: How many there will be in all; blocks differ in length.
        stream: Where to; None: stderr.
        now_s: The clock.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, markup=False)
        columns = (
            *(TaskProgressColumn(), BarColumn(24), TimeRemainingColumn()),
            TextColumn("left, now {task.description}", markup=False),
        )
        self._bar = Bar(
            *columns,
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_time=now_s,
            # What is left takes as long as what was done, on the average of all of it.
            speed_estimate_period=float("inf"),
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._now_s = now_s
        self._shown_s = float("-inf")

    def begin(self, what: str) -> None:
        """Say what runs now."""
        self._bar.update(self._task, description=what)
        self._show()

    def step(self) -> None:
        """Count a step."""
        self._bar.advance(self._task)
        self._show()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, soft_wrap=True)

    def leave_out(self, num_steps: int) -> None:
        """Count steps that need not be taken, as something that was never to be done."""
        (task,) = self._bar.tasks
        self._bar.update(self._task, total=(task.total or 0) - num_steps)

    def close(self) -> None:
        """Leave the terminal's line empty."""
        self._bar.stop()

    def _show(self) -> None:
        is_terminal = self._console.is_terminal
        every_s = _REDRAWN_EVERY_S if is_terminal else _LINE_EVERY_S
        if self._now_s() - self._shown_s < every_s:
            return
        self._shown_s = self._now_s()
        if is_terminal:
            self._bar.start()
            self._bar.refresh()
        else:
            self._console.print(self._bar.get_renderable())
