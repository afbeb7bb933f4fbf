"""The rows as text, as summary.csv and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_dear.studies.convergence.records import Curve, Metric
from lightning_dear.studies.convergence.statistics import Difference
from lightning_dear.studies.convergence.summary import Row
from lightning_dear.studies.files import append_lines

_MISSING = "-"


def summary_line(row: Row) -> dict[str, Any]:
    """Return one row, flat."""
    first = row.trials[0]
    return {
        "entry": row.asked.entry,
        "buckets": row.buckets,
        "reference": row.asked.reference,
        "lr": first.lr,
        "lr_factor": first.lr_factor,
        "dense_share": first.dense_share,
        "num_seeds": len(row.trials),
        "num_broken_off": row.num_broken_off,
        "metric": row.metric.name,
        "unit": row.metric.unit,
        "mean": row.metric_mean,
        "sd": row.metric_sd,
        **_flat("worse", row.worse),
        "margin": row.metric.margin,
        "train_loss": row.loss_mean,
        **_flat("loss_worse", row.loss_worse),
        "loss_margin": row.metric.loss_margin,
        "verdict": row.verdict,
    }


def _flat(name: str, difference: Difference | None) -> dict[str, float | None]:
    ends = asdict(difference) if difference else dict.fromkeys(("mean", "lower", "upper"))
    return {f"{name}_{end}": value for end, value in ends.items()}


def write_summary(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows in place of what was there; nothing for no rows."""
    path.unlink(missing_ok=True)
    if rows:
        append_lines(path, [summary_line(row) for row in rows])


def write_curves(path: Path, rows: Sequence[Row], curves: Mapping[str, Curve]) -> None:
    """Write the losses of all rows' trainings over their steps, in place of what was there.

    Args:
        path: Where to.
        rows: Say which trainings, by entry, buckets and seed; the tuning's are left out.
        curves: A training's key -> its curve; nothing is written of those without.
    """
    path.unlink(missing_ok=True)
    lines = [
        {
            **{"entry": row.asked.entry, "buckets": row.buckets, "seed": trial.seed},
            **asdict(point),
            # More digits than two runs have in common.
            "train_loss": float(f"{point.train_loss:.6g}"),
        }
        for row in rows
        for trial in row.trials
        for point in curves.get(trial.key, ())
    ]
    if lines:
        append_lines(path, lines)


def format_rows(rows: Sequence[Row]) -> str:
    """Return all rows and what they mean; empty for no rows."""
    if not rows:
        return ""
    metric = rows[0].metric
    titles = [
        *("entry", "buckets", "lr", "x dense", "dense first", f"{metric.name}, {metric.unit} (sd)"),
        *("worse by [90 %]", "train loss", "higher by [90 %]", ""),
    ]
    lines = [titles, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    texts = [
        "  ".join(
            # Names and verdicts from the left, figures from the right.
            cell.ljust(width) if column in (0, 1, len(widths) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([rule, texts[0], rule, *texts[1:], rule, _legend(rows[0], metric)])


def _legend(row: Row, metric: Metric) -> str:
    seeds = ", ".join(str(trial.seed) for trial in row.trials)
    return (
        f"Seeds {seeds}; on each, all entries have the same initial weights and data order."
        " x dense: learning rate over the\nreference's (a reference's: over the config's); it and"
        " the steps that go dense first were chosen on other seeds.\n"
        "worse by: mean paired difference to the reference with its two-sided 90 % interval,"
        " mean +- t(0.95, n - 1) sd / sqrt(n).\n"
        f"non-inferior: the upper end is at most {metric.margin:g} {metric.unit}. What is broken on"
        " purpose fails: the upper end is above\nthat, or that of the training loss above"
        f" {metric.loss_margin:g}, and the lower end above 0."
    )


def _cells(row: Row) -> list[str]:
    first = row.trials[0]
    broken_off = f"{row.num_broken_off} of {len(row.trials)} broke off" * (row.num_broken_off > 0)
    return [
        row.asked.entry,
        row.buckets,
        f"{first.lr:.3g}",
        f"{first.lr_factor:.3g}",
        f"{first.dense_share:.0%}",
        f"{row.metric_mean:.3f} ({row.metric_sd:.3f})",
        _interval(row.worse),
        f"{row.loss_mean:.4f}",
        _interval(row.loss_worse),
        "; ".join(text for text in (row.verdict, broken_off) if text),
    ]


def _interval(one: Difference | None) -> str:
    if one is None:
        return _MISSING
    if not math.isfinite(one.mean):
        return "inf"
    return f"{one.mean:+.3f} [{one.lower:+.3f}, {one.upper:+.3f}]"


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw the paired differences with their intervals and the margin; nothing without pairs."""
    rows = [row for row in rows if row.worse is not None and row.asked.reference is not None]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.24 * len(rows)), layout="constrained")
    metric = rows[0].metric
    limit = 4 * metric.margin
    for number, row in enumerate(rows):
        _draw(axis, number, row, limit)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.axvline(metric.margin, color="#e45756", linestyle="--", label="margin")
    axis.set_xlim(-limit, limit)
    axis.set_yticks(range(len(rows)), [f"{row.asked.entry}, {row.buckets}" for row in rows])
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(f"{metric.name}: worse than dense by ({metric.unit}), 90 % interval")
    axis.legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axis: Any, number: int, row: Row, limit: float) -> None:
    assert row.worse is not None
    if row.worse.lower > limit:
        value = f"{row.worse.mean:.3g}" if math.isfinite(row.worse.mean) else "broke off"
        axis.text(limit, number, f"{value} >", ha="right", va="center", fontsize=7)
        return
    color = "#b8b8b8" if row.asked.is_control or row.asked.below is not None else "#4c78a8"
    axis.plot([row.worse.lower, row.worse.upper], [number, number], color=color)
    axis.plot([row.worse.mean], [number], marker="o", markersize=3, color=color)
