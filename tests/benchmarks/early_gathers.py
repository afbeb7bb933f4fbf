"""What early gathers gain: `mergecomp`'s plans with and without them, replayed on shaped links.

    sudo python -m tests.benchmarks.early_gathers --out early

Runs dear-bench once for each model, number of hosts and ratio of communication to compute; its
rounds alternate the two. Prints, for each, the step with early gathers over the step without them.
A folder of a cell that is there already is not measured again. Nothing else should run on the
machine, which needs about 25 minutes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
from pathlib import Path
from statistics import median

from typing_extensions import override

from lightning_dear import DearStrategy

SCALES = {"bert_base": 40, "resnet50": 16}
HOSTS, RATIOS = (2, 4), (0.75, 1.0, 1.33)
RATE_MBIT = 125

_ENTRY = "strategy: dear, fusion: mergecomp, tuning_steps: 10"
_WITHOUT = f"strategy._target_: {__name__}.WithoutEarly"


class WithoutEarly(DearStrategy):
    """Plans and trains as ever, but that every gather waits for the end of backward."""

    @override
    def _connect(self, trainer: object) -> None:
        super()._connect(trainer)  # type: ignore[arg-type]
        self._pipeline.refuse_early("it is measured without")


def run(model: str, hosts: int, ratio: float, folder: Path) -> None:
    """Measures one cell, which takes about two minutes."""
    overrides = [
        "cluster=emulated",
        f"cluster.num_hosts={hosts}",
        f"cluster.rate_mbit={RATE_MBIT}",
        "model=replay",
        f"model.profile={model}",
        f"model.scale={SCALES[model]}",
        "optimizer=sgd_plain",
        f"ratio={ratio}",
        f"hydra.run.dir={folder}",
        f"entries=[{{name: without, {_ENTRY}, {_WITHOUT}}}, {{name: early, {_ENTRY}}}]",
    ]
    subprocess.run(["dear-bench", *overrides], check=True)


def row_of(folder: Path) -> dict[str, str]:
    """Returns the row of the entry with early gathers."""
    with (folder / "summary.csv").open(encoding="utf-8") as file:
        return next(row for row in csv.DictReader(file) if row["entry"] == "early")


def main() -> None:
    """Measures the cells that are missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("early"))
    out, found = parser.parse_args().out, []
    for model, hosts, ratio in itertools.product(SCALES, HOSTS, RATIOS):
        folder = out.absolute() / f"{model}-{hosts}-{ratio:g}"
        if not (folder / "summary.csv").exists():
            run(model, hosts, ratio, folder)
        row = row_of(folder)
        found.append(float(row["ratio"]))
        spread = f"{float(row['ratio_min']):.3f}-{float(row['ratio_max']):.3f}"
        void = " VOID: the machine was busy" if row["is_void"] == "True" else ""
        print(f"{model:10} P = {hosts} ratio {ratio:4g}: {found[-1]:.3f} [{spread}]{void}")
    print(f"median {median(found):.3f}; {sum(one <= 0.95 for one in found)} gain 5 % or more")


if __name__ == "__main__":
    main()
