"""Bars of the step times, split where the strategy says how, with the bounds as lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_dear.studies.records import Row
from lightning_dear.studies.table import describe

_PARTS = (
    ("compute and the rest", "compute_s", "#4c78a8"),
    ("waits for gradients", "exposed_reduce_scatter_s", "#f58518"),
    ("waits for parameters", "exposed_all_gather_s", "#e45756"),
)
_WHOLE = "#b8b8b8"


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw a panel for each point into a PNG file; nothing for no rows."""
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [list(group) for _, group in groupby(rows, key=lambda row: row.point)]
    height = 1.2 + 0.32 * max(len(group) for group in points)
    figure, axes = pyplot.subplots(
        len(points), 1, figsize=(9, height * len(points)), squeeze=False, layout="constrained"
    )
    for axis, group in zip(axes[:, 0], points, strict=True):
        _draw_point(axis, group)
    axes[0, 0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_point(axis: Any, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        parts = [(label, getattr(row, name), color) for label, name, color in _PARTS]
        if any(value is None for _, value, _ in parts):
            parts = [("not split", row.step_s, _WHOLE)]
        left_ms = 0.0
        for label, value, color in parts:
            axis.barh(number, value * 1e3, left=left_ms, color=color, label=label)
            left_ms += value * 1e3
    bounds = rows[0].point.bounds
    for seconds, style, label in (
        (bounds.step_s, "-", "max(forward + backward, bytes / rate)"),
        (bounds.dear_s, "--", "DeAR's own bound"),
    ):
        if seconds is not None:
            axis.axvline(seconds * 1e3, color="black", linestyle=style, label=label)
    axis.set_yticks(range(len(rows)), [row.entry + " (void)" * row.is_void for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("step time, ms")
    axis.set_title(describe(rows[0].point), fontsize=7, loc="left")
    _name_each_once(axis)


def _name_each_once(axis: Any) -> None:
    """A bar and a line of each kind in the legend, not one for each entry."""
    seen: set[str] = set()
    for artist in [*axis.containers, *axis.lines]:
        label = artist.get_label()
        if label in seen:
            artist.set_label(f"_{label}")
        seen.add(label)
