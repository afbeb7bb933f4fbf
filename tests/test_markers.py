"""Tests marked `netns` or `gpu` say why they skip, and in CI as root `netns` never does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest

@pytest.mark.netns
def test_namespaces():
    pass
"""


@pytest.fixture
def no_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subprocesses find the library and pytest, but neither `ip` nor `tc`."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.usefixtures("no_iproute2")
@pytest.mark.parametrize("in_ci", [False, True])
def test_missing_namespaces_skip_with_a_reason_and_fail_in_ci(
    in_ci: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true" if in_ci else "")
    pytester.makeini("[pytest]\nmarkers =\n  netns: needs namespaces\n")
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("-p", "tests.conftest", "-rs")
    must_run = in_ci and os.geteuid() == 0
    result.assert_outcomes(errors=int(must_run), skipped=int(not must_run))
    result.stdout.fnmatch_lines(["*an emulated cluster needs *"])
