"""``dear-plan``: which strategy would be fastest for a model on a cluster, without either."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.apps.plan import calibrate
from lightning_dear.apps.plan.config import (
    bounds_of,
    conditions_of,
    network_of,
    source_of,
    strategies_of,
    workload_of,
    workloads_of,
    world_sizes_of,
)
from lightning_dear.apps.plan.report import (
    Bands,
    advice,
    describe,
    format_rows,
    write_rows,
    write_scaling,
)
from lightning_dear.paths import conf_dir
from lightning_dear.simulator import Workload
from lightning_dear.simulator.ranking import (
    Ranked,
    Scaled,
    num_ranked,
    ranked_with,
    recommended,
    scaling,
)
from lightning_dear.simulator.strategies import Strategy
from lightning_dear.simulator.timeline import lanes_of, spans_of
from lightning_dear.studies.progress import Progress
from lightning_dear.telemetry.spans import write_chrome_trace
from lightning_dear.telemetry.timeline import plot_timeline

CALIBRATE = "calibrate"
"""The command line's first word, to measure instead of to predict."""


def plan(cfg: DictConfig, folder: Path) -> Ranked:
    """Predict a step under each strategy; print and write what comes out. Starts no process.

    Args:
        cfg: A config of ``conf/plan.yaml``.
        folder: Where tables and pictures go.

    Returns:
        What to use.

    Raises:
        ValueError: If the config asks for what does not exist.
    """
    workload, network = workload_of(cfg), network_of(cfg)
    strategies, conditions = strategies_of(cfg, workload), conditions_of(cfg)
    workloads = workloads_of(cfg, workload, network.world_size)
    rows = ranked_with(strategies, workloads, network, conditions)
    best = recommended(rows, enough=float(cfg.enough))
    bands = _bands(cfg, strategies, workloads, rows)
    text = "\n".join(
        [
            describe(workload, network, source_of(cfg)),
            format_rows(rows, workload, bands),
            advice(best, rows, network, str(cfg.profile), cfg.compute_s),
        ]
    )
    print(text, flush=True)
    (folder / "table.txt").write_text(f"{text}\n")
    write_rows(folder / "plan.csv", rows, workload, bands)
    _write_timeline(folder, best)
    write_scaling(folder, _scaling(cfg, strategies, workload), workload)
    print(f"The rows, how each scales, and the best one's timeline: {folder}", flush=True)
    return best


def _bands(
    cfg: DictConfig,
    strategies: Sequence[Strategy],
    workloads: Sequence[Workload],
    rows: Sequence[Ranked],
) -> Bands:
    """Each row's step, also on the fastest and the slowest network of all that was measured."""
    networks = bounds_of(cfg)
    if networks is None:
        return {}
    conditions = conditions_of(cfg)
    fast, slow = (
        {row.name: row.step.step_s for row in ranked_with(strategies, workloads, one, conditions)}
        for one in networks
    )
    # Neither need be the extreme: another plan may be made for another network.
    of_all = {row.name: sorted((row.step.step_s, fast[row.name], slow[row.name])) for row in rows}
    return {name: (three[0], three[-1]) for name, three in of_all.items()}


def _scaling(cfg: DictConfig, strategies: Sequence[Strategy], workload: Workload) -> list[Scaled]:
    sizes = world_sizes_of(cfg)
    sized = partial(workloads_of, cfg, workload)
    progress = Progress(num_ranked(strategies, sized(2)) * len(sizes))
    scaled = []
    try:
        for one in scaling(strategies, sized, partial(network_of, cfg), sizes, conditions_of(cfg)):
            scaled.append(one)
            progress.begin(f"{one.name}, {one.world_size} ranks")
            progress.step()
    finally:
        progress.close()
    return scaled


def _write_timeline(folder: Path, best: Ranked) -> None:
    spans = spans_of(best.step)
    lanes: Sequence[str] = lanes_of(spans)
    write_chrome_trace(spans, folder / "timeline.json", lanes=lanes)
    title = f"Two steps of {best.name}, simulated: {best.step.step_s * 1e3:.0f} ms each"
    plot_timeline(spans, folder / "timeline.png", title, lanes)


def main() -> None:
    """``dear-plan``, or ``dear-plan calibrate``."""
    if sys.argv[1:2] == [CALIBRATE]:
        # As a module of its own, which its ranks can be started as.
        os.execv(sys.executable, [sys.executable, "-m", calibrate.MODULE, *sys.argv[2:]])
    plan_job()


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="plan")
def plan_job(cfg: DictConfig) -> None:
    """Plan one job."""
    with job.one_message("dear-plan"):
        plan(cfg, job.folder_with(cfg))


if __name__ == "__main__":
    main()
