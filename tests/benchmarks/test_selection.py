"""The benchmark of Ok-Topk's selection: a small one of real numbers, and what it complains of."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks import selection as benchmark
from tests.benchmarks.selection import Repeat, Row, Step, complaints, main

LIMITED = Row("normal", 0.01, "reused")
ROWS = [
    Row(kind, density, threshold)
    for kind in ("normal", "heavy-tailed")
    for density in (0.01, 0.001)
    for threshold in ("reused", "exact")
]
SMALL = ["--numel", "20000", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _repeats(row: Row, num_found: int, times_faster: float) -> list[Repeat]:
    """Three of k = 3000, of which the median is this many times faster."""
    return [
        Repeat(*row, 300_000, 3000, num_found, factor * topk_s / times_faster, topk_s)
        for factor, topk_s in ((1.0, 0.5), (0.1, 0.2), (9.0, 3.0))
    ]


def test_all_rows_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--raw", str(tmp_path / "raw.csv")])
    head, *lines, foot = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "input density threshold count / k ms topk ms times faster"
    assert [line.split()[:3] for line in lines] == [[k, f"{d:g}", t] for k, d, t in ROWS]
    for line in lines:
        of_k, *speeds = map(float, line.split()[3:])
        assert of_k == 1.0 or ("reused" in line and 2 / 3 <= of_k <= 4 / 3)
        assert len(speeds) == 3
    assert foot == "20,000 numbers, median of 2"
    with (tmp_path / "raw.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert list(kept[0]) == list(Repeat._fields)
    assert len(kept) == 2 * len(ROWS)
    assert all(float(each["seconds"]) > 0 and float(each["topk_s"]) > 0 for each in kept)
    assert {(each["density"], each["k"]) for each in kept} == {("0.01", "200"), ("0.001", "20")}


def test_the_check_fails_and_names_the_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "LEAST_TIMES_FASTER", {LIMITED: 0.0})
    main([*SMALL, "--check"])
    monkeypatch.setattr(benchmark, "LEAST_TIMES_FASTER", {LIMITED: 1e9})
    message = r"^normal input, 0.01 of the numbers, reused threshold: .* less than 1e\+09\.$"
    capsys.readouterr()
    with pytest.raises(SystemExit, match=message):
        main([*SMALL, "--check", "--raw", str(tmp_path / "raw.csv")])
    # What was measured is told and kept all the same.
    assert "times faster" in capsys.readouterr().out
    assert (tmp_path / "raw.csv").exists()


@pytest.mark.parametrize(
    ("row", "num_found", "times_faster", "message"),
    [
        (LIMITED, 3000, 3.01, ""),
        (LIMITED, 3000, 2.99, "2.99 times faster than topk, less than 3."),
        (LIMITED._replace(threshold="exact"), 3000, 0.5, ""),
        (LIMITED._replace(kind="heavy-tailed"), 3000, 0.5, ""),
        (LIMITED._replace(density=0.001), 3000, 0.5, ""),
        (LIMITED, 2000, 4.0, ""),
        (LIMITED, 4000, 4.0, ""),
        (LIMITED, 1999, 4.0, "finds 0.666 k numbers, not 0.667 to 1.333 k."),
        (LIMITED._replace(kind="heavy-tailed"), 4002, 4.0, "finds 1.334 k numbers"),
    ],
)
def test_what_it_complains_of(row: Row, num_found: int, times_faster: float, message: str) -> None:
    said = complaints(_repeats(row, num_found, times_faster))
    assert len(said) == bool(message)
    assert all(sentence.startswith(f"{row.label}: {message}") for sentence in said)


def test_each_selection_begins_with_the_same_numbers() -> None:
    first, second = (list(Step("normal", 50_000).measure(0.01, n)) for n in (1, 3))
    counts = {each.threshold: each.num_found for each in first}
    assert counts["exact"] == 500 != counts["reused"]
    assert all(each.num_found == counts[each.threshold] for each in second)


@pytest.mark.parametrize("option", ["--numel", "--repeats"])
def test_arguments_that_cannot_be(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option, "0"])
    assert ended.value.code == 2
    assert f"{option} must be at least 1, got 0." in capsys.readouterr().err


def test_help_names_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{LIMITED.label}: 3; or where the count is not 0.667 to 1.333 k" in said
