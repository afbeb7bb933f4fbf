"""The leak check finds what a test leaves behind, and cleans up after it."""

from __future__ import annotations

import os

import pytest

_PLUGIN = "tests.distributed.leaks"

_LEAKS = {
    "process": (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        r"*left behind: process * (*time.sleep(600)*)*",
    ),
    "new variable": ("import os\nos.environ['LEAKED'] = '1'", "*environment variable LEAKED*"),
    "lost variable": ("import os\ndel os.environ['GIVEN']", "*environment variable GIVEN*"),
    "process group": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "*an initialised process group*",
    ),
}


@pytest.mark.parametrize("leak", _LEAKS)
def test_leak_fails_its_test_and_not_the_next(
    leak: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    body, words = _LEAKS[leak]
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    pytester.makepyfile(f"def test_leaks():\n{lines}\ndef test_next():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", _PLUGIN)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines([words])


def test_monkeypatch_and_seeds_are_no_leaks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os

        def test_patches(monkeypatch):
            monkeypatch.setenv("PATCHED", "1")
            os.environ["PL_GLOBAL_SEED"] = "1"

        def test_next():
            assert "PL_GLOBAL_SEED" not in os.environ
        """
    )
    pytester.runpytest_inprocess("-p", _PLUGIN).assert_outcomes(passed=2)
    assert "PL_GLOBAL_SEED" not in os.environ
