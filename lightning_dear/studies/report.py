"""What a study leaves in its folder, up to date from its first finished block on."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from lightning_dear.studies.files import Line, read_lines, write_lines, write_text
from lightning_dear.studies.progress import Progress

TextOf = Callable[[Sequence[Line]], str]
"""Returns all rows as a table, for people."""

Draw = Callable[[Path, Sequence[Line]], None]
"""Draws all rows into a file; called with at least one."""

_DRAWN_EVERY_S = 30.0


@dataclass
class Report:
    """summary.csv, table.txt and plot.png of a study's rows.

    Attributes:
        folder: Where to.
        rows: Returns the lines of summary.csv, of all that has been measured so far.
        text_of: See there.
        draw: See there.
        progress: Closed before the table is printed; shown to nobody unless it is replaced.
        lock: Held by whoever changes what `rows` returns: a signal may want it at any moment.
    """

    folder: Path
    rows: Callable[[], Sequence[Line]]
    text_of: TextOf
    draw: Draw
    progress: Progress = field(default_factory=lambda: Progress(0, StringIO()))
    lock: threading.RLock = field(default_factory=threading.RLock)
    _drawn_s: float = float("-inf")
    _is_finished: bool = False

    def write(self, *, is_last: bool = False) -> str:
        """Write what is known now, and return the table; empty and no files for no rows.

        The plot, which takes a second, is drawn the first and the last time and now and then.
        """
        with self.lock:
            rows = self.rows()
            if not rows:
                return ""
            text = self.text_of(rows)
            write_lines(self.folder / "summary.csv", rows)
            write_text(self.folder / "table.txt", text)
            if is_last or time.monotonic() - self._drawn_s > _DRAWN_EVERY_S:
                self.draw(self.folder / "plot.png", rows)
                self._drawn_s = time.monotonic()
            return text

    def finish(self) -> None:
        """Write everything and print the table, once; nothing for no rows."""
        with self.lock:
            if self._is_finished:
                return
            self._is_finished = True
            self.progress.close()
            if text := self.write(is_last=True):
                print(f"{text}\nEvery step, the table and the plot: {self.folder}", flush=True)


def show(folder: Path, words: frozenset[str], text_of: TextOf, draw: Draw) -> None:
    """Print the table of a folder's summary.csv, and write it and the plot again.

    Args:
        folder: Of a run, finished or not, also of an earlier version.
        words: Columns of summary.csv that are no figures.
        text_of: See there.
        draw: See there.

    Raises:
        ValueError: If there is no summary.csv with such columns.
    """
    rows = read_lines(folder / "summary.csv", words)
    if not rows or not words <= rows[0].keys():
        raise ValueError(f"{folder} has no summary.csv that this program has written.")
    Report(folder, lambda: rows, text_of, draw).finish()
