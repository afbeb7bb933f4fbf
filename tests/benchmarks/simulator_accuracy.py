"""How far the simulator is from real steps: rows of dear-bench beside what it predicts for them.

    python -m tests.benchmarks.simulator_accuracy outputs/p2 outputs/p4 outputs/p8 \\
        --clusters 100:resnet50=outputs/c2/cluster/measured.yaml \\
        100:resnet50=outputs/c4/cluster/measured.yaml --held-out-models inception_v4

Folders are of replays whose entries are called as strategies are, or `ddp_tuned` or `oktopk`; a
cluster's file is what `dear-plan calibrate` measured at the rate and with the model that are said
before it. Where no file has as many ranks as a row, those with the most below count, and where none
is of its model, that of the model with the nearest number of tensors. What is simulated has the
buckets that were run, where they were found by trying. Beside ours stand two predictors that know
no schedule: the longer of compute and bytes / rate ("bound"), and a line fitted to the rows that
are not held out ("line": least squares, over compute and bytes / rate).

Prints a row for each cell, means and largest errors, and how many pairs of strategies are ordered
as measured. Nothing here is measured anew.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import numpy as np

from lightning_dear.apps.plan.config import measured_network
from lightning_dear.compression import OkTopk
from lightning_dear.planning import CodecCost, CodecCosts, Linear, TensorSpec
from lightning_dear.planning.fusion import fuse_groups, runs_of
from lightning_dear.planning.step import Program
from lightning_dear.simulator import Link, Network, Workload, simulate
from lightning_dear.simulator.ranking import chosen
from lightning_dear.simulator.strategies import MIB, OURS, STRATEGIES, whole
from lightning_dear.studies.device_costs import Device, halves_costs
from tests.benchmarks.measured_cells import Cell, Cells, read_cells
from tests.benchmarks.measured_clusters import File, nearest, read_files, workload_of
from tests.planning.models import compute_s

ALONE = "compute alone"
TUNED, SPARSE = "ddp_tuned", "oktopk"
RIVALS = (TUNED, "mgwfbp", "fsdp2", "dear")
"""Whose order among themselves is counted, too."""

CLEARLY = 0.05
"""Share by which two measured steps must differ for their order to count."""

PREDICTORS = ("ours", "bound", "line")


@dataclass(frozen=True)
class Judged:
    """A cell with its measured step and what each predictor says of it."""

    cell: Cell
    measured_s: float
    predicted_s: dict[str, float]
    is_held_out: bool
    noise: float | None
    is_void: bool

    def error(self, predictor: str) -> float:
        """Of the measured step; positive: predicted too long."""
        return self.predicted_s[predictor] / self.measured_s - 1


class Judge:
    """Predicts cells.

    Args:
        cells: What was measured.
        files: What was measured of clusters.
        held_out: Models and numbers of ranks that nothing is fitted to.
        calibrated_on: The model whose rows of Ok-Topk say what selecting takes, on those numbers of
            ranks that a file is of; these rows are not judged.
        num_cores: Of the machine, which ranks share: those of an emulated cluster select at once.
    """

    def __init__(
        self,
        cells: Cells,
        files: Sequence[File],
        held_out: Collection[str | int],
        calibrated_on: str,
        num_cores: int,
    ) -> None:
        self._cells, self._files, self._held_out = cells, files, held_out
        self._calibrated_on, self._num_cores = calibrated_on, num_cores
        alone = [
            cells.step_s(cell) - self._alone_s(cell)
            for cell in cells.rounds_s
            if cell.entry == ALONE and not self._is_held_out(cell)
        ]
        self._overhead_s = median(alone) if alone else 0.0

    def judged(self) -> list[Judged]:
        """Every cell of a known strategy, with all predictions."""
        cells = [cell for cell in self._cells.rounds_s if self._is_predicted(cell)]
        programs = {cell: self.program(cell) for cell in cells}
        known = {cell: self._known(cell, program) for cell, program in programs.items()}
        inside = [cell for cell in cells if not self._is_held_out(cell)]
        line, *_ = np.linalg.lstsq(
            np.array([known[cell] for cell in inside]),
            np.array([self._cells.step_s(cell) for cell in inside]),
        )
        return [
            Judged(
                cell,
                self._cells.step_s(cell),
                {
                    "ours": simulate(program).step_s + self._overhead_s,
                    "bound": max(known[cell][:2]) + self._overhead_s,
                    "line": float(np.dot(known[cell], line)),
                },
                self._is_held_out(cell),
                self._cells.noise(cell),
                cell in self._cells.void,
            )
            for cell, program in programs.items()
        ]

    def program(self, cell: Cell) -> Program:
        """A step of the whole model, on a network as many times as fast as the model was small."""
        workload, network = workload_of(cell.model), self.network(cell)
        if cell.entry == SPARSE:
            return STRATEGIES["dear"].program(self._selecting(workload, cell), network)
        if cell.entry == TUNED:
            groups = ddp_groups(workload.tensors, self._cells.caps_mb[cell] * MIB)
        elif cell in self._cells.buckets:
            groups = self._cells.buckets[cell]
        else:
            return STRATEGIES[cell.entry].program(workload, network)
        plan = fuse_groups(cell.entry, workload.tensors, cell.world_size, groups)
        return OURS.program(whole(plan), workload, network)

    def network(self, cell: Cell) -> Network:
        """The measured cluster for a model that is not scaled, at the cell's number of ranks."""
        return scaled(measured_network(nearest(self._files, cell), cell.world_size), cell.scale)

    def _selecting(self, workload: Workload, cell: Cell) -> Workload:
        """With Ok-Topk's bytes, and seconds of selecting as they were of the model calibrated on.

        Ranks that share cores select at the same time: so each takes P / cores times its CPU time.
        """
        bytes_only = halves_costs(OkTopk(), Device(0.0, 1e30), cell.world_size).compressed
        sharing = max(1.0, cell.world_size / self._num_cores)
        per_element_s = self._select_s(cell) * sharing / cell.scale
        cost = CodecCost(
            encode=Linear(0.0, per_element_s),
            reduce_bytes=bytes_only.reduce_bytes,
            gather_bytes=bytes_only.gather_bytes,
        )
        return replace(workload, codecs=CodecCosts(cost, may_plan=False), compressor=SPARSE)

    def _select_s(self, cell: Cell) -> float:
        """CPU seconds an element."""
        cells = self._cells
        own = [
            cells.codec_s[one] / cells.numel[one]
            for one in cells.codec_s
            if one.entry == SPARSE and self._calibrates(one)
        ]
        if not own:
            raise ValueError(f"No row of {SPARSE} on {self._calibrated_on} says what it takes.")
        return median(own)

    def _calibrates(self, cell: Cell) -> bool:
        measured = {file.world_size for file in self._files}
        return cell.model == self._calibrated_on and cell.world_size in measured

    def _is_predicted(self, cell: Cell) -> bool:
        if cell.entry == SPARSE:
            return not self._calibrates(cell)
        return cell.entry in STRATEGIES or cell.entry == TUNED

    def _is_held_out(self, cell: Cell) -> bool:
        return bool({cell.model, cell.world_size} & set(self._held_out))

    def _alone_s(self, cell: Cell) -> float:
        times = workload_of(cell.model).times
        return times.forward_s + times.backward_s

    def _known(self, cell: Cell, program: Program) -> tuple[float, float, float]:
        """What predictors without a schedule know: compute, bytes / rate, and 1."""
        bytes_s = program.sent_bytes / cell.scale / (cell.rate_mbit * 1e6 / 8)
        return compute_s(program), bytes_s, 1.0


