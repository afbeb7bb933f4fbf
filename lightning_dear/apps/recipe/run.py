"""One run of a recipe: computes its claims, prints and writes them.

A recipe is a folder with a `make.py`, whose `make(cfg, siblings)` returns a `Report`. It imports
files beside it as `from . import NAME`. Its siblings are small measurements on emulated hosts.
They are repeated only with `measure=true`.
"""

import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from shlex import quote
from types import ModuleType

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dear.apps import job
from lightning_dear.apps.program import Program
from lightning_dear.apps.recipe.report import Report, Sibling, compared
from lightning_dear.emulation import why_unavailable
from lightning_dear.paths import recipes_dir
from lightning_dear.studies.files import read_rows

MEASURED = "measured"
"""Folder with the measurements of a recipe's siblings, one folder for each sibling."""

_KEPT = ("summary.csv", "loss_over_time.csv")


def load(name: str) -> ModuleType:
    """Import the `make.py` of a recipe, from a checkout or from an installed wheel.

    Raises:
        ModuleNotFoundError: If the recipe does not exist.
    """
    package = ModuleType(f"recipe_{name}")
    package.__path__ = [str(recipes_dir() / name)]
    sys.modules[package.__name__] = package
    return import_module(f"{package.__name__}.make")


def run_job(cfg: DictConfig, program: Program) -> None:
    """Run a recipe; print its report and write it into the job's folder. Blocks.

    Args:
        cfg: Config composed from ``conf/recipe``; `measure` says whether to measure siblings first.
        program: Program that runs this job.

    Raises:
        ValueError: If the config names something unknown, or this machine cannot emulate hosts.
        RuntimeError: If a sibling fails.
    """
    folder, name = job.folder_with(cfg), str(cfg.name)
    recorded = recipes_dir() / name
    if cfg.measure:
        measure(cfg, folder)
    report: Report = load(name).make(cfg, siblings_of(cfg, folder if cfg.measure else recorded))
    report.write(name, folder)
    print(report.as_text())
    if all(word.startswith("measure=") for word in HydraConfig.get().overrides.task):
        # Only without other options can the figures equal the recorded ones.
        print(compared(report.summary, read_rows(recorded / "summary.csv")))
    print(f"Claims, figures and picture: {folder}", flush=True)


# --- siblings -------------------------------------------------------------------------------------


def siblings_of(cfg: DictConfig, source: Path) -> dict[str, Sibling]:
    """Return name -> sibling of the recipe, with its folder in `source`."""
    return {str(name): Sibling(source / MEASURED / str(name)) for name in cfg.siblings}


def command_of(sibling: DictConfig) -> str:
    """Return the command line that measures a sibling, for people."""
    return " ".join([f"dear-{sibling.program}", *map(quote, sibling.overrides)])


def measure(cfg: DictConfig, folder: Path) -> None:
    """Measure all siblings of a recipe into `folder`, and show their output. Blocks for minutes.

    Raises:
        ValueError: If this machine cannot emulate hosts.
        RuntimeError: If a sibling fails.
    """
    if reason := why_unavailable(as_own_root=True):
        raise ValueError(f"measure=true needs an emulated cluster: {reason}. Or leave measure out.")
    for name, sibling in cfg.siblings.items():
        words = command_of(sibling)
        print(f"Measuring: {words}", flush=True)
        kept = folder / MEASURED / str(name)
        program, run = f"lightning_dear.apps.{sibling.program}", kept / "run"
        command = [sys.executable, "-m", program, *sibling.overrides, f"hydra.run.dir={run}"]
        if code := job.run_child(command):
            raise RuntimeError(f"{words} ended with code {code}. Mend the error printed above.")
        for one in _KEPT:
            if (run / one).is_file():
                (run / one).rename(kept / one)
        (kept / "machine.txt").write_text(f"{_machine()}\n")


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{processor}, {os.cpu_count()} cores; {versions}"
