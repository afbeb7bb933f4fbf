"""Points that need other ranks or links: ``dear-bench`` runs itself once for each such group."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from lightning_dear.apps.bench.config import Setting, as_override, label_of, merged, overrides_of
from lightning_dear.strategy.launchers import job_arguments
from lightning_dear.studies.files import join_csv
from lightning_dear.studies.table import LEGEND

MODULE = "lightning_dear.apps.bench"

FILES = ("raw.csv", "blocks.csv", "summary.csv", "table.txt")
"""What each group leaves in its folder, and what is joined in the job's."""


def run_groups(groups: Sequence[tuple[Setting, Sequence[Setting]]]) -> None:
    """Run one process for each group, and join what they have written. Blocks.

    Args:
        groups: Settings of the cluster, and the points to compare on it.

    Raises:
        SystemExit: With the exit code of the first group that failed; later ones are not run.
    """
    config = HydraConfig.get()
    folder = Path(config.runtime.output_dir)
    parts: list[Path] = []
    try:
        for number, (cluster, points) in enumerate(groups):
            parts.append(folder / str(number))
            own = [
                *overrides_of(cluster),
                as_override("points", list(points)),
                as_override("sweep", None),
                as_override("hydra.run.dir", str(parts[-1])),
            ]
            labels = "; ".join(label_of(point) or "as configured" for point in points)
            print(f"Part {number + 1} of {len(groups)}: {labels}", flush=True)
            argv = [sys.executable, "-m", MODULE, *merged(job_arguments(config, 0), own)]
            code = subprocess.run(argv, cwd=config.runtime.cwd, check=False).returncode
            if code:
                raise SystemExit(code)
    finally:
        join(folder, parts)
        print(f"\nAll parts:\n\n{(folder / 'table.txt').read_text()}", flush=True)


def join(folder: Path, parts: Sequence[Path]) -> None:
    """Write the parts' files, one after the other, into `folder`; plots stay where they are."""
    for name in FILES:
        found = [part / name for part in parts if (part / name).is_file()]
        if name.endswith(".csv"):
            join_csv(folder / name, found)
        else:
            tables = [path.read_text().replace(LEGEND, "").strip() for path in found]
            (folder / name).write_text("\n\n".join([*tables, LEGEND]) + "\n")
    for part in parts:
        plot = part / "plot.png"
        if plot.is_file():
            shutil.copy(plot, folder / f"plot{part.name}.png")