def scaled(network: Network, scale: float) -> Network:
    """`network` for a model that is as many times as large as the one it was measured with."""
    names = ("between", "within", "all_reduce")
    links = {name: getattr(network, name) for name in names}
    faster = {name: Link(one.alpha_s, one.beta_s / scale) for name, one in links.items()}
    curves = {name: getattr(network, name) for name in ("all_gather", "reduce_scatter")}
    larger = {
        name: replace(one, sizes=tuple(size * scale for size in one.sizes))
        for name, one in curves.items()
    }
    return replace(network, **faster, **larger)


def ddp_groups(tensors: Sequence[TensorSpec], cap_bytes: float) -> list[list[int]]:
    """DDP's buckets of a cap that was asked for: closed by the tensor that reaches it."""
    ready = sorted(tensors, key=lambda one: one.ready or 0)
    runs = runs_of(ready, lambda one: one.numel * one.itemsize, cap_bytes)
    return [[tensor.index for tensor in run] for run in runs]


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


def regrets(rows: Sequence[Judged], pick: Callable[[Sequence[Judged]], Judged]) -> list[float]:
    """Of each point: by how much what `pick` takes of its rows exceeds the fastest of them."""
    alike: dict[tuple[str, int, float], list[Judged]] = defaultdict(list)
    for row in rows:
        alike[row.cell.model, row.cell.world_size, row.cell.rate_mbit].append(row)
    return [
        pick(group).measured_s / min(row.measured_s for row in group) - 1
        for group in alike.values()
    ]


