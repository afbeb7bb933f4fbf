"""A comparison for people: a table for each point as text, and a panel for each in a picture."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning_dear.studies import plot, report, summary, table
from lightning_dear.studies.files import Line, read_lines, write_lines

_FIGURES = {
    "compute ms": ("compute_s", ".1f", 1e3),
    "RS wait ms": ("exposed_reduce_scatter_s", ".1f", 1e3),
    "AG wait ms": ("exposed_all_gather_s", ".1f", 1e3),
    "MB/step leaves a host": ("host_bytes", ".1f", 1e-6),
    "peak MB": ("peak_memory_bytes", ".1f", 1e-6),
    "CPU/rank": ("cpu_per_rank", ".2f", 1.0),
    "codec ms": ("codec_s", ".1f", 1e3),
    "/bound": ("over_bound", ".3f", 1.0),
    "/DeAR": ("over_dear_bound", ".3f", 1.0),
}
"""Title -> column of summary.csv, its format and its factor."""

LEGEND = (
    "step: median of the rounds, each the median of its steps, or with local steps their mean.\n"
    "ratio: step over the first entry's, median and spread of the rounds.\n"
    "RS/AG wait: step time that stood still for reduce-scatters and all-gathers.\n"
    "codec: CPU time of encoding and decoding, a rank's in a step.\n"
    "MB/step leaves a host: 10^6 bytes by its interface's counter, headers included.\n"
    "/bound: step over max(forward + backward, bytes / rate). /DeAR: over max(forward, all-gather)"
    " +\nmax(backward, reduce-scatter). Bytes in both bounds: 2(P-1)/P of the uncompressed model.\n"
    "-: not measured; what no entry has is left out."
)

_PARTS = (
    ("compute and the rest", "compute_s", plot.BLUE),
    ("waits for gradients", "exposed_reduce_scatter_s", plot.ORANGE),
    ("waits for parameters", "exposed_all_gather_s", plot.RED),
)


def join_parts(folder: Path) -> None:
    """Concatenate the CSV files of a job's parts into the job's folder.

    A part is a numbered subfolder with the points that need the same ranks and links. A job without
    parts stays as it is.
    """
    parts = sorted(folder.glob("[0-9]*/summary.csv"), key=lambda path: int(path.parent.name))
    for name in ("raw.csv", "blocks.csv", "summary.csv") if parts else ():
        lines = [line for part in parts for line in read_lines(part.with_name(name), summary.WORDS)]
        write_lines(folder / name, lines)


def _by_point(rows: Sequence[Line]) -> list[list[Line]]:
    return [list(group) for _, group in groupby(rows, key=itemgetter("point"))]


def text_of(rows: Sequence[Line]) -> str:
    """Return a table for each point under a description of it, and a verdict for each point."""
    parts = []
    for group in _by_point(rows):
        notes = [f"{row['entry']}: {row['note']}" for row in group if row["note"]]
        parts.append("\n".join([describe(group[0]), _table(group), *notes]))
    return "\n\n".join([*parts, "\n".join([LEGEND, *verdicts(rows)])])


def _table(rows: Sequence[Line]) -> str:
    # Only columns in which an entry has a figure. Files of earlier versions lack some columns.
    kept = {title: of for title, of in _FIGURES.items() if any(row.get(of[0]) for row in rows)}

    def cells_of(row: Line) -> list[str]:
        figures = (table.shown(row.get(name), form, factor) for name, form, factor in kept.values())
        return [row["entry"], _ms(row["step_s"]), _ratio(row), *figures, "VOID" * row["is_void"]]

    titles = ["entry", "step ms", "ratio [spread]", *kept, ""]
    return table.format_table(titles, [*map(cells_of, rows)], table.WIDTH)


def _ratio(row: Line) -> str:
    if row["ratio"] is None:
        return table.MISSING
    return f"{row['ratio']:.3f} [{row['ratio_min']:.3f}-{row['ratio_max']:.3f}]"


def _ms(seconds: float | None) -> str:
    return table.shown(seconds, ".1f", 1e3)


def describe(row: Line) -> str:
    """Return a few lines on the model, the ranks and the links of a point, and bounds on a step."""
    kind = "waiting instead of computing" if row["is_replay"] else "really computing"
    link = "link of unknown rate"
    if row["link_rate_mbit"] is not None:
        link = f"links of {row['link_rate_mbit']:g} Mb/s ({row['rate_source']})"
        if row["scale"] != 1:
            whole = table.shown(row["model_bytes"], ".1f", 1e-6 * row["scale"])
            rate = f"{row['stands_for_mbit']:.0f} Mb/s"
            link += f"; scale {row['scale']:g}: stands for {whole} MB on {rate}"
    shorter = "no bounds without a rate and the seconds of compute"
    if row["communication_ratio"] is not None:
        bounds = f"bound {_ms(row['bound_s'])} ms, DeAR's own {_ms(row['dear_bound_s'])} ms"
        shorter = f"communication/compute {row['communication_ratio']:.2f}; {bounds}"
    alone = f"forward {_ms(row['forward_s'])} ms, backward {_ms(row['backward_s'])} ms"
    model = f"{row['model']}, {kind}, {row['world_size']} ranks"
    size = f"{table.shown(row['model_bytes'], '.1f', 1e-6)} MB of parameters, {link}"
    lines = row["point"], row.get("rig"), model, size, f"{alone} ({row['compute_source']})", shorter
    return "\n".join(filter(None, lines))


def verdicts(rows: Sequence[Line]) -> Iterator[str]:
    """Yield a sentence for each point: the entry that is clearly the fastest, or that none is."""
    for group in _by_point(rows):
        judged = [row for row in group if row["ratio"] and row["entry"] != summary.COMPUTE_ALONE]
        if len(judged) < 2:
            continue
        best, first = min(judged, key=itemgetter("ratio")), judged[0]
        label = f"{first['point']}: " if first["point"] else ""
        but = " Not valid: the machine was busy." if best["is_void"] or first["is_void"] else ""
        if best["ratio_max"] >= 1:
            yield f"{label}No entry is clearly faster than {first['entry']}.{but}"
        else:
            times = times_as_fast(best, first["entry"])
            yield f"{label}{best['entry']} is the fastest, {times}.{but}"


def times_as_fast(row: Line, first: str) -> str:
    """Return, as text, how many times as fast as the entry `first` a row is, with the spread."""
    spread = f"{1 / row['ratio_max']:.2f} to {1 / row['ratio_min']:.2f}"
    return f"{1 / row['ratio']:.2f} times as fast as {first} ({spread})"


def said_of(block: Line, rows: Sequence[Line]) -> str:
    """Return a line on a block that has ended: its step time, and the entry's speed-up so far."""
    row, first = next(one for one in rows if one["entry"] == block["entry"]), rows[0]["entry"]
    is_compared = row["entry"] not in (first, summary.COMPUTE_ALONE) and row["ratio"]
    so_far = f", so far {times_as_fast(row, first)}" if is_compared else ""
    step_ms = block["step_s"] * 1e3
    return f"round {block['round'] + 1}: {row['entry']} {step_ms:.0f} ms a step{so_far}"


