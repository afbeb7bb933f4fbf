"""One job of ``dear-bench``: its checks, its ranks, its points one after another."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps import emulated, job
from lightning_dear.apps.bench import build, config
from lightning_dear.apps.bench.comparison import Comparison
from lightning_dear.apps.program import Program
from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.emulation.launch import HOST_VARIABLE
from lightning_dear.strategy.launchers import job_arguments
from lightning_dear.studies import block, comparison, files, progress, summary
from lightning_dear.studies.report import Report

MODULE = "lightning_dear.apps.bench"


def run_job(cfg: DictConfig, program: Program) -> None:
    """Compare the entries of ``cfg`` at each of its points; print and write the rows.

    Starts the ranks that the cluster needs, and blocks until they have ended. Blocks that the
    folder already has, of the same config, are not measured again.

    Raises:
        SystemExit: After an error, which is printed.
    """
    # Before any rank measures: raw.csv of this very run would otherwise look like an earlier one.
    check_goes_on(program.folder, cfg)
    points = config.points_of(cfg)
    if os.environ.keys().isdisjoint({"RANK", "LOCAL_RANK"}):
        check_points(points)
    if len(groups := config.by_cluster(points)) > 1:
        job.folder_with(cfg)
        run_groups(groups)
    elif not emulated.restart_on_cluster(cfg, MODULE):
        _run(cfg, points, program)


def _run(cfg: DictConfig, points: Sequence[config.Setting], program: Program) -> None:
    done: list[Comparison] = []

    def rows() -> list[files.Line]:
        return [row for one in done for row in one.rows()]

    report = Report(program.folder, rows, comparison.text_of, comparison.draw)

    def compare(starter: Trainer) -> None:
        interface = block.interface_of(starter.num_nodes) if starter.num_nodes > 1 else ""
        on_machine = starter.world_size if HOST_VARIABLE in os.environ else starter.num_devices
        rig = block.Rig(starter.global_rank, starter.world_size, interface, on_machine)
        path = program.folder / "blocks.csv"
        known = from_all_ranks(files.read_lines(path, summary.WORDS) if rig.rank == 0 else [])[0]
        for point in points:
            own = Comparison(point, rig, starter.strategy.root_device, report, known)
            if rig.rank == 0 and not done:
                report.progress = progress.Progress(own.num_steps * len(points))
            done.append(own)
            own.run()

    build.run_on_ranks(cfg, compare, report, program)


def run_groups(groups: Sequence[tuple[config.Setting, Sequence[config.Setting]]]) -> None:
    """Run a child process for each group, and join the measured files after each. Blocks.

    Args:
        groups: For each group the settings of its cluster, and the points to measure on it.

    Raises:
        SystemExit: With the exit code of the first group that failed; later groups are not run.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    try:
        for number, (cluster, points) in enumerate(groups):
            part = {"points": list(points), "sweep": None, "hydra.run.dir": f"{folder}/{number}"}
            own = config.overrides_of({**cluster, **part})
            labels = "; ".join(config.label_of(point) or "as configured" for point in points)
            print(f"Part {number + 1} of {len(groups)}: {labels}", flush=True)
            argv = [sys.executable, "-m", MODULE, *config.merged(job_arguments(hydra, 0), own)]
            code = job.run_child(argv, cwd=hydra.runtime.cwd)
            comparison.join_parts(folder)
            if code:
                raise SystemExit(code)
    finally:
        if (folder / "summary.csv").exists():
            print("\nAll parts:\n")
            comparison.show_again(folder)


def check_goes_on(folder: Path, cfg: DictConfig) -> None:
    """Refuse a folder whose blocks were measured under a config other than ``cfg``.

    Such blocks would be taken for this run's. A different number of rounds is allowed.

    Raises:
        ValueError: If the folder has a raw.csv of another config, or of an unknown one.
    """
    if not (folder / "raw.csv").exists():
        return
    path = folder / "config.yaml"
    known = OmegaConf.load(path) if path.exists() else OmegaConf.create()
    before, now = _deciding(known), _deciding(cfg)
    if changed := [key for key, value in now.items() if before.get(key) != value]:
        raise ValueError(
            f"{folder} has the raw.csv of an earlier run with other values of"
            f" {', '.join(changed)}. {files.OTHER_FOLDER}"
        )


def _deciding(cfg: Any) -> dict[str, Any]:
    """Return the options on which the figures of a block depend."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    config.pop("rounds", None)
    # `emulated.restart_on_cluster` adds it for ranks on emulated hosts; it follows from the rate.
    config.get("cluster", {}).pop("beta_s_per_byte", None)
    return dict(config)


def check_points(points: Sequence[config.Setting]) -> None:
    """Compose every entry of every point and build its strategy, before ranks are started.

    Raises:
        ValueError: For the first entry whose config is wrong.
    """
    for point in points:
        for entry in config.entries_of(config.at_point(point)):
            tries = [(*entry.overrides, more) for more in entry.grid] or [entry.overrides]
            for one in (*tries, *([entry.plan_of] if entry.plan_of else [])):
                composed = config.at_point(point, one)
                build.build_strategy(composed)
                build.round_of(composed)
