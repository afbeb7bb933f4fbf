"""Predicts a step under each strategy."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.apps.plan.config import (
    check_numbers,
    compressed,
    device_of,
    network_of,
    source_of,
    strategies_of,
    workload_of,
    workloads_of,
)
from lightning_dear.apps.plan.report import Report
from lightning_dear.simulator import Workload
from lightning_dear.simulator.ranking import Ranked, by_step, pairs, predicted
from lightning_dear.simulator.strategies import Strategy

Case = tuple[Strategy, Workload]


def plan(cfg: DictConfig, folder: Path) -> Ranked:
    """Predict a step under each strategy; print and write what comes out. Starts no process.

    Args:
        cfg: A config of ``conf/plan.yaml``.
        folder: Where the table and all figures go.

    Returns:
        What to use.

    Raises:
        ValueError: If the config asks for what does not exist.
    """
    check_numbers(cfg)
    workload, network = workload_of(cfg), network_of(cfg)
    cases = cases_of(cfg, workload, network.world_size)
    rows = by_step(predicted(*case, network) for case in cases)
    has_no_gpu = cfg.cluster.accelerator == "cpu"
    found = Report(rows, workload, network, float(cfg.enough), has_no_gpu)
    text = f"{found.describe(source_of(cfg))}\n{found.table()}\n{found.advice()}"
    print(text, flush=True)
    (folder / "table.txt").write_text(f"{text}\n")
    found.write_rows(folder / "plan.csv")
    print(f"All figures: {folder}", flush=True)
    return found.best


def cases_of(cfg: DictConfig, workload: Workload, world_size: int) -> list[Case]:
    """Return each strategy with each compressor to predict, and DDP's hooks in any case."""
    strategies = strategies_of(cfg, workload)
    cases = pairs(strategies, workloads_of(cfg, workload, world_size))
    there = {(strategy.name, one.compressor) for strategy, one in cases}
    device = device_of(cfg)
    for strategy in strategies:
        for name in strategy.hooks:
            if (strategy.name, name) not in there:
                hooked = compressed(workload.uncompressed, name, device, world_size)
                cases.append((strategy, hooked))
    # What cannot be run is shown as it is known, unless it was asked for.
    return [
        (strategy, one)
        for strategy, one in cases
        if cfg.strategies is not None
        or not strategy.encodes(one)
        or strategy.overrides_for(one) is not None
    ]
