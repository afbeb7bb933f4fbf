"""MergeComp: nine compressors, up to 3.83x, scaling by up to 99 % (arXiv 2103.15195)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_dear.apps.recipe.mergecomp_cases import Cell, cells, kernel_cells
from lightning_dear.apps.recipe.mergecomp_fit import fitted, models_of
from lightning_dear.apps.recipe.mergecomp_measured import measured_table, said_of_measured
from lightning_dear.apps.recipe.mergecomp_published import FP32, NVLINK
from lightning_dear.apps.recipe.mergecomp_said import said
from lightning_dear.apps.recipe.mergecomp_schemes import LAYERWISE, OURS_SCHEDULED, TWO_GROUPS
from lightning_dear.apps.recipe.mergecomp_tables import (
    by_world_size,
    fits,
    gains,
    kernels,
    of_network,
    published_of,
    unique,
)
from lightning_dear.apps.recipe.pictures import grouped_bars
from lightning_dear.apps.recipe.report import Report, Table
from lightning_dear.apps.recipe.sibling import Row, command_of, measured, measured_on, rows_of
from lightning_dear.apps.recipe.simulated import listed
from lightning_dear.paths import recipes_dir


def make(cfg: DictConfig, recorded: Path, folder: Path) -> Report:
    """Simulate all compressors on all networks, and measure the sibling if asked to.

    Raises:
        ValueError: If the config asks for what does not exist.
    """
    fit = fitted(cfg)
    simulated, varied = list(cells(cfg, fit)), list(kernel_cells(cfg, fit))
    studies = {name: rows_of(recipes_dir() / "compression" / name) for name in cfg.studies}
    siblings = measured(cfg, recorded, folder)
    where = measured_on(folder if cfg.measure else recorded, list(cfg.siblings))
    tables = [
        *([fits(fit, models_of(cfg))] if fit else []),
        *_simulated_tables(cfg, simulated),
        *([kernels(varied)] if varied else []),
        *_studied(cfg, studies),
        *(
            measured_table(rows, name, [], f"`{command_of(cfg.siblings[name])}` on {where}.")
            for name, rows in siblings.items()
        ),
    ]
    return Report(
        [*said(fit, simulated, varied), *said_of_measured({**studies, **siblings})],
        tables,
        _picture(_of_most(simulated)),
        {"simulated": [one.as_row() for one in (*simulated, *varied)]},
    )


def _of_most(simulated: Sequence[Cell]) -> list[Cell]:
    most = max(one.world_size for one in simulated)
    return [one for one in simulated if one.world_size == most]


def _simulated_tables(cfg: DictConfig, simulated: Sequence[Cell]) -> list[Table]:
    of_most = _of_most(simulated)
    tables = [*(of_network(of_most, name) for name in unique(of_most, "network")), gains(of_most)]
    sizes = ", ".join(map(str, unique(simulated, "world_size")))
    pairs = [
        (f"{model} on {sizes} GPUs", [one for one in simulated if one.model == model])
        for model in cfg.all_on_fewer
    ]
    fp16 = [
        one for one in simulated if one.figures_of == NVLINK and one.compressor in ("fp16", FP32)
    ]
    pairs.append((f"FP16 and FP32 over NVLink, {sizes} GPUs", fp16))
    return [*tables, *(by_world_size(own, title) for title, own in pairs if own)]


def _studied(cfg: DictConfig, studies: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Those of the recipe's compressors that were measured before."""
    names = listed(cfg, "compressors")
    return [
        measured_table(rows, name, names, f"Recorded in recipes/compression/{name}.")
        for name, rows in studies.items()
        if rows
    ]


def _picture(cells: Sequence[Cell]) -> object:
    """Bars of all compressors, a panel for each model; of the last network."""
    network = cells[-1].network
    own = [cell for cell in cells if cell.network == network and cell.compressor != FP32]
    panels = {
        f"{model}, {network}, {cells[0].world_size} GPUs": _bars(
            [cell for cell in own if cell.model == model]
        )
        for model in unique(own, "model")
    }
    title = "Scaling factor: published by MergeComp, and simulated"
    return grouped_bars(panels, unique(own, "compressor"), "%", title, 100)


def _bars(cells: Sequence[Cell]) -> dict[str, list[float | None]]:
    pairs = [published_of(cell) or (None, None) for cell in cells]
    return {
        "layer by layer, published": [pair[0] for pair in pairs],
        "layer by layer, simulated": [cell.scaling(LAYERWISE) for cell in cells],
        "scheduled, published": [pair[1] for pair in pairs],
        "scheduled, simulated": [cell.scaling(TWO_GROUPS) for cell in cells],
        "scheduled, ours": [cell.scaling(OURS_SCHEDULED) for cell in cells],
    }
