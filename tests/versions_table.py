"""Runs tests on the versions that are installed, and notes what came out in docs/versions.md.

    python -m tests.versions_table tests/engine tests/exchange

Arguments are pytest's; tests marked slow are left out. A row says which versions, which tests and
how many passed, failed and were skipped. A row of the same versions and tests is replaced. Exit
code: pytest's.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/versions.md"
RULE = "|---|---|---|---|---|"


class Row(NamedTuple):
    """What was run on what; cells as they stand in the table."""

    python: str
    torch: str
    lightning: str
    tests: str
    result: str

    @property
    def key(self) -> tuple[str, ...]:
        """What a second run of replaces the first."""
        return self[:4]


def rows_of(page: str) -> list[Row]:
    """The rows of a page's table."""
    lines = page.partition(RULE)[2].strip().split("\n\n")[0].splitlines()
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def with_row(page: str, row: Row) -> str:
    """The page with a row more, sorted by versions, or with another in its place."""
    before, rule, rest = page.partition(RULE)
    after = rest.lstrip("\n").partition("\n\n")[2]
    rows = sorted({one.key: one for one in [*rows_of(page), row]}.values(), key=_order)
    lines = "\n".join(f"| {' | '.join(one)} |" for one in rows)
    return f"{before}{rule}\n{lines}\n{after and chr(10)}{after}"


def _order(row: Row) -> tuple[object, ...]:
    numbers = [[int(part) for part in one.split(".") if part.isdigit()] for one in row[:3]]
    return (*numbers, row.tests)


def result_of(report: Path) -> str:
    """Counts of a report in JUnit's format, in words."""
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return f"{passed} passed, {failed} failed, {counts['skipped']} skipped"


def main() -> int:
    """Run pytest and note what came out."""
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "not slow", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.is_file():
            return code or 1
        result = result_of(report)
    torch, lightning = (version(name).partition("+")[0] for name in ("torch", "lightning"))
    folders = [one for one in arguments if one.startswith("tests/")]
    tests = ", ".join(one.removeprefix("tests/") for one in folders) or "all"
    row = Row(platform.python_version(), torch, lightning, tests, result)
    PAGE.write_text(with_row(PAGE.read_text(), row))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
