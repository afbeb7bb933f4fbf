"""Steps that `dear-bench` has measured, as a recipe's table."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dear.apps.recipe.report import Table
from lightning_dear.apps.recipe.sibling import Row
from lightning_dear.studies.files import rigs_of
from lightning_dear.studies.table import MISSING

VOID = "*"
_VOID_NOTE = f"{VOID}: void, as more than 60 % of the machine was busy."


def measured_steps(rows: Sequence[Row], baseline: str, note: str) -> Table:
    """Return each point's steps, and how many times as fast as the baseline's they are.

    Args:
        rows: Of a `summary.csv`; none: the table says so.
        baseline: An entry's name, or how it begins if none has just this name.
        note: The command and the machine.
    """
    cells = []
    for row in rows:
        base = _base([other for other in rows if other["point"] == row["point"]], baseline) or row
        step_s = float(row["step_s"])
        cells.append(
            [
                f"{row['model']}, {row['world_size']} ranks",
                f"{float(row['stands_for_mbit']) / 1e3:g} Gb/s",
                row["entry"],
                f"{1e3 * step_s:.0f}{VOID * (row['is_void'] == 'True')}",
                f"{float(base['step_s']) / step_s:.2f}",
                _spread(row),
            ]
        )
    return Table(
        "measured",
        "replayed models on emulated links" + ("" if rows else ": NOT RUN, measure=true does it"),
        ["model", "stands for", "entry", "step ms", f"x {baseline}", "spread of step/first"],
        cells,
        " ".join(filter(None, (note, rigs_of(rows), _VOID_NOTE))) if rows else "",
    )


def _spread(row: Row) -> str:
    if not row["ratio_min"]:
        return MISSING
    return f"{float(row['ratio_min']):.3f}-{float(row['ratio_max']):.3f}"


def _base(rows: Sequence[Row], baseline: str) -> Row | None:
    exact = [row for row in rows if row["entry"] == baseline]
    return next(iter(exact or [row for row in rows if row["entry"].startswith(baseline)]), None)
