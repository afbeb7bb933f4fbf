"""How far the simulator is from real steps: rows of dear-bench beside what it predicts for them.

    python -m tests.benchmarks.simulator_accuracy outputs/p2/raw.csv outputs/p4/raw.csv \\
        --clusters 100=outputs/c2/cluster/measured.yaml 100=outputs/c4/cluster/measured.yaml

Rows must be replays whose entries are called as strategies are; a cluster's file is what `dear-plan
calibrate` measured at the rate that is said before it. Where no file has as many ranks as a row,
that with the most below counts. Beside ours stand two predictors that know no schedule: the longer
of compute and bytes / rate ("bound"), and a line fitted to the rows that are not held out ("line":
least squares, over compute and bytes / rate).

Prints a row for each cell, means and largest errors, and how many pairs of strategies are ordered
as measured. Nothing here is measured anew.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import numpy as np
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.plan_config import measured_network
from lightning_dear.simulator import Link, Network, Workload, simulate
from lightning_dear.simulator.strategies import STRATEGIES
from lightning_dear.workloads.replay import load_profile
from lightning_dear.workloads.replay.planned import planned

ALONE = "compute alone"
CLEARLY = 0.05
"""Share by which two measured steps must differ for their order to count."""


@dataclass(frozen=True)
class Cell:
    """What was run: one strategy, model, number of ranks and rate."""

    model: str
    world_size: int
    rate_mbit: float
    scale: float
    entry: str


@dataclass(frozen=True)
class Judged:
    """A cell with its measured step and what each predictor says of it."""

    cell: Cell
    measured_s: float
    predicted_s: dict[str, float]
    is_held_out: bool

    def error(self, predictor: str) -> float:
        """Of the measured step; positive: predicted too long."""
        return self.predicted_s[predictor] / self.measured_s - 1


def measured_steps(paths: Iterable[Path]) -> dict[Cell, float]:
    """Median over steps of the mean over ranks, of the rounds that count."""
    ranks: dict[tuple[Cell, str, str], list[float]] = defaultdict(list)
    for path in paths:
        for row in csv.DictReader(path.open()):
            if int(row["round"]) < 0:
                continue
            cell = Cell(
                row["model"],
                int(row["world_size"]),
                float(row["link_rate_mbit"]),
                float(row["scale"]),
                row["entry"],
            )
            ranks[cell, row["round"], row["step"]].append(float(row["step_s"]))
    steps: dict[Cell, list[float]] = defaultdict(list)
    for (cell, _, _), of_ranks in ranks.items():
        steps[cell].append(mean(of_ranks))
    return {cell: median(seconds) for cell, seconds in steps.items()}


def network_of(file: DictConfig, cell: Cell) -> Network:
    """The measured cluster for a model that is not scaled, at the cell's number of ranks."""
    network = measured_network(file, cell.world_size)
    names = ("between", "within", "all_reduce", "all_gather")
    links = {name: getattr(network, name) for name in names}
    return replace(
        network,
        **{name: Link(one.alpha_s, one.beta_s / cell.scale) for name, one in links.items()},
    )


def file_for(cell: Cell, files: Sequence[tuple[float, DictConfig]]) -> DictConfig:
    """Of those at the cell's rate the one with as many ranks, or the most below."""
    fitting = [
        file
        for rate_mbit, file in files
        if rate_mbit == cell.rate_mbit and file.measured.world_size <= cell.world_size
    ]
    if not fitting:
        raise ValueError(f"No cluster was measured at {cell.rate_mbit:g} Mb/s for {cell}.")
    return max(fitting, key=lambda file: file.measured.world_size)


def workload_of(cell: Cell) -> Workload:
    """The whole model of the cell, as long as its profile says."""
    return Workload(cell.model, *planned(load_profile(cell.model)))


