"""Points that need other ranks or links: ``dear-bench`` runs itself once for each such group."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from lightning_dear.apps import job
from lightning_dear.apps.bench.config import Setting, as_override, label_of, merged, overrides_of
from lightning_dear.strategy.launchers import job_arguments
from lightning_dear.studies.comparison import join_parts, report_of

MODULE = "lightning_dear.apps.bench"


def run_groups(groups: Sequence[tuple[Setting, Sequence[Setting]]]) -> None:
    """Run one process for each group; join what they have measured after each. Blocks.

    Args:
        groups: Settings of the cluster, and the points to compare on it.

    Raises:
        SystemExit: With the exit code of the first group that failed; later ones are not run.
    """
    config = HydraConfig.get()
    folder = Path(config.runtime.output_dir)
    report = report_of(folder)
    try:
        for number, (cluster, points) in enumerate(groups):
            own = [
                *overrides_of(cluster),
                as_override("points", list(points)),
                as_override("sweep", None),
                as_override("hydra.run.dir", str(folder / str(number))),
            ]
            labels = "; ".join(label_of(point) or "as configured" for point in points)
            print(f"Part {number + 1} of {len(groups)}: {labels}", flush=True)
            argv = [sys.executable, "-m", MODULE, *merged(job_arguments(config, 0), own)]
            code = job.run_child(argv, cwd=config.runtime.cwd)
            if join_parts(folder):
                report.write()
            if code:
                raise SystemExit(code)
    finally:
        if (folder / "blocks.csv").exists():
            print("\nAll parts:\n")
            report.finish()
