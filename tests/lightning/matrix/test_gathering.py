"""Every feature again, with gradients gathered instead of parameters, and with all-reduces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.lightning.matrix import local_steps
from tests.lightning.matrix.run import run_row
from tests.lightning.matrix.table import FEATURES

OPTIONS: dict[str, dict[str, Any]] = {
    "gradients": {"gather": "gradients"},
    "all_reduced": {"gather": "gradients", "decouple": False},
}
WORLD_SIZE = 2
QUICK = (
    "accumulation",
    "GradScaler with an overflow on one rank",
    "parameters unused in some steps on some ranks",
    "BackboneFinetuning",
    "changing .grad in on_before_optimizer_step",
    "a step's pre-hooks that read and clip gradients in manual optimisation",
    "an optimizer of its own while accumulating",
)
"""Run in every test run with gathered gradients; the rest is marked slow."""

TWO_OPTIMIZERS = (
    "GradScaler with two optimizers (GAN)",
    "two optimizers with toggle_optimizer (GAN)",
    "two optimizers without toggle_optimizer (GAN)",
    "two optimizers without toggle_optimizer, each backward marked (GAN)",
    "two optimizers that share modules",
    "two optimizers, each clipped",
)
ALONE = ("precision bf16-true", "precision 16-true", *(one.name for one in local_steps.FEATURES))
REFUSED = {**dict.fromkeys(OPTIONS, ALONE), "all_reduced": (*ALONE, *TWO_OPTIMIZERS)}
"""Options -> rows that are refused with them (see `tests.optimizers.test_tensorwise`)."""

CASES = [
    pytest.param(
        name,
        options,
        id=f"{name}-{options}",
        marks=() if options == "gradients" and name in QUICK else pytest.mark.slow,
    )
    for name, row in FEATURES.items()
    for options in OPTIONS
    if WORLD_SIZE in row.world_sizes and name not in REFUSED[options]
]


def _run(name: str, options: str, optimizer: str, folder: Path) -> None:
    row = FEATURES[name]
    run_row(replace(row, strategy={**row.strategy, **OPTIONS[options]}), optimizer, folder)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_row(name: str, options: str, tmp_path: Path) -> None:
    row = FEATURES[name]
    if not row.needs:
        pytest.skip(f"the installed versions lack {name}")
    run_ranks(_run, WORLD_SIZE, name, options, row.optimizers[-1], tmp_path, keeps_ranks=True)
