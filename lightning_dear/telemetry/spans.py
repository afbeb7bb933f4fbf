"""Spans of one rank's time, and their Chrome trace; measured or simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
