"""One change to one source file, and tests of which at least one must fail with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.symbols import lines_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_dear"
TIMEOUT_S = 300
_COPIED = (PACKAGE, "conf", "recipes", "tests", "examples", "pyproject.toml", "README.md", "docs")


@dataclass(frozen=True)
class Mutation:
    """What is removed, and who should notice.

    Attributes:
        name: For people.
        symbol: In whose lines, as `lines_of` has it; whichever file it is in.
        old: Text that stands in them once.
        new: What takes its place.
        tests: Arguments of pytest.
    """

    name: str
    symbol: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self, package: Path) -> tuple[Path, str]:
        """The file in the package's folder, and what stands in it after the change. Writes nothing.

        Raises:
            ValueError: If there is no such symbol, or `old` does not stand in it exactly once.
        """
        pieces = lines_of(self.symbol, package)
        path = pieces[0].path
        text = path.read_text().splitlines(keepends=True)
        inside = {piece: "".join(text[piece.first - 1 : piece.last]) for piece in pieces}
        count = sum(part.count(self.old) for part in inside.values())
        if count != 1:
            raise ValueError(f"{self.name}: found {count} times in {self.symbol}")
        piece, part = next(item for item in inside.items() if self.old in item[1])
        text[piece.first - 1 : piece.last] = part.replace(self.old, self.new)
        return path, "".join(text)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation: `failed` names the first test that noticed, None if none did."""

    mutation: Mutation
    failed: str | None
    seconds: float


def row(*names: str, how: str = "sgd-2") -> tuple[str, ...]:
    """Rows of the parity matrix, with an optimizer and a number of ranks."""
    ids = [f"tests/lightning/matrix/test_matrix.py::test_row[{name}-{how}]" for name in names]
    return tuple(ids)


def copy_tree(to: Path) -> None:
    """Copies what tests need of the repository."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, to / name, ignore=skipped)
        elif source.exists():
            shutil.copy(source, to / name)


def run_tests(tree: Path, tests: tuple[str, ...]) -> str | None:
    """Runs tests against a copy until one fails; its name, or None if all pass.

    A run that takes longer than TIMEOUT_S counts as a failure: a removed wait may hang.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"(ran longer than {TIMEOUT_S} s)"
    if done.returncode == 0:
        return None
    if done.returncode != 1:
        raise RuntimeError(f"pytest could not run {tests}:\n{done.stdout[-2000:]}{done.stderr}")
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return failures[0].removeprefix("FAILED ").split(" - ")[0] if failures else "(a test)"


def judge(mutation: Mutation, tree: Path) -> Verdict:
    """Applies the mutation to the copy in `tree`, runs its tests, and undoes it."""
    path, changed = mutation.changed(tree / PACKAGE)
    original = path.read_text()
    start = time.monotonic()
    path.write_text(changed)
    try:
        failed = run_tests(tree, mutation.tests)
    finally:
        path.write_text(original)
    return Verdict(mutation, failed, time.monotonic() - start)
