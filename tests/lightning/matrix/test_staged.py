"""Every feature has the bits of plain gloo where all that travels is copied, as on a device.

Device and host are both the host's memory here; copies and threads are real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.rank import RANKS_A_HOST, staged
from tests.lightning.matrix.run import ours, run_one
from tests.lightning.matrix.seen import compare
from tests.lightning.matrix.table import FEATURES

LAYOUTS = {"2": (2, 1), "3": (3, 1), "2x2": (4, 2)}
"""Name -> number of ranks, and how many of them share a host."""

CASES = [
    pytest.param(
        row.name,
        layout,
        id=f"{row.name}-{layout}",
        marks=() if (number + turn) % 24 == 0 else pytest.mark.slow,
    )
    for number, row in enumerate(FEATURES.values())
    for turn, layout in enumerate(LAYOUTS)
    if min(3, LAYOUTS[layout][0]) in row.world_sizes
]


def _run(name: str, folder: Path) -> None:
    row = FEATURES[name]
    optimizer = row.optimizers[0]
    plain = run_one(row, ours(row), row.net, optimizer, folder / "plain")
    with staged():
        copied = run_one(row, ours(row), row.net, optimizer, folder / "staged")
    assert copied.num_steps == plain.num_steps
    assert set(copied.series) == set(plain.series)
    for series, entries in plain.series.items():
        compare(copied.series[series], entries, 0, f"{name}: {series}")


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_row(name: str, layout: str, tmp_path: Path) -> None:
    if not FEATURES[name].needs:
        pytest.skip(f"the installed versions lack {name}")
    size, ranks_a_host = LAYOUTS[layout]
    env = {RANKS_A_HOST: str(ranks_a_host)} if ranks_a_host > 1 else None
    run_ranks(_run, size, name, tmp_path, keeps_ranks=True, env=env)
