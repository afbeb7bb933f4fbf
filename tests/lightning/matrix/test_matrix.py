"""Every feature gives under ours what it gives under DDP, in every step, at 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.lightning.matrix.rows import Feature
from tests.lightning.matrix.run import run_row
from tests.lightning.matrix.table import FEATURES

QUICK = (("sgd", 2), ("adamw", 3))
"""One of them runs in every test run, by turns, and all rows of one optimizer; the others are slow.

One rank takes the code that more take, and AdamW on two ranks is in `test_parity.py`.
"""


def _is_quick(number: int, row: Feature, optimizer: str, world_size: int) -> bool:
    others = [one for one in QUICK if one[0] in row.optimizers and one[1] in row.world_sizes]
    if len(row.optimizers) == 1 or not others:
        return True
    return (optimizer, world_size) == others[number % len(others)]


CASES = [
    pytest.param(
        row.name,
        optimizer,
        world_size,
        id=f"{row.name}-{optimizer}-{world_size}",
        marks=() if _is_quick(number, row, optimizer, world_size) else pytest.mark.slow,
    )
    for number, row in enumerate(FEATURES.values())
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
