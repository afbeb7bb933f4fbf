"""How far the simulator is from real steps on emulated hosts, of one rank or of several.

    python -m tests.benchmarks.hosts_accuracy FOLDER ...

A folder has one layout of hosts at one rate, and is called so: `2x4-125` is two hosts of four ranks
on links of 125 Mb/s. In it lies `bench`, of dear-bench, and for each compressor that was run a
folder of its name, which `dear-plan calibrate compressor=...` wrote there with the same model. What
a compressor takes may also stand beside the same layout at another rate. Dense rows are predicted
with what the first compressor's folder says.

Prints a row for each cell, means and largest errors, and how many pairs of entries are ordered as
measured. Nothing is measured anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import mean

from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.plan.config import measured_network
from lightning_dear.planning import CodecCost, Linear
from lightning_dear.simulator import Network, Workload, simulate
from lightning_dear.simulator.ranking import chosen
from lightning_dear.simulator.saved import load_workload
from lightning_dear.simulator.strategies import STRATEGIES
from lightning_dear.studies.device_costs import Device, whole_costs
from lightning_dear.studies.table import format_table
from tests.benchmarks.measured_cells import Cell, read_cells
from tests.benchmarks.measured_clusters import workload_of
from tests.benchmarks.simulator_accuracy import Judged, fastest, pairs, regrets, scaled

AS_GOOD = ("ddp_bf16", "bf16", "int8")
"""Entries with a compressor that dear-plan may advise."""

HALF_THE_BYTES = whole_costs("bf16", Device(0.0, 1e30), 2)
"""Of DDP's bf16 hook, whose encoding nobody has measured."""


def judged(folder: Path) -> list[Judged]:
    """The cells of a layout that can be predicted."""
    own = {path.parent.name: path.parent for path in sorted(folder.glob("*/model.json"))}
    known = own | codecs_beside(folder, own)
    first = next(iter(own.values()))
    cells, rows = read_cells([folder / "bench"]), []
    for cell in cells.rounds_s:
        has_hook = cell.entry == "ddp_bf16"
        strategy = STRATEGIES.get(
            "dear" if cell.entry in known else "ddp" if has_hook else cell.entry
        )
        if strategy is None:
            continue
        workload = calibrated_workload(known.get(cell.entry, first), cell)
        if has_hook:
            workload = replace(workload, whole_codecs=HALF_THE_BYTES, compressor="bf16")
        elif cell.entry not in known:
            workload = workload.uncompressed
        network = network_of(own.get(cell.entry, first), cell)
        predicted_s = simulate(strategy.program(workload, network)).step_s
        measured = cells.step_s(cell), {"ours": predicted_s}
        of_layout = replace(cell, model=folder.name)
        rows.append(Judged(of_layout, *measured, False, cells.noise(cell), cell in cells.void))
    return rows


def codecs_beside(folder: Path, own: Mapping[str, Path]) -> dict[str, Path]:
    """Compressors that were measured on the same layout at another rate: their folders."""
    layout = folder.name.partition("-")[0]
    others = sorted(folder.parent.glob(f"{layout}-*/*/model.json"))
    return {path.parent.name: path.parent for path in others if path.parent.name not in own}


def network_of(folder: Path, cell: Cell) -> Network:
    """What was measured there, as many times as fast as the model was small."""
    cluster = OmegaConf.load(folder / "cluster" / "measured.yaml")
    assert isinstance(cluster, DictConfig)
    return scaled(measured_network(cluster, cell.world_size), cell.scale)


def calibrated_workload(folder: Path, cell: Cell) -> Workload:
    """The whole model, on whose elements codecs spend as much less as there are more of them."""
    measured = load_workload(folder / "model.json")
    codecs = measured.codecs
    unit_mb = measured.shard_unit_mb
    return replace(
        measured,
        tensors=workload_of(cell.model).tensors,
        shard_unit_mb=unit_mb * cell.scale if isinstance(unit_mb, float) else unit_mb,
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


def advised(rows: Sequence[Judged]) -> Judged:
    """What dear-plan says to use of them."""
    known = {row.cell.entry: row for row in rows}
    return known[chosen({name: row.predicted_s["ours"] for name, row in known.items()})]


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
    valid = [row for row in rows if not row.is_void]
    alone = [row for row in valid if "x1-" in row.cell.model]
    together = [row for row in valid if row not in alone]
    for title, of in (
        ("all", rows),
        ("not void", valid),
        ("of these with one rank a host", alone),
        ("with several", together),
    ):
        errors = [abs(row.error("ours")) for row in of] or [nan]
        right, num_pairs = pairs(of)
        lines.append(
            f"{title}: {len(of)} cells, mean error {mean(errors):.1%}, at most {max(errors):.1%};"
            f" {right} of {num_pairs} pairs are ordered as measured."
        )
    lossless = [row for row in rows if row.cell.entry in STRATEGIES]
    safe = [row for row in rows if row in lossless or row.cell.entry in AS_GOOD]
    for title, of, pick in (
        ("What dear-plan advises", safe, advised),
        ("What it advises without compressors", lossless, advised),
        ("What is simulated to be the fastest, lossy ones included,", rows, fastest),
    ):
        most = max(regrets(of, pick))
        lines.append(f"{title} is at most {most:.1%} slower than the fastest of these.")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    print(report([row for folder in folders for row in judged(folder)]))


if __name__ == "__main__":
    main()
