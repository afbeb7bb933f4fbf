"""What runs on pull requests: the files parse, and what they run exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
IN_GATE = set(
    re.findall(r"^stage \S+ (make [a-z-]+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
)


def runs(workflow: dict[str, Any]) -> Iterator[str]:
    for job in workflow["jobs"].values():
        yield from (step["run"] for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_every_line_is_a_target_or_a_script_that_exists(file: Path) -> None:
    lines = list(runs(yaml.safe_load(file.read_text())))
    assert lines
    for line in lines:
        command, *words = line.split()
        if command == "make":
            assert words[0] in TARGETS, line
        else:
            assert (ROOT / (words[0] if command in ("bash", "python") else command)).exists(), line


def test_what_the_gate_makes_runs_on_pull_requests() -> None:
    lines = [line for file in WORKFLOWS for line in runs(yaml.safe_load(file.read_text()))]
    made = {" ".join(line.split()[:2]) for line in lines}
    assert {"make lint", "make test", "make train", "make docs"} <= IN_GATE
    assert made >= IN_GATE


def test_pythons_are_those_of_the_classifiers() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    assert set(named) <= set(matrix["strategy"]["matrix"]["python"])


def test_files_of_versions_exist_and_begin_where_the_ranges_do() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]
    strategy = matrix["strategy"]["matrix"]
    files = {*strategy["constraints"], *(one["constraints"] for one in strategy["include"])}
    assert all((ROOT / one).is_file() for one in files)
    oldest = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "tests/constraints_oldest.txt").read_text(), re.M)
    )
    declared = dict(
        re.findall(
            r'"(torch|lightning|pytorch-lightning)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()
        )
    )
    assert {name: version.rpartition(".")[0] for name, version in oldest.items()} == declared
