"""Ok-Topk's recipe: what was measured for other pages and belongs on this one."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_dear.apps.recipe.oktopk_cases import DENSE, OURS
from lightning_dear.apps.recipe.oktopk_volumes import FORMULAS
from lightning_dear.apps.recipe.report import Table
from lightning_dear.apps.recipe.sibling import Row, rows_of
from lightning_dear.apps.recipe.steps import measured_steps


def from_elsewhere(compression: Path) -> tuple[list[str], list[Table]]:
    """Return what of `recipes/compression` belongs here: steps of 8 ranks, volumes, convergence.

    Args:
        compression: That folder; what is not there is left out.

    Returns:
        Sentences and tables.
    """
    steps = rows_of(compression / "oktopk_speed" / "p8_r10")
    ends = {
        name: rows_of(compression / name) for name in ("converge_oktopk", "converge_gpt_oktopk")
    }
    files = [compression / "volumes" / name for name in ("all.csv", "all8.csv")]
    sent = [row for path in files for row in _volume_rows(path)]
    note = "Recorded; recipes/compression/README.md has the command and the machine."
    tables = [
        *([measured_steps(steps, "ddp", note)] if steps else []),
        *([_most_sent(sent, note)] if sent else []),
        *([_convergence(ends, note)] if any(ends.values()) else []),
    ]
    return list(said(steps)), tables


def said(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how Ok-Topk's steps compare with others, and which of these steps are void.

    Args:
        rows: Of a `summary.csv` with one point; nothing is said without Ok-Topk, `ddp` or others.
    """
    of = {row["entry"]: row for row in rows}
    others = [name for name in FORMULAS if name in of and name not in (DENSE, OURS)]
    if not others or not {OURS, "ddp"} <= of.keys():
        return
    own_s = float(of[OURS]["step_s"])
    over = {name: float(row["step_s"]) / own_s for name, row in of.items()}
    gains = [over[name] for name in others]
    yield (
        f"Measured at {rows[0]['world_size']} ranks on links that stand for"
        f" {float(rows[0]['stands_for_mbit']):g} Mb/s: `dear` with Ok-Topk is {over['ddp']:.2f}"
        f" times as fast as `ddp` and {min(gains):.2f} to {max(gains):.2f} times as `dear` with"
        f" the other sparse schemes{_void_among([of[name] for name in (OURS, 'ddp', *others)])}."
    )


def _void_among(rows: Sequence[Row]) -> str:
    void = [f"`{row['entry']}`" for row in rows if row["is_void"] == "True"]
    return f"; void, as the machine was busy: {', '.join(void)}" if void else ""


def _volume_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _most_sent(rows: Sequence[Row], note: str) -> Table:
    most: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        of = most.setdefault((row["gradients"], row["compressor"]), {})
        nbytes, ranks = max(float(row["sent"]), float(row["received"])), int(row["num_ranks"])
        of[ranks] = max(of.get(ranks, 0.0), nbytes)
    sizes = sorted({number for of in most.values() for number in of})
    cells = [
        [*key, *(f"{of[number] / 1e3:.1f}" if number in of else "-" for number in sizes)]
        for key, of in most.items()
    ]
    return Table(
        "measured",
        "most kB that a rank sent or received in a step of training, 1 %",
        ["gradients", "scheme", *(f"{number} ranks" for number in sizes)],
        cells,
        note,
    )


def _convergence(ends: Mapping[str, Sequence[Row]], note: str) -> Table:
    cells = []
    for name, rows in ends.items():
        for row in rows:
            end, margin = f"{float(row['mean']):.3f}", f"{float(row['margin']):g} {row['unit']}"
            own = [row["entry"], row["buckets"], end, _worse(row), margin, row["verdict"]]
            cells.append([name, *own])
    return Table(
        "measured",
        "how training of 2 ranks ends",
        ["study", "entry", "buckets", "mean", "worse by [90 %]", "margin", "verdict"],
        cells,
        note,
    )


def _worse(row: Row) -> str:
    if not row["worse_mean"]:
        return "-"
    mean, *bounds = (float(row[f"worse_{of}"]) for of in ("mean", "lower", "upper"))
    return f"{mean:+.3f} [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"
