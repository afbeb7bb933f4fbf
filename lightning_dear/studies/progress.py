"""Progress of a study, and the time that is left."""

import math
import sys
from typing import Any, TextIO

from rich import console, progress

_LINE_EVERY_S = 15.0
_REDRAWN_EVERY_S = 0.5


class Progress:
    """A progress bar over optimizer steps. If stderr is no terminal, a line from time to time.

    It uses no thread, because that would disturb the measurements.

    Args:
        num_steps: Total number of optimizer steps.
        stream: Stream to write to. None means stderr.
    """

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._console = console.Console(file=stream or sys.stderr, highlight=False, markup=False)
        share, bar = progress.TaskProgressColumn(), progress.BarColumn(24)
        left = progress.TimeRemainingColumn()
        now = progress.TextColumn("left, now {task.description}", markup=False)
        # The remaining time is estimated from the mean over all steps so far.
        looks: Any = {"auto_refresh": False, "transient": True, "speed_estimate_period": math.inf}
        self._bar = progress.Progress(share, bar, left, now, console=self._console, **looks)
        self._task = self._bar.add_task("", total=num_steps)
        self._shown_s = -math.inf

    def begin(self, what: str) -> None:
        """Show `what` as the present work."""
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
        """Subtract steps that need not be taken from the total number."""
        (task,) = self._bar.tasks
        self._bar.update(self._task, total=(task.total or 0) - num_steps)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._bar.stop()

    def _show(self) -> None:
        is_terminal = self._console.is_terminal
        every_s = _REDRAWN_EVERY_S if is_terminal else _LINE_EVERY_S
        now_s = self._bar.get_time()
        if now_s - self._shown_s < every_s:
            return
        self._shown_s = now_s
        if is_terminal:
            self._bar.start()
            self._bar.refresh()
        else:
            self._console.print(self._bar.get_renderable())
