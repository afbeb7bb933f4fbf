"""Tests that measure run alone: with two workers of pytest-xdist, and by the locks themselves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.distributed.turns import key, turn

SECONDS = 20.0
A_WHILE = 0.1


class Taker:
    """A turn that a thread takes and keeps until it is told to leave."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._folder, self._alone = folder, alone
        self._may_leave = threading.Event()
        self.runs = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        with turn(self._folder / "door", self._folder / "room", alone=self._alone):
            self.runs.set()
            self._may_leave.wait(SECONDS)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(SECONDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("door", "room"):
        (tmp_path / name).touch()
    return tmp_path


def test_ordinary_tests_run_beside_each_other(folder: Path) -> None:
    takers = [Taker(folder, alone=False) for _ in range(3)]
    assert all(taker.runs.wait(SECONDS) for taker in takers)
    for taker in takers:
        taker.leave()


def test_one_that_runs_alone_waits_and_lets_nobody_past(folder: Path) -> None:
    before = Taker(folder, alone=False)
    assert before.runs.wait(SECONDS)
    alone = Taker(folder, alone=True)
    assert not alone.runs.wait(A_WHILE)
    after = Taker(folder, alone=False)
    assert not after.runs.wait(A_WHILE)
    before.leave()
    assert alone.runs.wait(SECONDS)
    assert not after.runs.wait(A_WHILE)
    alone.leave()
    assert after.runs.wait(SECONDS)
    after.leave()


def test_one_waits_for_the_key_that_another_has(folder: Path) -> None:
    has_it = threading.Event()

    def take() -> None:
        with key(folder / "door"):
            has_it.set()

    second = threading.Thread(target=take)
    with key(folder / "door"):
        second.start()
        assert not has_it.wait(A_WHILE)
    assert has_it.wait(SECONDS)
    second.join()


_TESTS = """
import time
from pathlib import Path

import pytest

RUNNING = Path(__file__).parent / "running"

@pytest.mark.parametrize("number", range(8))
def test_ordinary(number):
    mark = RUNNING / str(number)
    mark.touch()
    time.sleep(0.05)
    mark.unlink()

@pytest.mark.alone
@pytest.mark.parametrize("number", range(4))
def test_alone(number):
    for _ in range(20):
        assert not list(RUNNING.iterdir())
        time.sleep(0.005)
"""


@pytest.mark.slow
def test_two_workers_keep_to_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeini("[pytest]\nmarkers =\n  alone: runs alone\n")
    pytester.mkdir("running")
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("-p", "tests.conftest", "-n", "2", "--dist", "load")
    result.assert_outcomes(passed=12)
