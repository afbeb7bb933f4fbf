"""A comparison for people: a block of rows for each point as text, and a panel as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_dear.studies.files import read_lines, write_lines
from lightning_dear.studies.plot import BLUE, GREY, ORANGE, RED, picture
from lightning_dear.studies.records import COMPUTE_ALONE, Block, Point, Row
from lightning_dear.studies.report import Report
from lightning_dear.studies.summary import read_blocks, summarize, summary_line
from lightning_dear.studies.table import MISSING, WIDTH, format_table, shown

_TITLES = (
    *("entry", "step ms", "ratio [spread]", "compute ms", "RS wait ms", "AG wait ms"),
    *("MB/step leaves a host", "peak MB", "CPU/rank", "codec ms", "/bound", "/DeAR", ""),
)

LEGEND = (
    "step: median of the rounds, each the median of its steps. ratio: step over the first entry's,"
    "\nmedian and spread of the rounds.\n"
    "RS/AG wait: step time that stood still for reduce-scatters and all-gathers.\n"
    "codec: CPU time of encoding and decoding, a rank's in a step.\n"
    "MB/step leaves a host: 10^6 bytes by its interface's counter, headers included.\n"
    "/bound: step over max(forward + backward, bytes / rate). /DeAR: over max(forward, all-gather)"
    " +\nmax(backward, reduce-scatter). Bytes in both bounds: 2(P-1)/P of the uncompressed model.\n"
    "-: not measured; what no entry has is left out."
)

_PARTS = (
    ("compute and the rest", "compute_s", BLUE),
    ("waits for gradients", "exposed_reduce_scatter_s", ORANGE),
    ("waits for parameters", "exposed_all_gather_s", RED),
)


def join_parts(folder: Path) -> bool:
    """Write what the parts of a job have measured, one after the other, into its folder.

    Returns:
        Whether it has such parts: folders of its own for points that need other ranks or links.
    """
    parts = sorted(folder.glob("[0-9]*/blocks.csv"), key=lambda path: int(path.parent.name))
    for name in ("raw.csv", "blocks.csv") if parts else ():
        lines = [line for part in parts for line in read_lines(part.with_name(name))]
        write_lines(folder / name, lines)
    return bool(parts)


def report_of(folder: Path) -> Report[Row]:
    """Return the report of what `dear-bench` has measured in a folder; writes nothing yet."""

    def rows() -> list[Row]:
        points = read_blocks(folder).items()
        return [row for point, blocks in points for row in summarize(point, blocks)]

    return Report(folder, rows, summary_line, text_of, draw)


def text_of(rows: Sequence[Row]) -> str:
    """Return all rows and what they come to, those of one point under a line on it."""
    parts = []
    for point, group in groupby(rows, key=lambda row: row.point):
        of_point = list(group)
        notes = [f"{row.entry}: {row.note}" for row in of_point if row.note]
        parts.append("\n".join([describe(point), _table(of_point), *notes]))
    return "\n\n".join([*parts, "\n".join([LEGEND, *verdicts(rows)])])


def _table(rows: Sequence[Row]) -> str:
    cells = [_cells(row) for row in rows]
    # Columns in which somebody has a figure, or words.
    kept = [
        column
        for column in range(len(_TITLES))
        if any(row[column] not in (MISSING, "0.0") for row in cells)
    ]
    titles = [_TITLES[column] for column in kept]
    return format_table(titles, [[row[column] for column in kept] for row in cells], WIDTH)


def _cells(row: Row) -> list[str]:
    spread = f"{shown(row.ratio_min, '.3f')}-{shown(row.ratio_max, '.3f')}"
    return [
        row.entry,
        _ms(row.step_s),
        MISSING if row.ratio is None else f"{row.ratio:.3f} [{spread}]",
        _ms(row.compute_s),
        _ms(row.exposed_reduce_scatter_s),
        _ms(row.exposed_all_gather_s),
        shown(row.host_bytes, ".1f", 1e-6),
        shown(row.peak_memory_bytes, ".1f", 1e-6),
        shown(row.cpu_per_rank, ".2f"),
        _ms(row.codec_s),
        shown(row.over_bound, ".3f"),
        shown(row.over_dear_bound, ".3f"),
        "VOID" * row.is_void,
    ]


def _ms(seconds: float | None) -> str:
    return shown(seconds, ".1f", 1e3)


def describe(point: Point) -> str:
    """Return in a few lines what was compared on what, and how short a step could be."""
    kind = "waiting instead of computing" if point.is_replay else "really computing"
    link = "link of unknown rate"
    if point.link_rate_mbit is not None:
        link = f"links of {point.link_rate_mbit:g} Mb/s ({point.rate_source})"
    if point.link_rate_mbit is not None and point.scale != 1:
        whole = shown(point.model_bytes, ".1f", 1e-6 * point.scale)
        link += (
            f"; scale {point.scale:g}: stands for {whole} MB on {point.stands_for_mbit:.0f} Mb/s"
        )
    shorter = "no bounds without a rate and the seconds of compute"
    ratio, bound_s, dear_bound_s = point.bounds
    if ratio is not None:
        shorter = (
            f"communication/compute {ratio:.2f}; bound {_ms(bound_s)} ms, DeAR's own"
            f" {_ms(dear_bound_s)} ms"
        )
    alone = f"forward {_ms(point.alone_forward_s)} ms, backward {_ms(point.alone_backward_s)} ms"
    lines = [
        f"{point.model}, {kind}, {point.world_size} ranks",
        f"{shown(point.model_bytes, '.1f', 1e-6)} MB of parameters, {link}",
        f"{alone} ({point.compute_source})",
        shorter,
    ]
    return "\n".join([*filter(None, (point.label, point.rig)), *lines])


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each point: which entry is the fastest, if one is clearly."""
    for point, group in groupby(rows, key=lambda row: row.point):
        judged = [row for row in group if row.ratio is not None and row.entry != COMPUTE_ALONE]
        if len(judged) < 2:
            continue
        best, first = min(judged, key=lambda row: row.ratio or 0.0), judged[0]
        label = f"{point.label}: " if point.label else ""
        void = " Not valid: the machine was busy." if best.is_void or first.is_void else ""
        if best.ratio_max is None or best.ratio_max >= 1:
            yield f"{label}No entry is clearly faster than {first.entry}.{void}"
        else:
            yield f"{label}{best.entry} is the fastest, {times_as_fast(best, first.entry)}.{void}"


