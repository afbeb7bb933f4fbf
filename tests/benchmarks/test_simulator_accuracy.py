"""What a choice costs: of the simulated steps, and of what dear-plan makes of them."""

from __future__ import annotations

import pytest

from tests.benchmarks.measured_cells import Cell
from tests.benchmarks.simulator_accuracy import Judged, fastest, recommended, regrets


def row(entry: str, measured_s: float, simulated_s: float, world_size: int = 2) -> Judged:
    cell = Cell("resnet50", world_size, 100.0, 16.0, entry)
    return Judged(cell, measured_s, {"ours": simulated_s}, False, None, False)


def test_ddp_stays_where_little_is_to_be_gained() -> None:
    rows = [row("ddp", 1.00, 1.00), row("dear", 1.10, 0.98)]
    assert regrets(rows, fastest) == [pytest.approx(0.1)]
    assert regrets(rows, recommended) == [0]
    rows = [row("ddp", 1.00, 1.00), row("dear", 1.10, 0.96)]
    assert regrets(rows, recommended) == [pytest.approx(0.1)]


def test_only_what_can_be_run_is_recommended_but_all_are_compared_with() -> None:
    rows = [row("ddp_tuned", 0.8, 0.5), row("ddp", 1.0, 1.0), row("dear", 0.9, 0.9)]
    assert recommended(rows).cell.entry == "dear"
    assert regrets(rows, recommended) == [pytest.approx(0.9 / 0.8 - 1)]


def test_points_are_judged_one_by_one() -> None:
    rows = [row("ddp", 1.0, 1.0), row("dear", 0.5, 0.5), row("ddp", 1.0, 0.5, 4)]
    assert regrets([*rows, row("dear", 0.5, 1.0, 4)], fastest) == [0, 1]
