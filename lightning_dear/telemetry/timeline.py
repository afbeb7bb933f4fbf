"""Records what one rank did when, as spans; draws them, and writes them as a Chrome trace."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_dear.names import need
from lightning_dear.telemetry.clock import Clock, HostClock

_COMPUTING = "computing"

_LANES = {
    "forward": (_COMPUTING, "#4c78a8"),
    "backward": (_COMPUTING, "#72b7b2"),
    "step": (_COMPUTING, "#54a24b", "#a3d39c"),
    "wait": (_COMPUTING, "white"),
    "encode": ("encoding", "#9d755d", "#d8b5a5"),
    "decode": ("decoding", "#6b6ecf", "#b5b6e8"),
    "reduce_scatter": ("gradients travel\n(reduce-scatter)", "#f58518", "#ffbf79"),
    "all_gather": ("results travel\n(all-gather)", "#b279a2", "#e0bfd6"),
    "other": ("flags, buffers travel", "#79706e", "#bab0ac"),
    "first_hop": ("of that, within hosts\n(first hops)", "#79706e", "#bab0ac"),
    "exchange": ("exchanges of fragments\n(send to merge)", "#eeca3b", "#f6e5a1"),
}
"""Lane, which is a kind of span -> (row of the picture, colours that neighbouring spans take in
turn).

`encode` and `decode` show both halves of the exchange. `other` shows messages of flags (which tell
which parameters got a gradient) and of the module's buffers. `wait` shows waits for collectives. In
a collective with two hops, `first_hop` shows the first hop, within the host. The span of the whole
collective, in its own lane, contains that time, too. With local steps `exchange` shows each
exchange of a fragment, from the step that sends it to the end of its merge."""

_TRAVEL = ("reduce_scatter", "all_gather", "other")
"""Lanes of collectives. `first_hop` is left out, since its spans are parts of spans in these."""


class Span(NamedTuple):
    """Describes one event of a timeline.

    Attributes:
        lane: Kind of event: a key of `_LANES`.
        name: Name of the event, such as "bucket 3".
        start_s: Beginning, in seconds since the beginning of the timeline's first span.
        end_s: End, in seconds since the beginning of the timeline's first span.
    """

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Collects spans of a few steps. Recording costs time, as a thread waits for each collective.

    (On a CUDA device, a stream waits instead.) Thread-safe: the threads that wait for collectives
    add spans, too, and appending to a list is atomic.

    Attributes:
        clock: Clock that makes the marks. `Instruments.record_in` replaces it with the clock of the
            device.
        exchange_steps: Number of steps in a row in which, with local steps, an exchange surely
            begins and ends. `Instruments.record_in` sets it. 0 means that there are none.
    """

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self.exchange_steps = 0
        self._marked: list[tuple[str, str, Any, Any]] = []

    @property
    def spans(self) -> list[Span]:
        """Returns all recorded spans in the order of their beginnings. The first begins at 0 s.

        On a CUDA device, blocks until the device has reached all marks. Spans that have not ended
        yet are not included; see `finish`.
        """
        marked, at = list(self._marked), self.clock.seconds
        timed = sorted((at(start), at(end), lane, name) for lane, name, start, end in marked)
        return [
            Span(lane, name, start_s - timed[0][0], end_s - timed[0][0])
            for start_s, end_s, lane, name in timed
        ]

    @property
    def waited(self) -> tuple[float, float, float]:
        """Returns how long a recorded batch waited, and took, in the mean; for `latest_rank`.

        On a CUDA device, blocks as `spans` does.
        """
        spans = self.spans
        num_batches = sum(one.lane == "forward" for one in spans) or 1
        waits_s = sum(one.end_s - one.start_s for one in spans if one.lane == "wait")
        whole_s = max((one.end_s for one in spans), default=0.0)
        return waits_s / num_batches, 0.0, whole_s / num_batches

    def record(self, lane: str, name: str, start: Any, end: Any) -> None:
        """Adds a span of `lane` between two marks of `clock`."""
        self._marked.append((lane, name, start, end))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records the `with` block as a span, unless it raises."""
        start = self.clock.mark()
        yield
        # There is no `finally`: after a failure of the device, the mark could raise another error,
        # which would hide the first error.
        self.record(lane, name, start, self.clock.mark())

    def observe(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """Records a span from now until a launched collective has arrived. Does not block.

        Args:
            lane: Lane of the span.
            name: Name of the span.
            arrive: Function that waits for the collective.

        Returns:
            Function to call instead of `arrive`; see `HostClock.observe`.
        """
        return self.clock.observe(lane, arrive, partial(self.record, lane, name))

    def write_chrome_trace(self, path: Path, rank: int = 0) -> None:
        """Writes the spans in Chrome's trace format, which Perfetto opens.

        Each lane is a thread of the trace. If spans of a lane overlap, it is several threads, since
        spans of one thread must not overlap. Local.

        Args:
            path: File to write; overwritten.
            rank: Rank of this process, which is the process number in the trace.
        """
        threads: list[list[Span]] = []
        for span in sorted(self.spans, key=lambda one: list(_LANES).index(one.lane)):
            like = [own for own in threads if own[0].lane == span.lane]
            free = [own for own in like if own[-1].end_s <= span.start_s]
            if free:
                free[0].append(span)
            else:
                threads.append([span])
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": one.lane}}
            for tid, (one, *_) in enumerate(threads)
        ]
        for tid, own in enumerate(threads):
            for lane, name, start_s, end_s in own:
                event = {"ph": "X", "name": name, "cat": lane, "pid": rank, "tid": tid}
                events.append({**event, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _in_turn(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans without overlaps: each begins, at the earliest, at the end of earlier ones.

    A span that ends before earlier spans do becomes empty.

    Args:
        spans: Spans in the order of their beginnings.
    """
    turns, until_s = list[Span](), 0.0
    for span in spans:
        turns.append(span._replace(start_s=min(max(span.start_s, until_s), span.end_s)))
        until_s = max(until_s, span.end_s)
    return turns


