"""Ours beside torch's model of NCCL: all cases are told, and what holds of the two together.

Starts agree to the last digit where torch's model has the same formula: trees, and rings in one
node. Over nodes torch has floors for hops within one. At 256 MiB the two are within a factor of 2.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import nccl_cross_check as benchmark
from tests.benchmarks.nccl_cross_check import (
    COLLECTIVES,
    NUM_GPUS,
    SIZES,
    Algorithm,
    Case,
    NoModelError,
    Row,
    Way,
    main,
    ours_us,
    table,
    torch_model,
    torch_us,
)

LARGE = max(SIZES)
EXACTLY = 1e-9


@pytest.fixture
def model() -> Iterator[Any]:
    """torch's; without one there is nothing to test."""
    try:
        with torch_model() as entered:
            yield entered
    except NoModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def rows(model: Any) -> list[Row]:
    return table()


def _starts_us(model: Any, num_gpus: int, algorithm: Algorithm) -> tuple[float, float]:
    """Of an all-reduce of no bytes, by torch without its base latency, and by ours."""
    case, way = Case("all_reduce", num_gpus, 0), Way(algorithm, "SIMPLE")
    said = torch_us(model, case, way)
    assert said is not None
    base_us = model.baseLat[model.NCCL_ALGO[algorithm.upper()]][model.NCCL_PROTO.SIMPLE]
    return said - base_us, ours_us(model, case, way)


def test_torch_takes_what_it_says_itself(model: Any, rows: list[Row]) -> None:
    for row in rows:
        collective = model.NCCL_COLL[row.collective.upper()]
        estimate_ms = model.estimate_nccl_collective_runtime_impl(
            row.nbytes, row.num_gpus, collective
        )
        assert row.torch_us == pytest.approx(estimate_ms * 1e3, rel=EXACTLY)


def test_both_grow_with_the_size(rows: list[Row]) -> None:
    for collective, num_gpus in product(COLLECTIVES, NUM_GPUS):
        of_sizes = [row for row in rows if row[:2] == (collective, num_gpus)]
        assert [row.nbytes for row in of_sizes] == sorted(SIZES)
        for name in ("torch_us", "ours_us", "best_us"):
            values = [getattr(row, name) for row in of_sizes]
            assert values == sorted(set(values)), name


def test_large_messages_are_within_a_factor_of_2(rows: list[Row]) -> None:
    ratios = [row.ratio for row in rows if row.nbytes == LARGE]
    assert len(ratios) == len(COLLECTIVES) * len(NUM_GPUS)
    assert all(0.5 < ratio < 2 for ratio in ratios)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_in_one_node_a_ring_differs_by_the_base_latency_only(model: Any, collective: Any) -> None:
    case, way = Case(collective, 8, LARGE), Way("ring", "SIMPLE")
    base_us = model.baseLat[model.NCCL_ALGO.RING][model.NCCL_PROTO.SIMPLE]
    expected = ours_us(model, case, way) + base_us
    assert torch_us(model, case, way) == pytest.approx(expected, rel=EXACTLY)


@pytest.mark.parametrize("num_gpus", NUM_GPUS)
def test_trees_start_as_torchs_do(model: Any, num_gpus: int) -> None:
    said, ours = _starts_us(model, num_gpus, "tree")
    assert ours == pytest.approx(said, rel=EXACTLY)


@pytest.mark.parametrize("num_gpus", NUM_GPUS)
def test_a_rings_starts_add_up_as_torchs_do_but_for_its_floors(model: Any, num_gpus: int) -> None:
    said, ours = _starts_us(model, num_gpus, "ring")
    assert said / 3 <= ours <= said * (1 + EXACTLY)


def test_all_rows_are_told_and_kept(
    rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--csv", str(tmp_path / "rows.csv")])
    lines = capsys.readouterr().out.splitlines()
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:-4]]
    assert [cells[:3] for cells in told] == [
        [collective, str(num_gpus), SIZES[nbytes]]
        for collective, num_gpus, nbytes in product(COLLECTIVES, NUM_GPUS, SIZES)
    ]
    assert [float(cells[6]) for cells in told] == [
        pytest.approx(row.ratio, abs=0.01) for row in rows
    ]
    assert [line.partition(":")[0] for line in lines[-3:]] == list(COLLECTIVES)
    with (tmp_path / "rows.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [float(each["ours_us"]) for each in kept] == [row.ours_us for row in rows]


def test_torch_is_as_it_was_afterwards(model: Any) -> None:
    inside = model.get_gpu_type
    with torch_model():
        assert model.get_gpu_type is not inside
    assert model.get_gpu_type is inside


def test_another_torch_is_named_with_what_it_lacks(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(model, "hwLat")
    with pytest.raises(NoModelError, match=r"of torch 2\S+ has no hwLat; 2\.13's has\.$"):
        table()
    monkeypatch.setattr(benchmark, "MODULE", "torch._inductor.no_such_module")
    with pytest.raises(NoModelError, match=r"has no torch\._inductor\.no_such_module\.$"):
        table()
