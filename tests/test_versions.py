"""The tested ranges and the one warning outside them."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lightning_dear import versions
from lightning_dear.versions import TESTED_RANGES, is_inside, warn_outside_tested_range
from tests.versions_table import PAGE, Row, result_of, rows_of, with_row

PYPROJECT = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("installed", "inside"),
    [
        ("2.5.1", False),
        ("2.6", True),
        ("2.6.0", True),
        ("2.11.0+cu130", True),
        ("2.13.0+cpu", True),
        ("2.13.0.dev20260101", True),
        ("2.14.0a0", False),
        ("3.0", False),
        ("unknown", False),
    ],
)
def test_range(installed: str, inside: bool) -> None:
    assert is_inside(installed, "2.6", "2.14") is inside


def test_silent_where_it_was_tested() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_outside_tested_range()


def test_one_warning_names_all_that_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "9.1.0+cpu", "lightning": "2.4.0"}
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    with pytest.warns(UserWarning, match="not tested with") as caught:
        warn_outside_tested_range()
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "torch 9.1.0+cpu (tested: >=2.6,<" in text
    assert "lightning 2.4.0 (tested: >=2.5,<" in text
    assert "python" not in text


def test_a_missing_dependency_is_left_to_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_outside_tested_range()


def test_lower_ends_are_those_of_the_project_file() -> None:
    lower = dict(re.findall(r'"(torch|lightning)>=([\d.]+)', PYPROJECT))
    lower["python"] = re.findall(r'requires-python = ">=([\d.]+)"', PYPROJECT)[0]
    assert {name: minimum for name, (minimum, _) in TESTED_RANGES.items()} == lower


# --- what was run on what -------------------------------------------------------------------------


def test_ranges_end_where_tests_were_run() -> None:
    rows = rows_of(PAGE.read_text())
    assert rows
    for name, (minimum, below) in TESTED_RANGES.items():
        found = [getattr(row, name) for row in rows]
        assert all(is_inside(one, minimum, below) for one in found), name
        ends = {".".join(one.split(".")[:2]) for one in found}
        newest = below.split(".")
        assert {minimum, f"{newest[0]}.{int(newest[1]) - 1}"} <= ends, name


def test_a_row_is_added_in_order_or_replaced() -> None:
    page = PAGE.read_text()
    assert with_row(page, rows_of(page)[0]) == page
    row = Row("3.10.2", "2.7.0", "2.5.1", "x", "1 passed, 0 failed, 0 skipped")
    added = with_row(page, row)
    place = rows_of(added).index(row)
    assert 0 < place < len(rows_of(added)) - 1
    assert with_row(added, row._replace(result="2")).count("| x |") == 1


def test_counts_are_read_from_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    )
    assert result_of(report) == "4 passed, 3 failed, 3 skipped"
