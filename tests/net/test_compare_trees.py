"""The comparison of two trees notices what differs, and nothing else."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.net import compare_trees
from tests.net.compare_trees import MEANT, counts, differences, meant, notes
from tests.net.hashing import digest
from tests.net.trees import ROOT

TRAINED: dict[str, Any] = {"weights": "a1", "state": "b2", "total": 12, "figures": {"lag": "0x1p0"}}
RESULTS: dict[str, Any] = {
    "int8/parameters/plain, rank 0": dict(TRAINED),
    "int8/parameters/plain, rank 1": dict(TRAINED),
    "topk/parameters/plain, rank 0": {"refused": "ValueError", "message": "no"},
    "topk/parameters/plain, rank 1": {"refused": "ValueError", "message": "no"},
}


def test_equal_results_are_equal() -> None:
    assert differences(RESULTS, copy.deepcopy(RESULTS)) == []
    assert notes(RESULTS, copy.deepcopy(RESULTS)) == []
    assert counts(RESULTS) == "2 cases: 1 trained, 1 refused, 0 failed"


@pytest.mark.parametrize(
    ("key", "value"), [("weights", "a2"), ("total", 13), ("figures", {"lag": "0x1p1"}), ("new", 1)]
)
def test_what_differs_is_named(key: str, value: Any) -> None:
    now = copy.deepcopy(RESULTS)
    now["int8/parameters/plain, rank 1"][key] = value
    (line,) = differences(RESULTS, now)
    assert line.startswith(f"int8/parameters/plain, rank 1: {key} ")


def test_what_is_meant_to_differ_is_told_apart() -> None:
    lines = [f"{one}/gradients/plain, rank 0: weights a1 -> a2" for one in ("int8", *MEANT)]
    assert meant(lines) == lines[1:]


def test_another_refusal_differs_and_other_words_are_noted() -> None:
    now = copy.deepcopy(RESULTS)
    now["topk/parameters/plain, rank 0"]["message"] = "not so"
    assert differences(RESULTS, now) == []
    assert notes(RESULTS, now) == ["note: topk/parameters/plain, rank 0 says: not so"]
    now["topk/parameters/plain, rank 0"]["refused"] = "TypeError"
    assert len(differences(RESULTS, now)) == 1


def test_a_missing_case_differs() -> None:
    now = copy.deepcopy(RESULTS)
    del now["int8/parameters/plain, rank 0"]
    assert differences(RESULTS, now) == ["int8/parameters/plain, rank 0: only before"]
    assert differences(now, RESULTS) == ["int8/parameters/plain, rank 0: only now"]


def test_hashes_are_of_values() -> None:
    one = {"a": torch.ones(3), "b": [1, 2.0, None]}
    assert digest(one) == digest({"b": [1, 2.0, None], "a": torch.ones(3)})
    for other in (
        {"a": torch.ones(3).double(), "b": [1, 2.0, None]},
        {"a": torch.ones(3), "b": [1, 2.5, None]},
        {"a": torch.ones(1, 3), "b": [1, 2.0, None]},
        {"a": torch.ones(3), "c": [1, 2.0, None]},
    ):
        assert digest(other) != digest(one)
    with pytest.raises(TypeError, match="hash a object"):
        digest(object())


@pytest.mark.slow
@pytest.mark.parametrize("perturbs", [False, True])
def test_one_case_in_two_trees(
    perturbs: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This tree beside itself, and with one case's hash changed."""
    perturb = ["--perturb", "int8/parameters/plain"] if perturbs else []
    arguments = ["--before", str(ROOT), "--only", "int8/parameters/plain", *perturb]
    monkeypatch.setattr(sys, "argv", [Path(compare_trees.__file__).name, *arguments])
    assert compare_trees.main() == int(perturbs)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith("0 equal, 1 differ" if perturbs else "1 equal, 0 differ")
