"""Loss against time on a slow network: when each entry has the loss that DDP ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from omegaconf import DictConfig

from lightning_dear.apps.recipe.loss_curves import FILE, Curves, Run, read_runs
from lightning_dear.apps.recipe.report import Report, Table
from lightning_dear.apps.recipe.sibling import FOLDER, command_of, measured, measured_on

Figures = Mapping[str, Any]
"""Of an entry, as `Curves.as_row` returns them."""


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Measure the siblings if asked to, and compare when they reach the reference's loss.

    Raises:
        ValueError: If a sibling lacks the reference, or has trained it too shortly.
    """
    curves = _curves(cfg, recorded, folder)
    rows = {name: [one.as_row(entry) for entry in one.runs] for name, one in curves.items()}
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    tables = [
        _table(one, rows[name], f"`{command_of(cfg.siblings[name])}` on {where}.")
        for name, one in curves.items()
    ]
    said = [_said(one, rows[name]) for name, one in curves.items()]
    missing = [
        f"`{name}`: NOT RUN, nothing is recorded here; measure=true does it."
        for name in cfg.siblings
        if name not in curves
    ]
    figure = _picture(list(curves.values())) if curves else None
    data = {"time_to_target": [row for own in rows.values() for row in own]}
    return Report([*said, *missing], tables, figure, data)


def _curves(cfg: DictConfig, recorded: Path, folder: Path) -> dict[str, Curves]:
    source = folder if cfg.measure else recorded
    found = {}
    for name, summary in measured(cfg, recorded, folder).items():
        runs = read_runs(source / FOLDER / name / FILE, int(cfg.window_steps))
        if summary and runs:
            margin = float(summary[0]["loss_margin"])
            found[name] = Curves(name, runs, str(cfg.reference), margin)
            _check(found[name], int(cfg.window_steps))
    return found


def _check(curves: Curves, window_steps: int) -> None:
    """Raise ValueError if there is no target."""
    name, entries = curves.model, ", ".join(curves.runs)
    if curves.reference not in curves.runs:
        raise ValueError(
            f"{name} has no entry {curves.reference!r}; valid values of reference: {entries}."
        )
    if not isfinite(curves.target):
        raise ValueError(
            f"{curves.reference} has made fewer than window_steps={window_steps} steps on {name}:"
            " there is no target."
        )


# --- words --------------------------------------------------------------------------------------


def _said(curves: Curves, rows: Sequence[Figures]) -> str:
    base = next(row for row in rows if row["entry"] == curves.reference)
    others = [row for row in rows if row is not base]
    faster = [f"`{row['entry']}` {row['speedup']:.2f}" for row in others if row["speedup"]]
    parts = [
        f"`{base['entry']}` has a training loss of {curves.target:.4f}, {curves.margin:g} above its"
        f" last one, after {base['target_s']:.1f} s",
        f"so many times as fast: {', '.join(faster) or 'none'}",
        *(_not_reached(row, curves.reference) for row in others if row["speedup"] is None),
    ]
    return f"`{curves.model}`: {'; '.join(parts)}."


def _not_reached(row: Figures, reference: str) -> str:
    num_seeds = int(row["num_seeds"])
    return (
        f"`{row['entry']}` does not reach it on {num_seeds - row['num_arrived']} of {num_seeds}"
        f" seeds, and ends {_figure(row['over_reference'], '+.3f')} from `{reference}`"
    )


def _table(curves: Curves, rows: Sequence[Figures], note: str) -> Table:
    reference = curves.reference
    titles = [
        *("entry", "seconds to it", f"x {reference}", "spread", "steps to it", "step ms"),
        *("MB/step", "last loss", f"over {reference}'s"),
    ]
    title = f"time to a training loss of {curves.target:.4f} on {curves.model}"
    return Table("measured", title, titles, [_cells(row) for row in rows], note)


def _cells(row: Figures) -> list[str]:
    speedup = row["speedup"]
    reached = f" ({row['num_arrived']} of {row['num_seeds']} seeds)" if speedup is None else ""
    return [
        row["entry"],
        _figure(row["target_s"], ".1f") + reached,
        _figure(speedup, ".2f"),
        f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}" if speedup else "-",
        _figure(row["target_steps"], ".0f"),
        _figure(1e3 * row["step_s"], ".1f"),
        _figure(row["sent_mb_per_step"], ".2f"),
        _figure(row["last_loss"], ".4f"),
        _figure(row["over_reference"], "+.4f"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None or not isfinite(value) else format(value, form)


# --- picture ------------------------------------------------------------------------------------


def _picture(models: Sequence[Curves]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 3.4 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(models), squeeze=False)[:, 0]
    for axes, curves in zip(all_axes, models, strict=True):
        _draw(axes, curves)
    figure.suptitle("Training loss over time: running means, mean over the seeds", fontsize=11)
    return figure


def _line(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Return seconds and losses, means over the seeds, as far as all of them go."""
    places = range(min(len(run.steps) for run in runs))
    times_s = [mean(run.times_s[at] for run in runs) for at in places]
    return times_s, [mean(run.losses[at] for run in runs) for at in places]


def _draw(axes: Any, curves: Curves) -> None:
    lines = {entry: _line(list(runs.values())) for entry, runs in curves.runs.items()}
    for entry, (times_s, losses) in lines.items():
        axes.plot(times_s, losses, label=entry, linewidth=1.2)
    # Early losses would flatten all that happens near the target.
    base = lines[curves.reference][1]
    shown = [base[len(base) // 5], *(losses[-1] for _, losses in lines.values()), curves.target]
    bottom, top = min(filter(isfinite, shown)), max(filter(isfinite, shown))
    axes.set_ylim(bottom - 0.1 * (top - bottom), top + 0.1 * (top - bottom))
    axes.set_xlim(left=0)
    axes.axhline(curves.target, color="black", linewidth=0.8, linestyle="--", label="target")
    axes.set_title(curves.model, fontsize=10)
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("training loss", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="upper right")
