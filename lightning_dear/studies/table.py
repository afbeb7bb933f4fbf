"""The comparison as text: one block of rows for each point, with what it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lightning_dear.studies.records import COMPUTE_ALONE, Point, Row

MISSING = "-"
"""What stands for a figure that was not measured."""

_TITLES = (
    "entry",
    "step ms",
    "ratio [spread]",
    "compute ms",
    "RS wait ms",
    "AG wait ms",
    "MB/step leaves a host",
    "peak MB",
    "CPU/rank",
    "codec ms",
    "/bound",
    "/DeAR",
    "",
)

LEGEND = (
    "step: median of the steps, each the mean over its ranks. ratio: step over the first entry's,"
    " median and spread of the rounds.\n"
    "RS/AG wait: step time that stood still for reduce-scatters and all-gathers; -: not measured.\n"
    "codec: CPU time of encoding and decoding, a rank's in a step.\n"
    "MB/step leaves a host: 10^6 bytes by its interface's counter, headers included; -: one host,"
    " or no such counter.\n"
    "/bound: step over max(forward + backward, bytes / rate). /DeAR: over max(forward, all-gather)"
    " + max(backward, reduce-scatter).\n"
    "Bytes in both bounds: 2(P-1)/P of the uncompressed model."
)


def format_rows(rows: Sequence[Row]) -> str:
    """Return all rows, those of one point under a line that describes it; empty for no rows."""
    parts = []
    for point, group in groupby(rows, key=lambda row: row.point):
        parts.append(f"{describe(point)}\n{format_table(_TITLES, [_cells(row) for row in group])}")
    return "\n\n".join([*parts, LEGEND]) if parts else ""


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


def describe(point: Point) -> str:
    """Return in a few lines what was compared on what, and how short a step could be."""
    bounds = point.bounds
    kind = "waiting instead of computing" if point.is_replay else "really computing"
    lines = [
        f"{point.model}, {kind}, {bounds.world_size} ranks",
        f"{_mega(bounds.model_bytes)} MB of parameters, {_link(point)}",
        f"forward {_ms(bounds.forward_s)} ms, backward {_ms(bounds.backward_s)} ms"
        f" ({point.compute_source}); {_shortest(point)}",
    ]
    return "\n".join([*filter(None, (point.label, point.rig)), *lines])


def _link(point: Point) -> str:
    if point.link_rate_mbit is None:
        return "link of unknown rate"
    link = f"links of {point.link_rate_mbit:g} Mb/s ({point.rate_source})"
    if point.scale == 1:
        return link
    whole = f"{_mega(point.bounds.model_bytes * point.scale)} MB"
    rate = f"{point.link_rate_mbit * point.scale:.0f} Mb/s"
    return f"{link}; scale {point.scale:g}: stands for {whole} on {rate}"


def _shortest(point: Point) -> str:
    bounds = point.bounds
    ratio = bounds.communication_ratio
    if ratio is None:
        return "no bounds without a rate and the seconds of compute"
    return (
        f"communication/compute {ratio:.2f}; bound {_ms(bounds.step_s)} ms, DeAR's own"
        f" {_ms(bounds.dear_s)} ms"
    )


def _cells(row: Row) -> list[str]:
    void = "VOID: the machine was busy" if row.is_void else ""
    return [
        row.entry,
        _ms(row.step_s),
        _spread(row),
        _ms(row.compute_s),
        _ms(row.exposed_reduce_scatter_s),
        _ms(row.exposed_all_gather_s),
        _mega(row.host_bytes),
        _mega(row.peak_memory_bytes),
        f"{row.cpu_per_rank:.2f}",
        _ms(row.codec_s),
        _ratio(row.over_bound),
        _ratio(row.over_dear_bound),
        "; ".join(text for text in (row.note, void) if text),
    ]


def _spread(row: Row) -> str:
    if row.ratio is None:
        return MISSING
    return f"{row.ratio:.3f} [{row.ratio_min:.3f}-{row.ratio_max:.3f}]"


def format_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return rows under their titles: the first and the last column are words, figures between."""
    lines = [titles, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    texts = [
        "  ".join(
            # Names and remarks from the left, figures from the right.
            cell.ljust(width) if column in (0, len(widths) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([rule, texts[0], rule, *texts[1:], rule])


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds * 1e3:.1f}"


def _mega(count: float | None) -> str:
    return MISSING if count is None else f"{count / 1e6:.1f}"


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"