def fastest(rows: Sequence[Judged]) -> Judged:
    """What is simulated to be."""
    return min(rows, key=lambda row: row.predicted_s["ours"])


def recommended(rows: Sequence[Judged]) -> Judged:
    """What dear-plan says to use: only what dear-train runs, and DDP if that is nearly as fast."""
    known = {row.cell.entry: row for row in rows if row.cell.entry in STRATEGIES}
    steps_s = {
        name: row.predicted_s["ours"]
        for name, row in known.items()
        if STRATEGIES[name].overrides is not None
    }
    return known[chosen(steps_s)]


def summary(rows: Sequence[Judged], title: str) -> str:
    """A row of a markdown table: mean and largest errors, and pairs."""
    errors = {name: [abs(row.error(name)) for row in rows] for name in PREDICTORS}
    parts = [f"{mean(of):.1%} | {max(of):.1%}" if of else "- | -" for of in errors.values()]
    num_right, num_all = pairs(rows)
    return f"| {title} | {len(rows)} | {' | '.join(parts)} | {num_right} of {num_all} |"


def report(rows: Sequence[Judged]) -> str:
    """Return a row for each cell, then summaries."""
    head = "| model | ranks | Mb/s | strategy | measured ms | simulated ms | error | bound | line |"
    lines = [f"{head} repeat | held out | void |", "|---" * 12 + "|"]
    for row in sorted(rows, key=lambda one: (one.cell.model, one.cell.world_size)):
        cell = row.cell
        errors = " | ".join(f"{row.error(name):+.1%}" for name in PREDICTORS)
        noise = "" if row.noise is None else f"{row.noise:.1%}"
        lines.append(
            f"| {cell.model} | {cell.world_size} | {cell.rate_mbit:g} | {cell.entry} |"
            f" {row.measured_s * 1e3:.0f} | {row.predicted_s['ours'] * 1e3:.0f} | {errors} |"
            f" {noise} | {'yes' * row.is_held_out} | {'yes' * row.is_void} |"
        )
    dense = [row for row in rows if row.cell.entry != SPARSE]
    groups = {
        "dense": dense,
        "dense, not held out": [row for row in dense if not row.is_held_out],
        "dense, held out": [row for row in dense if row.is_held_out],
        "dense, not void": [row for row in dense if not row.is_void],
        "dense, void": [row for row in dense if row.is_void],
        SPARSE: [row for row in rows if row.cell.entry == SPARSE],
        f"{', '.join(RIVALS)}": [row for row in rows if row.cell.entry in RIVALS],
    }
    for kind in ("entry", "world_size", "model"):
        for name in dict.fromkeys(getattr(row.cell, kind) for row in dense):
            groups[f"{kind} {name}"] = [row for row in dense if getattr(row.cell, kind) == name]
    noises = [row.noise for row in rows if row.noise is not None]
    lines += ["", "| | cells | ours: mean | worst | bound | worst | line | worst | pairs |"]
    lines += ["|---" * 9 + "|", *(summary(of, title) for title, of in groups.items())]
    for title, of, pick in (
        ("dear-plan recommends", dense, recommended),
        ("is simulated to be the fastest of dense ones", dense, fastest),
        ("is simulated to be the fastest of all", list(rows), fastest),
    ):
        lost = regrets(of, pick)
        lines.append(
            f"\nWhat {title} is at most {max(lost):.1%} slower than the fastest"
            f" ({mean(lost):.1%} on the average of {len(lost)} points)."
        )
    if noises:
        lines.append(
            f"\nRepeats of {len(noises)} cells: {mean(noises):.1%}, at most {max(noises):.1%}."
        )
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--clusters", nargs="+", required=True, metavar="RATE_MBIT:MODEL=FILE")
    parser.add_argument("--held-out-ranks", nargs="*", type=int, default=[8])
    parser.add_argument("--held-out-models", nargs="*", default=["inception_v4"])
    parser.add_argument("--calibrated-on", default="resnet50")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    files = read_files(args.clusters)
    held_out = {*args.held_out_ranks, *args.held_out_models}
    cells = read_cells(args.folders)
    print(report(Judge(cells, files, held_out, args.calibrated_on, args.cores).judged()))


if __name__ == "__main__":
    main()