def judge(
    steps: dict[Cell, float], files: Sequence[tuple[float, DictConfig]], held_out: set[str | int]
) -> list[Judged]:
    """Every cell of a known strategy, with all predictions."""
    cells = [cell for cell in steps if cell.entry in STRATEGIES]
    outside = {cell for cell in cells if {cell.model, cell.world_size} & held_out}
    inside = [cell for cell in cells if cell not in outside]
    overhead_s = median(
        seconds - workload_of(cell).times.forward_s - workload_of(cell).times.backward_s
        for cell, seconds in steps.items()
        if cell.entry == ALONE and not {cell.model, cell.world_size} & held_out
    )
    programs = {
        cell: STRATEGIES[cell.entry].program(
            workload_of(cell), network_of(file_for(cell, files), cell)
        )
        for cell in cells
    }
    simulated_s = {
        cell: simulate(program, cell.world_size).step_s + overhead_s
        for cell, program in programs.items()
    }
    known = {
        cell: (
            program.compute_s,
            program.sent_bytes / cell.scale / (cell.rate_mbit * 1e6 / 8),
            1.0,
        )
        for cell, program in programs.items()
    }
    line, *_ = np.linalg.lstsq(
        np.array([known[cell] for cell in inside]), np.array([steps[cell] for cell in inside])
    )
    return [
        Judged(
            cell,
            steps[cell],
            {
                "ours": simulated_s[cell],
                "bound": max(known[cell][:2]) + overhead_s,
                "line": float(np.dot(known[cell], line)),
            },
            cell in outside,
        )
        for cell in cells
    ]


def pairs(rows: Sequence[Judged]) -> tuple[int, int]:
    """Of the pairs that were run on the same and clearly differ: ordered as measured, and all."""
    alike: dict[tuple[str, int, float], list[Judged]] = defaultdict(list)
    for row in rows:
        alike[row.cell.model, row.cell.world_size, row.cell.rate_mbit].append(row)
    num_right = num_all = 0
    for group in alike.values():
        for one, other in combinations(group, 2):
            gap = one.measured_s - other.measured_s
            if abs(gap) > CLEARLY * min(one.measured_s, other.measured_s):
                num_all += 1
                num_right += gap * (one.predicted_s["ours"] - other.predicted_s["ours"]) > 0
    return num_right, num_all


def summary(rows: Sequence[Judged], title: str) -> str:
    """A line of mean and largest errors, and of pairs."""
    if not rows:
        return f"{title}: none"
    errors = {name: [abs(row.error(name)) for row in rows] for name in ("ours", "bound", "line")}
    parts = [f"{name} {mean(of):.1%} (worst {max(of):.1%})" for name, of in errors.items()]
    num_right, num_all = pairs(rows)
    return (
        f"{title}, {len(rows)} cells: {'; '.join(parts)}; {num_right} of {num_all} pairs in order"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", nargs="+", type=Path)
    parser.add_argument("--clusters", nargs="+", required=True, metavar="RATE_MBIT=FILE")
    parser.add_argument("--held-out-ranks", nargs="*", type=int, default=[8])
    parser.add_argument("--held-out-models", nargs="*", default=[])
    args = parser.parse_args()
    files = []
    for word in args.clusters:
        rate_mbit, _, path = word.partition("=")
        file = OmegaConf.load(path)
        assert isinstance(file, DictConfig)
        files.append((float(rate_mbit), file))
    held_out = {*args.held_out_ranks, *args.held_out_models}
    rows = judge(measured_steps(args.raw), files, held_out)
    print(
        f"{'model':14s} ranks  Mb/s  {'strategy':15s} measured  simulated    error   bound    line"
    )
    for row in rows:
        cell, mark = row.cell, " held out" * row.is_held_out
        errors = "  ".join(f"{row.error(name):+7.1%}" for name in ("ours", "bound", "line"))
        print(
            f"{cell.model:14s} {cell.world_size:5d} {cell.rate_mbit:5g}  {cell.entry:15s}"
            f" {row.measured_s * 1e3:8.1f} {row.predicted_s['ours'] * 1e3:8.1f}    {errors}{mark}"
        )
    print(summary([row for row in rows if not row.is_held_out], "calibrated"))
    print(summary([row for row in rows if row.is_held_out], "held out"))
    print(summary(rows, "all"))
    for name in STRATEGIES:
        print(summary([row for row in rows if row.cell.entry == name], name)) if any(
            row.cell.entry == name for row in rows
        ) else None


if __name__ == "__main__":
    main()
