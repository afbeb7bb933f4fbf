"""What folders of dear-bench say of replayed steps, cell by cell: simulations are judged by it."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Cell:
    """What was run: one strategy, model, number of ranks and rate."""

    model: str
    world_size: int
    rate_mbit: float
    scale: float
    entry: str


@dataclass
class Cells:
    """All cells of some folders.

    Attributes:
        rounds_s: Round -> median over its steps of the mean over ranks.
        buckets: Of entries that found a plan before they were timed: numbers of their tensors.
        caps_mb: Of `ddp_tuned`: the cap that was best.
        codec_s: CPU seconds of a rank in a step, for selecting, gathering and decoding.
        numel: Parameters of the scaled model.
        void: What the bench itself calls void: the machine's cores were busy, not the link.
    """

    rounds_s: dict[Cell, dict[str, float]] = field(default_factory=dict)
    buckets: dict[Cell, list[list[int]]] = field(default_factory=dict)
    caps_mb: dict[Cell, float] = field(default_factory=dict)
    codec_s: dict[Cell, float] = field(default_factory=dict)
    numel: dict[Cell, int] = field(default_factory=dict)
    void: set[Cell] = field(default_factory=set)

    def step_s(self, cell: Cell) -> float:
        """Median over rounds."""
        return median(self.rounds_s[cell].values())

    def noise(self, cell: Cell) -> float | None:
        """By how much the longest round exceeds the shortest; None for a single one."""
        rounds = self.rounds_s[cell].values()
        return max(rounds) / min(rounds) - 1 if len(rounds) > 1 else None


def read_cells(folders: Iterable[Path]) -> Cells:
    """Read each folder's steps, summary.csv and plans.

    A cell that stands in several folders has the rounds of all of them.
    """
    cells = Cells()
    for folder in folders:
        points = _read_steps(cells, folder)
        _read_summary(cells, folder)
        for path in sorted(folder.rglob("plans/*.json")):
            content = json.loads(path.read_text())
            for cell in points.get((content["point"], content["entry"]), ()):
                cells.buckets[cell] = content["buckets"]
    return cells


def _read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _cell(row: dict[str, str]) -> Cell:
    numbers = float(row["link_rate_mbit"]), float(row["scale"])
    return Cell(row["model"], int(row["world_size"]), *numbers, row["entry"])


def _read_steps(cells: Cells, folder: Path) -> dict[tuple[str, str], set[Cell]]:
    """The cells of each point and entry."""
    points: dict[tuple[str, str], set[Cell]] = defaultdict(set)
    for block in _read(folder / "blocks.csv"):
        if int(block["round"]) >= 0 and block["link_rate_mbit"]:
            rounds_s = cells.rounds_s.setdefault(_cell(block), {})
            rounds_s[f"{folder} {block['round']}"] = float(block["step_s"])
            points[block["point"], block["entry"]].add(_cell(block))
    return points


def _read_summary(cells: Cells, folder: Path) -> None:
    for row in _read(folder / "summary.csv"):
        cell = _cell(row)
        cells.numel[cell] = int(float(row["model_bytes"])) // 4
        if row["is_void"] == "True":
            cells.void.add(cell)
        if row["codec_s"]:
            cells.codec_s[cell] = float(row["codec_s"])
        if "bucket_cap_mb=" in row["note"]:
            cells.caps_mb[cell] = float(row["note"].rpartition("=")[2])
