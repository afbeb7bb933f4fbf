"""DeAR's headline: up to 83 % and 15 % over the state of the art on 64 GPUs (arXiv 2302.12445)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.apps.recipe.pictures import grouped_bars
from lightning_dear.apps.recipe.report import Report, Table
from lightning_dear.apps.recipe.sibling import command_of, measured, measured_on
from lightning_dear.apps.recipe.simulated import (
    Cell,
    listed,
    networks_of,
    simulated,
    strategies_of,
    workload_of,
    workloads_of,
)
from lightning_dear.apps.recipe.steps import measured_steps
from lightning_dear.simulator import Network
from lightning_dear.workloads.replay.profile import load_profile

PUBLISHED = {
    "ethernet_10g": 83,
    "dear_ethernet": 83,
    "infiniband_100g": 15,
    "dear_infiniband": 15,
}
"""Cluster -> per cent that DeAR gains at most on 64 of its GPUs, by the paper's abstract."""

COMPARED = ("wfbp", "ddp", "horovod", "mgwfbp", "bytescheduler")
"""What the paper compares with, of our strategies."""


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Simulate all models on all clusters, and measure the siblings if asked to.

    Raises:
        ValueError: If the config names what does not exist, or nothing to compare with.
    """
    baselines, ours = listed(cfg, "baselines"), listed(cfg, "ours")
    networks = networks_of(cfg, cfg.world_size)
    cells = list(simulated(workloads_of(cfg), networks, strategies_of(cfg)))
    siblings = measured(cfg, recorded, folder)
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    tables = [
        _gains(cells, baselines, ours),
        *_by_speed(cfg, networks),
        _steps(cells, [*baselines, *ours]),
        *(
            measured_steps(rows, "ddp", f"`{command_of(cfg.siblings[name])}` on {where}.")
            for name, rows in siblings.items()
        ),
    ]
    published = {} if cfg.get("cluster") is not None or cfg.world_size != 64 else PUBLISHED
    summary = [
        sentence
        for name, of in _by_cluster(cells)
        for sentence in _said(name, list(of), baselines, ours, published.get(name))
    ]
    return Report(
        summary, tables, _picture(cells, ours), {"simulated": [c.as_row() for c in cells]}
    )


def theirs(baselines: Sequence[str]) -> list[str]:
    """Return those that the paper has; all, if it has none of them."""
    return [name for name in baselines if name in COMPARED] or list(baselines)


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
    cluster: str,
    cells: Sequence[Cell],
    baselines: Sequence[str],
    ours: Sequence[str],
    published: int | None,
) -> Iterator[str]:
    known, models = theirs(baselines), _models(cells)
    parts = []
    for name in ours:
        best = [_gain(cells, model, name, known) for model in models]
        parts.append(f"`{name}` {min(best):+.0f} to {max(best):+.0f} %")
    beside = "" if published is None else f" (published for DeAR: up to {published} %)"
    yield (
        f"Simulated on `{cluster}`{beside}, over the best of {', '.join(known)} for each model:"
        f" {'; '.join(parts)}."
    )
    most, model, other, name = max(
        (_gain(cells, model, name, [other]), model, other, name)
        for model in models
        for other in known
        for name in ours
    )
    yield f"The most over any one of these there: {most:+.0f} % (`{name}` over {other}, {model})."


def _gains(cells: Sequence[Cell], baselines: Sequence[str], ours: Sequence[str]) -> Table:
    known = theirs(baselines)
    rows = []
    for cluster, of in _by_cluster(cells):
        own = list(of)
        for model in _models(own):
            best = min(known, key=lambda name: _step_s(own, model, name))
            gains = [
                f"{_gain(own, model, name, known):+.1f} / {_gain(own, model, name, baselines):+.1f}"
                for name in ours
            ]
            rows.append([cluster, model, best, *gains])
    return Table(
        "simulated",
        "gains in % over the best baseline that the paper has / over the best of all here",
        ["cluster", "model", "best of the paper's", *ours],
        rows,
        "`fsdp2` differs from `dear_paper` here by its buckets alone, which are units of whole"
        " modules, as optimizers take no time in these profiles: it gathers parameters instead of"
        " gradients.",
    )


def _by_speed(cfg: DictConfig, networks: dict[str, Network]) -> Iterator[Table]:
    """What is gained over the paper's baselines where computing takes other times."""
    strategies = [one for one in strategies_of(cfg) if not one.searches]
    names = [one.name for one in strategies]
    known = theirs([name for name in listed(cfg, "baselines") if name in names])
    ours = [name for name in listed(cfg, "ours") if name in names]
    if not known or not ours:
        return
    rows = []
    for factor in cfg.compute_factors:
        models = [workload_of(load_profile(name), float(factor)) for name in listed(cfg, "models")]
        for cluster, of in _by_cluster(list(simulated(models, networks, strategies))):
            own = list(of)
            gains = [[_gain(own, model, name, known) for model in _models(own)] for name in ours]
            spans = [f"{min(of_name):+.1f} to {max(of_name):+.1f}" for of_name in gains]
            rows.append([cluster, f"{factor:g}", *spans])
    yield Table(
        "simulated",
        "gains in % over the best of the paper's, least and most of all models, where computing"
        " takes so many times as long as the profiles say",
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
