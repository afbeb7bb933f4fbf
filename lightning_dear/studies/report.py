"""Files of a study in its folder, written again after each block."""

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
"""Draws all rows, at least one, into a PNG file."""

_DRAWN_EVERY_S = 30.0


@dataclass
class Report:
    """summary.csv, table.txt and plot.png of a study's rows.

    Attributes:
        folder: Folder of the files.
        rows: Returns the lines of summary.csv, from all measurements so far.
        text_of: Makes the table.
        draw: Draws the plot.
        progress: Progress bar, closed before the table is printed. The default shows nothing.
        lock: Lock that code must hold while it changes what `rows` returns, because a signal's
            thread may write the report at any moment.
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
        """Write all files and return the table. Without rows, write nothing and return "".

        The plot takes a second. It is drawn the first time, the last time, and every 30 s.
        """
        with self.lock:
            if not (rows := self.rows()):
                return ""
            text = self.text_of(rows)
            write_lines(self.folder / "summary.csv", rows)
            write_text(self.folder / "table.txt", text)
            if is_last or time.monotonic() - self._drawn_s > _DRAWN_EVERY_S:
                self.draw(self.folder / "plot.png", rows)
                self._drawn_s = time.monotonic()
            return text

    def finish(self) -> None:
        """Write all files and print the table, once. Without rows, print and write nothing."""
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
        folder: Folder of a run, finished or not; an earlier version may have written it.
        words: Columns of summary.csv that are text; the file must have all of them.
        text_of: Makes the table.
        draw: Draws the plot.

    Raises:
        ValueError: If there is no summary.csv with such columns.
    """
    rows = read_lines(folder / "summary.csv", words)
    if not rows or not words <= rows[0].keys():
        raise ValueError(f"{folder} has no summary.csv of this program. Name the folder of a run.")
    Report(folder, lambda: rows, text_of, draw).finish()
