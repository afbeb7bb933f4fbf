"""What happened when: spans of one rank, for a picture and a Chrome trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dear.telemetry.clock import Clock, HostClock
from lightning_dear.telemetry.spans import Span, write_chrome_trace


class Timeline:
    """Collects spans. Threads wait for the collectives meanwhile, so record few steps.

    Thread-safe: collectives are recorded by the threads that wait for them.

    Attributes:
        clock: When something happens; the pipeline that records puts its device's here.
    """

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self._lock = threading.Lock()
        self._marked: list[tuple[str, str, Any, Any]] = []

    @property
    def spans(self) -> list[Span]:
        """Finished spans, by start time; blocks until the device has finished them."""
        with self._lock:
            marked = list(self._marked)
        seconds = self.clock.seconds
        spans = [
            Span(lane, name, seconds(start), seconds(end)) for lane, name, start, end in marked
        ]
        return sorted(spans, key=lambda span: span.start_s)

    def record(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Adds a span between two marks of the clock."""
        with self._lock:
            self._marked.append((lane, name, start, end))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records the time spent in the `with` block."""
        start = self.clock.mark()
        try:
            yield
        finally:
            self.record(lane, name, start, self.clock.mark())

    def observe(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """Records when a collective's data has arrived; see `Clock.observe`."""
        return self.clock.observe(lane, arrive, partial(self.record, lane, name))

    def finish(self) -> None:
        """Blocks until every observed collective has arrived."""
        self.clock.finish()

    def write_chrome_trace(self, path: Path, rank: int = 0) -> None:
        """Writes the spans in Chrome's trace format (opens in Perfetto), one thread per lane."""
        write_chrome_trace(self.spans, path, rank)
