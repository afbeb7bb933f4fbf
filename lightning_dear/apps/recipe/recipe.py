"""``dear-recipe NAME``: a published claim run again, with its table, its picture and its README."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.apps.recipe.report import Report, with_section, write_report
from lightning_dear.apps.recipe.sibling import FOLDER
from lightning_dear.names import is_meant
from lightning_dear.paths import conf_dir, is_checkout, recipes_dir

RECIPES = {
    "dear_64gpu": "DeAR on 64 GPUs: five models, 10 Gb/s Ethernet and 100 Gb/s InfiniBand",
    "dear_fusion": "how tensors are fused: none, fixed caps, searched, MG-WFBP's rule, exact",
    "oktopk_bert256": "Ok-Topk on 256 GPUs: BERT, VGG-16 and an LSTM, volumes and times",
    "mergecomp_scaling": "nine compressors, layer by layer and scheduled, on 2 to 8 GPUs",
    "convergence": "loss over time on a slow network, dense and compressed",
}
"""Name -> what it compares."""

USAGE = (
    "dear-recipe NAME [measure=true] [OPTION=VALUE ...]\n\nOptions are those of the recipe's config"
    " (conf/recipe/NAME.yaml; dear-recipe NAME --cfg job shows it):\n"
    "cluster=, models=, baselines=, ..."
)


def reproduce(cfg: DictConfig, folder: Path) -> Report:
    """Run a recipe; print what comes out and write it.

    In a checkout the recipe's own folder is written, too, if nothing of its config was changed.

    Args:
        cfg: A config of ``conf/recipe``.
        folder: The run's.

    Raises:
        ValueError: If the config asks for what does not exist.
    """
    recorded = recipes_dir() / str(cfg.name)
    readme = (recorded / "README.md").read_text()
    # A page without room for it is to be known before minutes of measuring.
    with_section(readme, "")
    make: Callable[[DictConfig, Path, Path], Report]
    make = import_module(f"lightning_dear.apps.recipe.{cfg.name}").make
    report = make(cfg, recorded, folder)
    write_report(report, str(cfg.name), folder, readme)
    print(report.as_text(), flush=True)
    print(f"\nTables, figures, picture and README: {folder}", flush=True)
    if _is_ours(recorded):
        write_report(report, str(cfg.name), recorded, readme)
        if cfg.measure:
            _replace_measured(folder / FOLDER, recorded / FOLDER)
        print(f"Written as well: {recorded}", flush=True)
    return report


def _is_ours(recorded: Path) -> bool:
    """Whether this is the recipe as it is recorded, in a checkout that can be written."""
    changed = [one for one in HydraConfig.get().overrides.task if not one.startswith("measure=")]
    return is_checkout() and not changed and os.access(recorded, os.W_OK)


def _replace_measured(new: Path, recorded: Path) -> None:
    for path in new.rglob("*"):
        if path.is_file() and "run" not in path.relative_to(new).parts:
            target = recorded / path.relative_to(new)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def main() -> None:
    """``dear-recipe NAME``; without a name the names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in RECIPES:
        names = "\n".join(f"  {one:<18} {what}" for one, what in RECIPES.items())
        asks = name in ("", "-h", "--help")
        unknown = "" if asks else f"Unknown recipe {name!r}.{is_meant(name, RECIPES)}\n"
        print(f"{unknown}{USAGE}\n\nNAME is one of\n{names}", file=sys.stderr if unknown else None)
        raise SystemExit(bool(unknown))
    sys.argv[1:2] = [f"--config-name=recipe/{name}"]
    recipe_job()


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=None)
def recipe_job(cfg: DictConfig) -> None:
    """Run one recipe."""
    with job.one_message("dear-recipe"):
        reproduce(cfg, job.folder_with(cfg))


if __name__ == "__main__":
    main()
