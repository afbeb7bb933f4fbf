"""What happened when: spans of one rank, for a picture and a Chrome trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dear.clock import Clock, HostClock

LANES = ("forward", "backward", "reduce_scatter", "step", "all_gather", "other", "wait")
"""In the order in which a step goes through them.

`other` holds the flags of used parameters and the module buffers, `wait` what blocked the host."""


@dataclass(frozen=True)
class Span:
    """Something that took from `start_s` to `end_s` (seconds, `time.perf_counter`)."""

    lane: str
    name: str
    start_s: float
    end_s: float


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
        spans = self.spans
        origin_s = spans[0].start_s if spans else 0.0
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(LANES)
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": rank,
                "tid": LANES.index(span.lane),
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
            for span in spans
        ]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
