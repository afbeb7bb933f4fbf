"""How far the simulator is from real steps on hosts of several ranks.

    python -m tests.benchmarks.hosts_accuracy FOLDER ...

Each folder has one layout of hosts at one rate: `bench`, of dear-bench, and for each compressor
that was run a folder of its name, which `dear-plan calibrate compressor=...` wrote there with the
same model. Dense rows are predicted with what the first of those measured. docs/simulator.md has
the commands.

Prints a row for each cell, means and largest errors, and how many pairs of entries are ordered as
measured. Nothing is measured anew.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import mean

from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.plan.config import measured_network
from lightning_dear.planning import CodecCost, Linear
from lightning_dear.simulator import Network, Workload, simulate
from lightning_dear.simulator.saved import load_workload
from lightning_dear.simulator.strategies import STRATEGIES
from lightning_dear.studies.table import format_table
from tests.benchmarks.measured_cells import Cell, read_cells
from tests.benchmarks.measured_clusters import workload_of
from tests.benchmarks.simulator_accuracy import Judged, pairs, scaled


def judged(folder: Path) -> list[Judged]:
    """The cells of a layout that can be predicted."""
    files = sorted(folder.glob("*/model.json"))
    known = {path.parent.name: path.parent for path in files}
    cells, rows = read_cells([folder / "bench"]), []
    for cell in cells.rounds_s:
        strategy = STRATEGIES.get("dear" if cell.entry in known else cell.entry)
        if strategy is None:
            continue
        workload = calibrated_workload(known.get(cell.entry, files[0].parent), cell)
        if cell.entry not in known:
            workload = workload.uncompressed
        network = network_of(known.get(cell.entry, files[0].parent), cell)
        predicted_s = simulate(strategy.program(workload, network)).step_s
        measured = cells.step_s(cell), {"ours": predicted_s}
        of_layout = replace(cell, model=folder.name)
        rows.append(Judged(of_layout, *measured, False, cells.noise(cell), cell in cells.void))
    return rows


def network_of(folder: Path, cell: Cell) -> Network:
    """What was measured there, as many times as fast as the model was small."""
    cluster = OmegaConf.load(folder / "cluster" / "measured.yaml")
    assert isinstance(cluster, DictConfig)
    return scaled(measured_network(cluster, cell.world_size), cell.scale)


def calibrated_workload(folder: Path, cell: Cell) -> Workload:
    """The whole model, on whose elements codecs spend as much less as there are more of them."""
    measured = load_workload(folder / "model.json")
    codecs = measured.codecs
    return replace(
        measured,
        tensors=workload_of(cell.model).tensors,
        codecs=replace(
            codecs,
            compressed=_of_more(codecs.compressed, cell.scale),
            uncompressed=_of_more(codecs.uncompressed, cell.scale),
        ),
    )


def _of_more(cost: CodecCost, scale: float) -> CodecCost:
    names = "encode", "decode_sum", "encode_shard", "decode"
    costs: dict[str, Linear] = {name: getattr(cost, name) for name in names}
    return replace(
        cost, **{name: replace(one, beta=one.beta / scale) for name, one in costs.items()}
    )


def report(rows: list[Judged]) -> str:
    """A row for each cell, and what all come to."""
    cells = [
        (
            row.cell.model,
            row.cell.entry,
            f"{row.measured_s * 1e3:.0f}",
            f"{row.predicted_s['ours'] * 1e3:.0f}",
            f"{row.error('ours'):+.1%}",
            "" if row.noise is None else f"{row.noise:.1%}",
            "yes" * row.is_void,
        )
        for row in rows
    ]
    titles = "layout", "entry", "measured ms", "simulated ms", "error", "repeat", "void"
    lines = [format_table(titles, cells)]
    for title, of in (("all", rows), ("not void", [row for row in rows if not row.is_void])):
        errors = [abs(row.error("ours")) for row in of] or [nan]
        right, num_pairs = pairs(of)
        lines.append(
            f"{title}: {len(of)} cells, mean error {mean(errors):.1%}, at most {max(errors):.1%};"
            f" {right} of {num_pairs} pairs are ordered as measured."
        )
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    print(report([row for folder in folders for row in judged(folder)]))


if __name__ == "__main__":
    main()