def times_as_fast(row: Row, first: str) -> str:
    """How many times as fast as the entry `first` a row is, with the spread; empty if unknown."""
    if not (row.ratio and row.ratio_min and row.ratio_max):
        return ""
    spread = f"{1 / row.ratio_max:.2f} to {1 / row.ratio_min:.2f}"
    return f"{1 / row.ratio:.2f} times as fast as {first} ({spread})"


def said_of(block: Block, rows: Sequence[Row]) -> str:
    """Return a line on a block that has ended: its step, and the entry's ratio so far."""
    row = next(one for one in rows if one.entry == block.entry)
    is_compared = row.entry not in (rows[0].entry, COMPUTE_ALONE)
    times = times_as_fast(row, rows[0].entry) if is_compared else ""
    so_far = f", so far {times}" if times else ""
    return f"round {block.round + 1}: {block.entry} {block.step_s * 1e3:.0f} ms a step{so_far}"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a panel for each point: bars, split where the strategy says how, and the bounds."""
    points = [list(group) for _, group in groupby(rows, key=lambda row: row.point)]
    with picture(path, [len(group) for group in points]) as axes:
        for axis, group in zip(axes, points, strict=True):
            _draw_point(axis, group)


def _draw_point(axis: Any, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        parts = [(label, getattr(row, name), color) for label, name, color in _PARTS]
        if any(value is None for _, value, _ in parts):
            parts = [("not split", row.step_s, GREY)]
        left_ms = 0.0
        for label, value, color in parts:
            axis.barh(number, value * 1e3, left=left_ms, color=color, label=label)
            left_ms += value * 1e3
    bounds = rows[0].point.bounds
    for seconds, style, label in (
        (bounds.bound_s, "-", "max(forward + backward, bytes / rate)"),
        (bounds.dear_bound_s, "--", "DeAR's own bound"),
    ):
        if seconds is not None:
            axis.axvline(seconds * 1e3, color="black", linestyle=style, label=label)
    axis.set_yticks(range(len(rows)), [row.entry + " (void)" * row.is_void for row in rows])
    axis.set_xlabel("step time, ms")
    axis.set_title(describe(rows[0].point))
