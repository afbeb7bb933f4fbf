"""``dear-bench``: strategies side by side, on the same ranks, with the bounds beside them."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig

from lightning_dear.apps import emulated, job
from lightning_dear.apps.bench.build import build_starter, build_strategy
from lightning_dear.apps.bench.config import (
    Setting,
    by_cluster,
    composed,
    entries_of,
    merged,
    overrides_of,
    points_of,
)
from lightning_dear.apps.bench.points import MODULE, run_groups
from lightning_dear.apps.bench.run import Comparison
from lightning_dear.emulation.launch import HOST_VARIABLE
from lightning_dear.paths import conf_dir
from lightning_dear.studies.block import Rig, interface_of, quiet_lightning
from lightning_dear.studies.files import check_is_new, write_summary, write_table
from lightning_dear.studies.plot import write_plot
from lightning_dear.studies.progress import Progress
from lightning_dear.studies.records import Row
from lightning_dear.studies.table import format_rows, verdicts


def bench(cfg: DictConfig) -> None:
    """Compare the entries of ``cfg`` at each of its points; print and write the rows.

    Starts the ranks where the cluster needs them, and blocks until they have ended. What has been
    measured is written even if the run is interrupted; if it is killed, up to the last point.

    Raises:
        ValueError: If the config asks for what this machine does not have.
    """
    points = points_of(cfg)
    starter = build_starter(cfg)
    if starter.is_global_zero:
        job.folder_with(cfg)
    launcher = starter.strategy.launcher
    compare = partial(_compare, starter, points)
    launcher.launch(compare) if launcher else compare()


def _compare(starter: Trainer, points: Sequence[Setting]) -> None:
    strategy: Any = starter.strategy
    assert isinstance(strategy, ParallelStrategy)
    with quiet_lightning():
        strategy.setup_environment()
    rig = Rig(
        starter.global_rank,
        starter.world_size,
        interface_of(starter.num_nodes) if starter.num_nodes > 1 else "",
        starter.world_size if HOST_VARIABLE in os.environ else starter.num_devices,
    )
    folder = Path(HydraConfig.get().runtime.output_dir)
    done: list[Comparison] = []
    try:
        progress: Progress | None = None
        for point in points:
            if done and rig.rank == 0:
                # A kill leaves no time to do it at the end.
                _write(folder, _rows_of(done))
            comparison = Comparison(point, rig, strategy.root_device, folder, None)
            if rig.rank == 0:
                progress = progress or Progress(comparison.num_steps * len(points))
                comparison.progress = progress
            done.append(comparison)
            comparison.run()
    finally:
        if rig.rank == 0:
            if progress is not None:
                progress.close()
            _finish(folder, _rows_of(done))


def _rows_of(comparisons: Sequence[Comparison]) -> list[Row]:
    return [row for comparison in comparisons for row in comparison.rows()]


def _write(folder: Path, rows: list[Row]) -> str:
    write_summary(folder / "summary.csv", rows)
    text = "\n".join([format_rows(rows), *verdicts(rows)])
    write_table(folder / "table.txt", text)
    return text


def _finish(folder: Path, rows: list[Row]) -> None:
    print(_write(folder, rows), flush=True)
    # Last: after Ctrl-C there are only seconds left, and drawing takes some.
    write_plot(folder / "plot.png", rows)
    print(f"Every step, the rows and the plot: {folder}", flush=True)


def check_points(points: Sequence[Setting]) -> None:
    """Compose every entry of every point and build its strategy, before ranks are started.

    Raises:
        ValueError: What is wrong with one.
    """
    for point in points:
        for entry in entries_of(composed(overrides_of(point))):
            tries = [(*entry.overrides, *more) for more in entry.grid or ((),)]
            for one in (*tries, *([entry.plan_of] if entry.plan_of else [])):
                build_strategy(composed(merged(overrides_of(point), one)))


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="bench")
def main(cfg: DictConfig) -> None:
    """Run one comparison, or several on the same ranks."""
    with job.one_message("dear-bench"), job.isolated_job():
        # All ranks come by here before any of them has measured something.
        check_is_new(Path(HydraConfig.get().runtime.output_dir))
        points = points_of(cfg)
        if os.environ.keys().isdisjoint({"RANK", "LOCAL_RANK"}):
            check_points(points)
        groups = by_cluster(points)
        if len(groups) > 1:
            run_groups(groups)
        elif not emulated.restart_on_cluster(cfg, MODULE):
            bench(cfg)


if __name__ == "__main__":
    main()
