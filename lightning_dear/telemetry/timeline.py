"""What happened when: spans of one rank, a picture of them, and their Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_dear.names import need
from lightning_dear.telemetry.clock import Clock, HostClock

LANES = (
    "forward",
    "backward",
    "reduce_scatter",
    "step",
    "all_gather",
    "other",
    "wait",
    "first_hop",
)
"""In the order in which a step goes through them.

`other` holds the flags of used parameters and the module buffers, `wait` what blocked the host,
`first_hop` the first part of collectives in two hops, of which the whole is in the other lanes."""


@dataclass(frozen=True)
class Span:
    """Something that took from `start_s` to `end_s` (seconds since any moment)."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans. Threads wait for the collectives meanwhile, so record few steps.

    Thread-safe, as appending to a list is: collectives are recorded by the threads that wait for
    them.

    Attributes:
        clock: When something happens; the pipeline that records puts its device's here.
    """

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self._marked: list[tuple[str, str, Any, Any]] = []

    @property
    def spans(self) -> list[Span]:
        """Finished spans, by start time; blocks until the device has finished them."""
        marked, at = list(self._marked), self.clock.seconds
        spans = [Span(lane, name, at(start), at(end)) for lane, name, start, end in marked]
        return sorted(spans, key=lambda span: span.start_s)

    def record(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Adds a span between two marks of the clock."""
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
        """Records when a collective's data has arrived; see `HostClock.observe`."""
        return self.clock.observe(lane, arrive, partial(self.record, lane, name))

    def finish(self) -> None:
        """Blocks until every observed collective has arrived."""
        self.clock.finish()

    def write_chrome_trace(self, path: Path, rank: int = 0) -> None:
        """Writes the spans in Chrome's trace format (opens in Perfetto), one thread per lane."""
        spans = self.spans
        origin_s = min((span.start_s for span in spans), default=0.0)
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


# In the order of `LANES`.
_COLORS = ("#4c78a8", "#72b7b2", "#f58518", "#54a24b", "#e45756", "#b279a2", "#bab0ac", "#9d755d")
_TITLES = {"other": "flags, buffers", "wait": "host waits", "first_hop": "first hops"}

_TITLE = "Two steps of strategy='dear' (on one host all-gathers may end before the next forward)"


def plot_timeline(spans: Sequence[Span], path: Path) -> None:
    """Writes a picture of `spans` to `path` (the suffix says which format), a row for each lane.

    Raises:
        ModuleNotFoundError: If matplotlib is missing, which the extra `apps` brings.
    """
    need(f"The picture {path.name}", "matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.add_subplot()
    origin_s = min((span.start_s for span in spans), default=0.0)
    has_hops = any(span.lane == "first_hop" for span in spans)
    lanes = LANES if has_hops else LANES[:-1]
    for row, lane in enumerate(lanes):
        for number, span in enumerate(span for span in spans if span.lane == lane):
            # Collectives of several buckets are in flight at once: stagger them within the lane.
            num_rows = 4 if lane in ("reduce_scatter", "all_gather", "first_hop") else 1
            height = 0.8 / num_rows
            axes.barh(
                row - 0.4 + height * (number % num_rows),
                (span.end_s - span.start_s) * 1e3,
                left=(span.start_s - origin_s) * 1e3,
                height=height * 0.9,
                align="edge",
                color=_COLORS[row],
                edgecolor="white",
                linewidth=0.3,
            )
    axes.set_yticks(
        range(len(lanes)), [_TITLES.get(lane, lane.replace("_", "-")) for lane in lanes]
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(_TITLE, fontsize=10)
    figure.savefig(path, dpi=130)
