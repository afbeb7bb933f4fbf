"""raw.csv and curves.csv: every training, written when it ends, read when a run goes on."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from lightning_dear.benchmarking.convergence.records import Curve, Trial
from lightning_dear.benchmarking.files import append_lines

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
            ValueError: If raw.csv has other columns than these trainings.
        """
        if not self._raw.exists():
            return {}
        with self._raw.open(newline="") as file:
            trials = [_trial(line, self._raw) for line in csv.DictReader(file)]
        return {trial.key: trial for trial in trials}

    def add(self, trial: Trial, curve: Curve) -> None:
        """Append one training."""
        # The curve first: what stands in raw.csv is not trained again.
        points = [{"key": trial.key, "step": step, "train_loss": loss} for step, loss in curve]
        if points:
            append_lines(self._curves, points)
        append_lines(self._raw, [asdict(trial)])


def _trial(line: Mapping[str, str], path: Path) -> Trial:
    names = [field.name for field in fields(Trial)]
    if list(line) != names or None in line.values():
        raise ValueError(
            f"{path} is no file of dear-converge, or of another version: its columns are"
            f" {', '.join(map(str, line))}. Choose another folder (hydra.run.dir=...)."
        )
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(Trial)}
    return Trial(**{name: kinds[name](line[name]) for name in names})