def draw(path: Path, rows: Sequence[Line]) -> None:
    """Draw a panel for each point: a bar for each entry, and the bounds.

    Bars are split into compute and waits if the strategy measures its waits.
    """
    points = _by_point(rows)
    with plot.picture(path, [len(group) for group in points]) as axes:
        for axis, group in zip(axes, points, strict=True):
            _draw_point(axis, group)


def show_again(folder: Path) -> None:
    """Print the table of a folder, and write it and the picture again; see `report.show`."""
    join_parts(folder)
    report.show(folder, summary.WORDS, text_of, draw)


def _draw_point(axis: Any, rows: Sequence[Line]) -> None:
    for number, row in enumerate(rows):
        parts = [(label, row[name], color) for label, name, color in _PARTS]
        if any(value is None for _, value, _ in parts):
            parts = [("not split", row["step_s"], plot.GREY)]
        left_ms = 0.0
        for label, value, color in parts:
            axis.barh(number, value * 1e3, left=left_ms, color=color, label=label)
            left_ms += value * 1e3
    for name, style, label in (
        ("bound_s", "-", "max(forward + backward, bytes / rate)"),
        ("dear_bound_s", "--", "DeAR's own bound"),
    ):
        if rows[0][name] is not None:
            axis.axvline(rows[0][name] * 1e3, color="black", linestyle=style, label=label)
    axis.set_yticks(range(len(rows)), [row["entry"] + " (void)" * row["is_void"] for row in rows])
    axis.set(xlabel="step time, ms", title=describe(rows[0]))
