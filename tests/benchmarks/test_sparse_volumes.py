"""The benchmark of what sparse all-reduces send: a small one, and what it complains of."""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import pytest
import torch

from tests.benchmarks import sparse_volumes as benchmark
from tests.benchmarks.given_gradients import GIVEN, Place
from tests.benchmarks.sparse_volumes import Case, Step, bound_of, complaints, k_of, main
from tests.benchmarks.volumes import METADATA, OTHER, PAYLOAD, Bucket, Sent

CASE = Case("oktopk", "skewed", 2, 0.01)
SMALL = ["--ranks", "2", "--densities", "0.01", "--gradients", "skewed"]
SMALL += ["--numel", "20000", "--steps", "4"]


def _steps(payload: int, metadata: int, k: int = 10_000, case: Case = CASE) -> list[Step]:
    """Two, of which the second is larger."""
    sizes = (payload // 2, 0), (payload // 2, payload)
    return [
        Step(*case, number, k, sent, received, metadata, 240_000.0)
        for number, (sent, received) in enumerate(sizes)
    ]


def test_all_rows_are_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [*SMALL, "--compressors", "oktopk", "topka", "--raw", str(tmp_path / "raw.csv"), "--check"]
    )
    head, *lines, meaning, foot = capsys.readouterr().out.splitlines()
    names = "compressor gradients ranks density k median largest bytes metadata over"
    assert head.split() == names.split()
    cells = [line.split() for line in lines]
    assert [each[:5] for each in cells] == [
        ["oktopk", "skewed", "2", "0.01", "200"],
        ["topka", "skewed", "2", "0.01", "200"],
    ]
    # In its first step TopkA sends exactly 200 numbers and places, and a head.
    assert cells[1][6:] == ["100.0%", "1,600", cells[1][8], "0"]
    assert meaning.startswith("median, largest: ")
    assert foot == "8 steps, in 0 of them k is at least 10,000"
    with (tmp_path / "raw.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert list(kept[0]) == list(Step._fields)
    assert [int(each["step"]) for each in kept] == [*range(4), *range(4)]
    assert {(each["k"], float(each["bound"])) for each in kept[:4]} == {("200", 2400.0)}
    assert {(each["metadata"], float(each["bound"])) for each in kept[4:]} == {("4", 1600.0)}
    assert all(0 < int(each["sent"]) <= float(each["bound"]) for each in kept)
    most = max(int(each[way]) for each in kept[:4] for way in ("sent", "received"))
    assert cells[0][7] == f"{most:,}"


def test_the_check_fails_and_names_the_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "bound_of", lambda case, buckets: 1000.0)
    message = re.escape(f"{CASE.label}: 4 of 4 steps above the bound, up to ")
    with pytest.raises(SystemExit, match=rf"^{message}[\d.]+%\.$"):
        main([*SMALL, "--compressors", "oktopk", "--check", "--raw", str(tmp_path / "raw.csv")])
    # What was measured is told and kept all the same.
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "4"
    assert len((tmp_path / "raw.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("payload", "metadata", "k", "message"),
    [
        (240_000, 6_000, 10_000, ""),
        (240_002, 6_000, 10_000, "1 of 2 steps above the bound, up to 100.0%."),
        (200_000, 5_002, 10_000, "metadata of 5.00% of the payload, more than 5%."),
        (200_000, 5_002, 9_999, ""),
        (0, 100, 10_000, ""),
    ],
)
def test_what_it_complains_of(payload: int, metadata: int, k: int, message: str) -> None:
    said = complaints(CASE, _steps(payload, metadata, k))
    assert said == [f"{CASE.label}: {message}"] * bool(message)
    other = CASE._replace(compressor="topka")
    assert not complaints(other, _steps(payload, metadata, k, other))


@pytest.mark.parametrize(
    ("compressor", "k", "words"),
    [
        # One bucket of 1,000 numbers, and one of 70 that is padded to 128.
        ("oktopk", 20, (6 * 20 + 2 * 128) / 2),
        ("topka", 20, 2 * 20 + 128),
        ("topkdsa", 20, (2 * 20 + 1000) / 2 + 128),
        ("gtopk", 20, 2 * 20 + 128),
        ("none", 0, 1024 + 128),
    ],
)
def test_bounds_are_those_of_the_formulas(compressor: str, k: int, words: float) -> None:
    case, buckets = Case(compressor, "zeros", 2, 0.02), [Bucket(1000, 1024), Bucket(70, 128)]
    assert k_of(case, buckets) == k
    assert bound_of(case, buckets) == 4 * words


def test_the_rank_with_most_of_either_direction_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torch.zeros((3, 2, 3, 3), dtype=torch.int64)
    tables[0, 0, PAYLOAD] = torch.tensor([0, 70, 20])
    tables[2, 0, PAYLOAD] = torch.tensor([5, 30, 0])
    tables[1, 1, PAYLOAD] = torch.tensor([40, 0, 50])
    tables[1, 1, METADATA] = torch.tensor([4, 0, 3])
    tables[:, :, OTHER] = 999
    results = [Sent(table, [Bucket(1000, 1152)], "same") for table in tables]
    monkeypatch.setattr(benchmark, "run_ranks", lambda *args, **options: results)
    options = argparse.Namespace(numel=1000, steps=2, hosts="local")
    first, second = benchmark.measure(CASE._replace(num_ranks=3), options)
    assert (first.sent, first.received, first.payload, first.metadata) == (0, 100, 100, 0)
    assert (second.sent, second.received, second.payload, second.metadata) == (90, 0, 90, 7)
    results[1] = results[1]._replace(digest="another")
    with pytest.raises(AssertionError, match="ranks end with different weights"):
        benchmark.measure(CASE, options)


def test_given_gradients_are_what_they_are_called() -> None:
    made = {
        name: [make(20_000, Place(rank, 3, 5)) for rank in range(3)] for name, make in GIVEN.items()
    }
    assert not any(one.any() for one in [*made["zeros"], *made["one_rank"][:2]])
    assert made["one_rank"][2].all()
    assert all((one.abs() == 1.0).all() for one in made["ties"])
    for one in made["skewed"]:
        places = one.abs().topk(100).indices
        assert places.max() - places.min() < 200
    assert not torch.equal(*made["skewed"][:2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 2 1", "--ranks must be at least 2, got [2, 1]."),
        ("--steps 0", "--steps must be at least 1, got 0."),
        ("--densities 0", "--densities must be in (0, 1], got [0.0]."),
        ("--compressors topka --check", "--check looks at oktopk only: name it."),
    ],
)
def test_arguments_that_cannot_be(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
