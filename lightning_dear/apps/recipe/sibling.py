"""The small measured sibling of a simulated claim: run again on request, else what was recorded."""

from __future__ import annotations

import csv
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from lightning_dear.emulation import why_unavailable

log = logging.getLogger(__name__)

FOLDER = "measured"
"""Of a recipe: what its siblings have measured, a folder for each."""

KEPT = ("summary.csv", "table.txt", "loss_over_time.csv")
"""What is kept of what a sibling has written."""

MACHINE = "machine.txt"

Row = Mapping[str, str]


def measured(cfg: DictConfig, recorded: Path, folder: Path) -> dict[str, list[Row]]:
    """Measure the recipe's siblings, if `cfg.measure` asks for it; else read what was recorded.

    Blocks while it measures, some minutes each; what they print is shown.

    Args:
        cfg: The recipe's; `cfg.siblings` is name -> program (`bench`, `converge`), overrides.
        recorded: The recipe's folder.
        folder: Of this run; measurements are kept in its folder `measured`.

    Returns:
        Sibling's name -> the rows of its summary; empty where nothing was recorded.

    Raises:
        ValueError: If this machine cannot emulate the network that is measured on.
        RuntimeError: If a sibling fails.
    """
    if cfg.measure:
        if reason := why_unavailable(as_own_root=True):
            raise ValueError(f"measure=true needs an emulated cluster: {reason}")
        for name, sibling in cfg.siblings.items():
            _measure(sibling, folder / FOLDER / str(name))
    source = folder if cfg.measure else recorded
    return {str(name): rows_of(source / FOLDER / str(name)) for name in cfg.siblings}


def command_of(sibling: DictConfig) -> str:
    """Return the command line that measures it, for people."""
    return " ".join([f"dear-{sibling.program}", *map(_quoted, sibling.overrides)])


def _quoted(override: str) -> str:
    return f"'{override}'" if set(override) & set("[]{}() $") else override


def _measure(sibling: DictConfig, folder: Path) -> None:
    log.info("Measuring: %s", command_of(sibling))
    run = folder / "run"
    module = f"lightning_dear.apps.{sibling.program}"
    command = [sys.executable, "-m", module, *sibling.overrides, f"hydra.run.dir={run}"]
    if code := subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"{command_of(sibling)} ended with {code}; what it printed is above.")
    for name in KEPT:
        if (run / name).is_file():
            (run / name).rename(folder / name)
    (folder / MACHINE).write_text(f"{machine()}\n")


def machine() -> str:
    """Return in a line what this machine is, for beside figures that were measured on it."""
    return (
        f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()},"
        f" torch {torch.__version__}"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of a folder's `summary.csv`; none if there is no such file."""
    path = folder / "summary.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measured_on(folder: Path, names: Sequence[Any]) -> str:
    """Return which machines the siblings were measured on."""
    files = [folder / FOLDER / str(name) / MACHINE for name in names]
    return "; ".join(dict.fromkeys(file.read_text().strip() for file in files if file.is_file()))
