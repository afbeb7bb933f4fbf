"""What happened when: spans of one rank, for a picture and a Chrome trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LANES = ("forward", "backward", "reduce_scatter", "step", "all_gather", "wait")
"""In the order in which a step goes through them; `wait` holds what blocked the host, and why."""


@dataclass(frozen=True)
class Span:
    """Something that took from `start_s` to `end_s` (seconds, `time.perf_counter`)."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans. Recording a collective's arrival costs a thread each, so record few steps.

    Thread-safe: collectives are recorded by the threads that wait for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._watchers: list[threading.Thread] = []

    @property
    def spans(self) -> list[Span]:
        """Finished spans, by start time."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start_s)

    def record(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Adds a finished span."""
        with self._lock:
            self._spans.append(Span(lane, name, start_s, end_s))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records the time spent in the `with` block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.record(lane, name, start_s, time.perf_counter())

    def observe(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """Waits for a collective in a thread of its own, to see when its data arrived.

        Returns:
            What the engine waits with instead of `arrive`; re-raises what `arrive` raised.
        """
        failure: list[BaseException] = []

        def watch() -> None:
            try:
                with self.span(lane, name):
                    arrive()
            except BaseException as error:
                failure.append(error)

        watcher = threading.Thread(target=watch, name=f"dear-timeline-{lane}", daemon=True)
        watcher.start()
        self._watchers.append(watcher)

        def wait() -> None:
            watcher.join()
            if failure:
                raise failure[0]

        return wait

    def finish(self) -> None:
        """Blocks until every observed collective has arrived."""
        for watcher in self._watchers:
            watcher.join()
        self._watchers.clear()

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
