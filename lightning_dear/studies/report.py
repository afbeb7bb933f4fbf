"""What a study leaves in its folder, up to date from its first finished block on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_dear.studies.files import write_lines, write_text
from lightning_dear.studies.progress import Progress

R = TypeVar("R")

_DRAWN_EVERY_S = 30.0


@dataclass
class Report(Generic[R]):
    """summary.csv, table.txt and plot.png of a study's rows.

    Attributes:
        folder: Where to.
        rows: Returns the rows of all that has been measured so far.
        line_of: Returns a row's line of summary.csv.
        text_of: Returns all rows as a table.
        draw: Draws all rows into a file; called with at least one.
        progress: Closed before the table is printed; None: nobody shows one.
        lock: Held by whoever changes what `rows` returns: a signal may want it at any moment.
    """

    folder: Path
    rows: Callable[[], Sequence[R]]
    line_of: Callable[[R], Mapping[str, Any]]
    text_of: Callable[[Sequence[R]], str]
    draw: Callable[[Path, Sequence[R]], None]
    progress: Progress | None = None
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
            write_lines(self.folder / "summary.csv", [self.line_of(row) for row in rows])
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
            if self.progress is not None:
                self.progress.close()
            if text := self.write(is_last=True):
                print(f"{text}\nEvery step, the table and the plot: {self.folder}", flush=True)
