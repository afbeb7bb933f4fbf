"""raw.csv and curves.csv: every training, written when it ends, read when a run goes on."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lightning_dear.studies.convergence.records import Curve, CurvePoint, Trial
from lightning_dear.studies.files import append_lines

_KINDS = {"str": str, "int": int, "float": float}


class Store:
    """The trainings in a folder.

    Args:
        folder: Holds raw.csv, a line for each training, and curves.csv, its loss over its steps;
            both are made with the first training.
    """

    def __init__(self, folder: Path) -> None:
        self._raw = folder / "raw.csv"
        self._curves = folder / "curves.csv"

    def read(self) -> dict[str, Trial]:
        """Return key -> the training of that key, of all that the folder holds.

        Raises:
            ValueError: If raw.csv or curves.csv has other columns than these trainings.
        """
        # What is trained next is written to both.
        self.curves()
        trials = [Trial(**_typed(Trial, line)) for line in _lines(self._raw, _names(Trial))]
        return {trial.key: trial for trial in trials}

    def curves(self) -> dict[str, Curve]:
        """Return key -> the curve of that key, of all that the folder holds.

        Raises:
            ValueError: If curves.csv has other columns.
        """
        found: dict[str, list[CurvePoint]] = {}
        for line in _lines(self._curves, ["key", *_names(CurvePoint)]):
            point = CurvePoint(**_typed(CurvePoint, line))
            found.setdefault(line["key"], []).append(point)
        return dict(found)

    def add(self, trial: Trial, curve: Curve) -> None:
        """Append one training."""
        # The curve first: what stands in raw.csv is not trained again.
        if curve:
            append_lines(self._curves, [{"key": trial.key, **asdict(point)} for point in curve])
        append_lines(self._raw, [asdict(trial)])


def _lines(path: Path, names: list[str]) -> Sequence[Mapping[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        if list(line) != names or None in line.values():
            raise ValueError(
                f"{path} is no file of dear-converge, or of another version: its columns are"
                f" {', '.join(map(str, line))}. Choose another folder (hydra.run.dir=...)."
            )
    return lines


def _names(kind: type[Trial | CurvePoint]) -> list[str]:
    return [field.name for field in fields(kind)]


def _typed(kind: type[Trial | CurvePoint], line: Mapping[str, str]) -> dict[str, Any]:
    return {field.name: _KINDS[str(field.type)](line[field.name]) for field in fields(kind)}