def _summary(spans: Sequence[Span], begin_s: float, last_s: float, num_steps: int) -> str:
    """Returns the title of the picture: how long data travel, and what of that is hidden.

    All-gathers of a step may still run during the next forward. So a collective counts if it was
    launched before the last forward begins. All waits count, whenever they were.

    Args:
        spans: Spans of the steps.
        begin_s: Beginning of the first forward, in seconds.
        last_s: Beginning of the last forward, in seconds.
        num_steps: Number of steps between the two.
    """

    def covered_s(*lanes: str) -> float:
        own = [one for one in spans if one.lane in lanes]
        first = [one for one in own if one.lane == "wait" or one.start_s < last_s]
        return sum(one.end_s - one.start_s for one in _in_turn(first))

    travel_s = covered_s(*_TRAVEL)
    # The time in which data travel while the rank does not wait.
    hidden_s = covered_s("wait", *_TRAVEL) - covered_s("wait")
    lasted = f"for {num_steps} steps" if num_steps > 1 else "from forward to forward"
    return (
        f"{(last_s - begin_s) * 1e3:.1f} ms {lasted}. Data travel for"
        f" {travel_s * 1e3:.1f} ms, {hidden_s / (travel_s or 1.0):.0%} of it hidden:"
        " computing goes on meanwhile."
    )


def plot_timeline(spans: Sequence[Span], path: Path, late: str = "", num_batches: int = 2) -> None:
    """Draws the spans of the first batches, and writes the picture to `path`.

    Collectives, exchanges, encodings and decodings of a lane are drawn without overlaps: each bar
    begins at the beginning of its span, or at the end of the bar before it, whichever is later.

    Args:
        spans: Spans, as `Timeline.spans` returns them.
        path: File to write; overwritten. Its suffix tells the format, such as ".png".
        late: Second line of the title: which rank is late. Empty if that is not known.
        num_batches: Number of batches to draw, 2 or more. What begins in the forward of the batch
            after them, or later, is left out.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; the extra `apps` installs it.
    """
    need(f"The picture {path.name}", "matplotlib")
    from matplotlib.figure import Figure

    begins_s = [one.start_s for one in spans if one.lane == "forward"]
    until_s = (begins_s[num_batches:] or [math.inf])[0]
    shown = [one for one in spans if one.start_s < until_s]
    end_s = max((one.end_s for one in shown), default=0.0)
    lanes = {lane: [one for one in shown if one.lane == lane] for lane in _LANES}
    rows = [*dict.fromkeys(_LANES[lane][0] for lane, own in lanes.items() if own)]
    figure = Figure(figsize=(13, 2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlim=(0, end_s or 1.0), xlabel="ms (numbers: buckets)")
    bounds_s = begins_s[:num_batches] if begins_s[1:] else [*begins_s, end_s]
    title = _summary(shown, bounds_s[0], bounds_s[-1], len(bounds_s) - 1)
    axes.set_title(f"{title}\n{late}".rstrip())
    for lane, own in lanes.items():
        row, *colors = _LANES[lane]
        for number, span in enumerate(own if row == _COMPUTING else _in_turn(own)):
            _draw(axes, rows.index(row), colors[number % len(colors)], span, is_first=not number)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:g}")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=130)


def _draw(axes: Any, row: int, color: str, span: Span, *, is_first: bool) -> None:
    """Draws a span as a bar, with its name in it if there is room.

    A wait is drawn as a hatched bar, and as a pale stripe through all rows.

    Args:
        axes: matplotlib axes; mutated.
        row: Row of the picture, from 0.
        color: Colour of the bar.
        span: Span to draw.
        is_first: Whether the span is the first of its lane. If so, and if the lane is in the row of
            computing, the legend gets an entry for the lane.
    """
    width_s, is_wait = span.end_s - span.start_s, span.lane == "wait"
    look = {"hatch": "////", "edgecolor": "#e45756", "linewidth": 0.5} if is_wait else {}
    if is_wait:
        axes.axvspan(span.start_s, span.end_s, color="#e45756", alpha=0.12, linewidth=0)
    legend = span.lane if is_first and _LANES[span.lane][0] == _COMPUTING else None
    axes.barh(row, width_s, left=span.start_s, color=color, label=legend, **look)
    name = span.name.removeprefix("bucket ")
    # The name is drawn if it fits into the bar: about 200 characters fit into the whole picture.
    if name != span.lane and len(name) + 1 < 200 * width_s / axes.get_xlim()[1]:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if is_wait else None
        middle_s = span.start_s + width_s / 2
        axes.text(middle_s, row, name, ha="center", va="center", fontsize=7, bbox=box)
