"""Every feature again, with gradients gathered instead of parameters, and with all-reduces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.lightning.matrix.run import run_row
from tests.lightning.matrix.table import FEATURES

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, Any]] = {
    "gradients": {"gather": "gradients"},
    "depth": {"gather": "gradients", "gather_depth": 1},
    "all_reduced": {"gather": "gradients", "decouple": False},
}
WORLD_SIZE = 2


def _run(name: str, options: str, optimizer: str, folder: Path) -> None:
    row = FEATURES[name]
    run_row(replace(row, strategy={**row.strategy, **OPTIONS[options]}), optimizer, folder)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FEATURES)
def test_row(name: str, options: str, tmp_path: Path) -> None:
    row = FEATURES[name]
    if not row.needs:
        pytest.skip(f"the installed versions lack {name}")
    if WORLD_SIZE not in row.world_sizes:
        pytest.skip(f"{name} does not run at {WORLD_SIZE} ranks")
    run_ranks(_run, WORLD_SIZE, name, options, row.optimizers[-1], tmp_path)
