"""Every feature gives under ours what it gives under DDP, in every step, at 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.lightning.matrix.run import run_row
from tests.lightning.matrix.table import FEATURES

QUICK = {("sgd", 2), ("adamw", 3)}
"""What runs in every test run, beside rows of one optimizer; the others are marked slow.

One rank takes the code that more take, and AdamW on two ranks is in `test_parity.py`.
"""

CASES = [
    pytest.param(
        row.name,
        optimizer,
        world_size,
        id=f"{row.name}-{optimizer}-{world_size}",
        marks=()
        if (optimizer, world_size) in QUICK or len(row.optimizers) == 1
        else pytest.mark.slow,
    )
    for row in FEATURES.values()
    for optimizer in row.optimizers
    for world_size in row.world_sizes
]


def _run(name: str, optimizer: str, folder: Path) -> None:
    run_row(FEATURES[name], optimizer, folder)


@pytest.mark.parametrize(("name", "optimizer", "world_size"), CASES)
def test_row(name: str, optimizer: str, world_size: int, tmp_path: Path) -> None:
    if not FEATURES[name].needs:
        pytest.skip(f"the installed versions lack {name}")
    run_ranks(_run, world_size, name, optimizer, tmp_path, keeps_ranks=True)
