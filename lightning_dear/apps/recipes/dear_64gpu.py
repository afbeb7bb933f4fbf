"""DeAR's headline: up to 83 % and 15 % over the state of the art on 64 GPUs (arXiv 2302.12445)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_dear.apps.recipes.pictures import grouped_bars
from lightning_dear.apps.recipes.report import Report, Table
from lightning_dear.apps.recipes.sibling import command_of, measured, measured_on
from lightning_dear.apps.recipes.simulated import (
    Cell,
    listed,
    networks_of,
    simulated,
    strategies_of,
    workloads_of,
)
from lightning_dear.apps.recipes.steps import measured_steps
from lightning_dear.simulator import Network

PUBLISHED = {"ethernet": 83, "infiniband": 15}
"""Word in a cluster's name -> per cent that DeAR gains at most, by the paper's abstract."""


COMPARED = ("wfbp", "ddp", "horovod", "mgwfbp", "bytescheduler")
"""What the paper compares with, of our strategies."""


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Simulate all models on all clusters, and measure the sibling if asked to."""
    networks = networks_of(cfg, cfg.world_size)
    cells = list(simulated(workloads_of(cfg), networks, strategies_of(cfg)))
    siblings = measured(cfg, recorded, folder)
    baselines, ours = listed(cfg, "baselines"), listed(cfg, "ours")
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    tables = [
        _gains(cells, baselines, ours),
        _by_speed(cfg, networks),
        _steps(cells, [*baselines, *ours]),
        *(
            measured_steps(rows, "ddp", f"`{command_of(cfg.siblings[name])}` on {where}.")
            for name, rows in siblings.items()
        ),
    ]
    summary = [_said(name, list(of), baselines, ours) for name, of in _by_cluster(cells)]
    return Report(
        summary, tables, _picture(cells, ours), {"simulated": [c.as_row() for c in cells]}
    )


def _by_cluster(cells: Sequence[Cell]) -> groupby[str, Cell]:
    return groupby(cells, key=lambda cell: cell.cluster)


def _step_s(cells: Sequence[Cell], model: str, name: str) -> float:
    return next(cell.step_s for cell in cells if (cell.model, cell.name) == (model, name))


def _models(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.model for cell in cells))


def _gain(cells: Sequence[Cell], model: str, name: str, others: Sequence[str]) -> float:
    """In per cent, over the best of `others`."""
    best_s = min(_step_s(cells, model, other) for other in others)
    return 100 * (best_s / _step_s(cells, model, name) - 1)


def _said(
    cluster: str, cells: Sequence[Cell], baselines: Sequence[str], ours: Sequence[str]
) -> str:
    published = next((most for word, most in PUBLISHED.items() if word in cluster), None)
    beside = "" if published is None else f" (published for DeAR: up to {published} %)"
    parts = []
    for name in ours:
        over_best = [_gain(cells, model, name, baselines) for model in _models(cells)]
        known = [other for other in baselines if other in COMPARED] or baselines
        most, model, other = max(
            (_gain(cells, model, name, [other]), model, other)
            for model in _models(cells)
            for other in known
        )
        parts.append(
            f"`{name}` {min(over_best):+.0f} to {max(over_best):+.0f} % over the best baseline of"
            f" each model, at most {most:+.0f} % over one that the paper has ({other}, {model})"
        )
    return f"Simulated on `{cluster}`{beside}: {'; '.join(parts)}."


def _gains(cells: Sequence[Cell], baselines: Sequence[str], ours: Sequence[str]) -> Table:
    rows = []
    for cluster, of in _by_cluster(cells):
        own = list(of)
        for model in _models(own):
            best = min(baselines, key=lambda name: _step_s(own, model, name))
            gains = [f"{_gain(own, model, name, baselines):+.1f} %" for name in ours]
            rows.append([cluster, model, best, *gains])
    return Table(
        "simulated",
        "what ours gain over the best baseline",
        ["cluster", "model", "best baseline", *ours],
        rows,
    )


def _by_speed(cfg: DictConfig, networks: dict[str, Network]) -> Table:
    """What is gained over the best baseline of each model, where computing takes other times."""
    strategies = [one for one in strategies_of(cfg) if not one.searches]
    baselines = [name for name in listed(cfg, "baselines") if name in {s.name for s in strategies}]
    ours = [one.name for one in strategies if one.name not in baselines]
    rows = []
    for factor in cfg.compute_factors:
        sized = OmegaConf.merge(cfg, {"compute_factor": factor})
        for cluster, of in _by_cluster(list(simulated(workloads_of(sized), networks, strategies))):
            own = list(of)
            gains = [
                [_gain(own, model, name, baselines) for model in _models(own)] for name in ours
            ]
            spans = [f"{min(of_name):+.1f} to {max(of_name):+.1f} %" for of_name in gains]
            rows.append([cluster, f"{factor:g}", *spans])
    return Table(
        "simulated",
        "the same where computing takes so many times as long; least and most of all models",
        ["cluster", "times", *ours],
        sorted(rows, key=lambda row: list(networks).index(row[0])),
    )


def _steps(cells: Sequence[Cell], names: Sequence[str]) -> Table:
    rows = []
    for cluster, of in _by_cluster(cells):
        own = list(of)
        for model in _models(own):
            alone_s = next(cell.alone_s for cell in own if cell.model == model)
            steps = [f"{1e3 * _step_s(own, model, name):.0f}" for name in names]
            rows.append([cluster, model, f"{1e3 * alone_s:.0f}", *steps])
    return Table("simulated", "step, ms", ["cluster", "model", "one rank", *names], rows)


def _picture(cells: Sequence[Cell], ours: Sequence[str]) -> object:
    models = _models(cells)
    panels = {}
    for cluster, of in _by_cluster(cells):
        own = list(of)
        names = sorted({cell.name for cell in own}, key=lambda name: (name in ours, name))
        panels[cluster] = {
            name: [
                next(c.alone_s for c in own if c.model == model) / _step_s(own, model, name) * 100
                for model in models
            ]
            for name in names
        }
    title = "One rank's step over this step, simulated"
    return grouped_bars(panels, models, "%", title, 100)
