"""``dear-converge``: how training ends under each compressor, against dense training."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig

from lightning_dear.apps import emulated, job
from lightning_dear.apps.bench.build import build_starter
from lightning_dear.apps.converge.config import Entry, check, entries_of, metric_of
from lightning_dear.apps.converge.run import Study
from lightning_dear.emulation import emulated_rig
from lightning_dear.paths import conf_dir
from lightning_dear.studies.block import quiet_lightning
from lightning_dear.studies.convergence.table import (
    format_rows,
    write_curves,
    write_plot,
    write_summary,
)
from lightning_dear.studies.files import write_table


def converge(cfg: DictConfig, entries: Sequence[Entry]) -> None:
    """Train ``entries`` on the seeds of ``cfg``; print and write how they end.

    Starts the ranks once, and blocks until they have ended. Every training is written when it
    ends; what the job's folder holds already is not trained again.

    Raises:
        ValueError: If the config asks for what this machine does not have, or cannot be compared.
    """
    starter = build_starter(cfg)
    if starter.is_global_zero:
        job.folder_with(cfg)
    launcher = starter.strategy.launcher
    run = partial(_run, cfg, entries, starter.strategy)
    launcher.launch(run) if launcher else run()


def _folder() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


def _run(cfg: DictConfig, entries: Sequence[Entry], strategy: Any) -> None:
    assert isinstance(strategy, ParallelStrategy)
    with quiet_lightning():
        strategy.setup_environment()
    study = Study(cfg, entries, strategy, _folder())
    try:
        study.run()
    finally:
        if strategy.is_global_zero:
            _finish(_folder(), study)


def _finish(folder: Path, study: Study) -> None:
    rows = study.rows()
    text = "\n".join(filter(None, (emulated_rig(), format_rows(rows))))
    write_summary(folder / "summary.csv", rows)
    write_table(folder / "table.txt", text)
    write_curves(folder / "loss_over_time.csv", rows, study.curves())
    print(text, flush=True)
    # Last: after Ctrl-C there are only seconds left, and drawing takes some.
    write_plot(folder / "plot.png", rows)
    print(f"Every training, the rows and the plot: {folder}", flush=True)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="converge")
def main(cfg: DictConfig) -> None:
    """Run one study."""
    with job.one_message("dear-converge"), job.isolated_job():
        check(cfg)
        metric_of(cfg)
        entries = entries_of(cfg)
        if not emulated.restart_on_cluster(cfg, "lightning_dear.apps.converge"):
            converge(cfg, entries)


if __name__ == "__main__":
    main()
