"""Spans of one rank's time, measured or simulated: their Chrome trace, and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LANES = ("forward", "backward", "reduce_scatter", "step", "all_gather", "other", "wait")
"""In the order in which a step goes through them.

`other` holds the flags of used parameters and the module buffers, `wait` what blocked the host."""


@dataclass(frozen=True)
class Span:
    """Something that took from `start_s` to `end_s` (seconds since any moment)."""

    lane: str
    name: str
    start_s: float
    end_s: float


def write_chrome_trace(
    spans: Sequence[Span], path: Path, rank: int = 0, lanes: Sequence[str] = LANES
) -> None:
    """Write spans in Chrome's trace format (opens in Perfetto), one thread per lane."""
    origin_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(lanes)
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": rank,
            "tid": lanes.index(span.lane),
            "ts": (span.start_s - origin_s) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


_COLORS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "reduce_scatter": "#f58518",
    "step": "#54a24b",
    "all_reduce": "#f58518",
    "all_gather": "#e45756",
    "codec": "#eeca3b",
    "other": "#b279a2",
    "wait": "#bab0ac",
}
_TITLES = {
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "codec": "encode, decode",
    "other": "flags, buffers",
    "wait": "host waits",
}

TITLE = "Two steps of strategy='dear' (on one host all-gathers may end before the next forward)"
"""Of what a run has recorded."""


def plot_timeline(
    spans: Sequence[Span], path: Path, title: str = TITLE, lanes: Sequence[str] = LANES
) -> None:
    """Writes a picture of `spans` to `path` (the suffix says which format), a row for each lane."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    origin_s = min((span.start_s for span in spans), default=0.0)
    for row, lane in enumerate(lanes):
        for number, span in enumerate(span for span in spans if span.lane == lane):
            # Collectives of several buckets are in flight at once: stagger them within the lane.
            num_rows = 4 if lane in ("reduce_scatter", "all_reduce", "all_gather") else 1
            height = 0.8 / num_rows
            axes.barh(
                row - 0.4 + height * (number % num_rows),
                (span.end_s - span.start_s) * 1e3,
                left=(span.start_s - origin_s) * 1e3,
                height=height * 0.9,
                align="edge",
                color=_COLORS[lane],
                edgecolor="white",
                linewidth=0.3,
            )
    axes.set_yticks(range(len(lanes)), [_TITLES.get(lane, lane) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
