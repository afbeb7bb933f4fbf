"""Old paths of modules: they give the very module of the new path, and say so."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import lightning_dear
from lightning_dear.moved import MOVED, find_what_moved, moved_name


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_path_is_the_new_module(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {new}"):
        assert importlib.import_module(old) is importlib.import_module(new)


def test_modules_in_a_package_that_moved_exist_once() -> None:
    with pytest.warns(DeprecationWarning, match="has moved"):
        old = importlib.import_module("lightning_dear.benchmarking.claims")
    assert old is importlib.import_module("lightning_dear.studies.claims")


def test_an_old_program_still_runs() -> None:
    command = [sys.executable, "-m", "lightning_dear.benchmarking.claims", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--others" in done.stdout


def test_what_has_not_moved_is_left_alone() -> None:
    assert moved_name("lightning_dear.engine.pipeline") is None
    assert moved_name("lightning_dear.pipelines") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lightning_dear.nowhere")


def test_the_finder_is_there_once() -> None:
    before = list(sys.meta_path)
    find_what_moved()
    assert sys.meta_path == before


def test_the_strategy_is_found_in_its_room() -> None:
    room = importlib.import_module("lightning_dear.strategy")
    assert room.DearStrategy is lightning_dear.DearStrategy
    with pytest.raises(AttributeError, match="nothing"):
        _ = room.nothing
