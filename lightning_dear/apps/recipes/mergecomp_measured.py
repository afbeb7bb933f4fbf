"""What `dear-bench` has measured of layer-wise and scheduled compression on emulated links."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_dear.apps.recipes.report import Table
from lightning_dear.apps.recipes.sibling import Row
from lightning_dear.benchmarking.claims import ALONE

LAYERWISE, HEURISTIC, EXACT = "layerwise", "heuristic", "exact"
"""Entries: a bucket a tensor; MergeComp's own search; ours."""


def study_rows(folder: Path) -> list[Row]:
    """Return the rows that a study has recorded; none if there is no such folder."""
    path = folder / "summary.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measured_gains(rows: Sequence[Row]) -> dict[str, float]:
    """Return compressor -> how many times as fast as a bucket a tensor ours is.

    Args:
        rows: Of a `summary.csv`, of which a point is a compressor; without one of the two entries
            it counts for nothing.
    """
    return {
        name: float(entries[LAYERWISE]["ratio"]) / float(entries[EXACT]["ratio"])
        for name, entries in _by_compressor(rows).items()
        if {LAYERWISE, EXACT} <= entries.keys()
    }


def measured_table(rows: Sequence[Row], name: str, compressors: Sequence[str], note: str) -> Table:
    """Return steps and scaling factors of those of `compressors` that were measured.

    Args:
        rows: Of a `summary.csv`; none: the table says so.
        name: Of what was measured.
        compressors: Whose rows are shown; none: all.
        note: Where it was measured.
    """
    gains = measured_gains(rows)
    shown = {
        compressor: entries
        for compressor, entries in _by_compressor(rows).items()
        if compressor in gains and (compressor in compressors or not compressors)
    }
    cells = [
        [
            compressor,
            *(_milliseconds(entries.get(entry)) for entry in (LAYERWISE, HEURISTIC, EXACT)),
            f"{gains[compressor]:.2f}x",
            _scaling(entries),
        ]
        for compressor, entries in shown.items()
    ]
    return Table(
        "measured",
        f"{name}, {_what(rows)}" if rows else f"{name}: NOT RUN, measure=true does it",
        [
            "compressor",
            "layer by layer, ms",
            "MergeComp's search, ms",
            "ours, ms",
            "ours over layer by layer",
            "scaling factor, %",
        ],
        cells,
        f"* void: the machine was too busy in at least one round. {note}" if rows else "",
    )


def said_of_measured(studies: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield what each of the studies has shown."""
    for name, rows in studies.items():
        if gains := measured_gains(rows):
            low, high = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
            yield (
                f"Measured on emulated links (`{name}`): ours scheduled is {gains[low]:.1f}"
                f" ({low}) to {gains[high]:.1f} times ({high}) as fast as layer by layer."
            )


def _by_compressor(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["point"].rpartition("=")[2], {})[row["entry"]] = row
    return found


def _what(rows: Sequence[Row]) -> str:
    one = rows[0]
    stands_for = float(one["stands_for_mbit"]) / 1e3
    return f"{one['model']}, {one['world_size']} ranks, stands for {stands_for:g} Gb/s"


def _milliseconds(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{1e3 * float(row['step_s']):.0f}" + "*" * (row["is_void"] == "True")


def _scaling(entries: Mapping[str, Row]) -> str:
    """Ratios are of the same rounds, steps are not."""
    if ALONE not in entries:
        return "-"
    alone = float(entries[ALONE]["ratio"])
    before, after = (100 * alone / float(entries[one]["ratio"]) for one in (LAYERWISE, EXACT))
    return f"{before:.0f} -> {after:.0f}"
