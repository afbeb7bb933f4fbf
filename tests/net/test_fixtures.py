"""Checkpoints of before files moved are gone on from as they were then: see `make_fixtures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.harness import run_ranks
from tests.net.pulling import (
    FIXTURES,
    FORMS,
    KINDS,
    WORLD_SIZE,
    files_in,
    machine,
    resume,
    saved,
    structure,
    written,
)

PAIRS = [(kind, form) for kind in KINDS for form in FORMS[kind]]


def assert_equal(ours: Any, theirs: Any, what: str, exactly: bool = True) -> None:
    """The same keys and values; not exactly: numbers that are close to each other."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), what
        limits = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}", **limits)
    elif isinstance(theirs, dict):
        assert list(map(repr, ours)) == list(map(repr, theirs)), what
        for key, value in theirs.items():
            assert_equal(ours[key], value, f"{what}[{key!r}]", exactly)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), what
        for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(left, right, f"{what}[{number}]", exactly)
    else:
        assert ours == theirs, what


def without_early(value: Any) -> Any:
    """`value` without the empty lists of early buckets that plans had then."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in ("early", "'early'") or one}
        return {key: without_early(one) for key, one in kept.items()}
    return value


def is_same(expected: dict[str, Any]) -> bool:
    """Whether this machine computes the bits that the fixture's did."""
    return bool(machine() == expected["machine"])


@pytest.mark.parametrize(("kind", "form"), PAIRS)
def test_a_fixture_goes_on_as_it_did(tmp_path: Path, kind: str, form: str) -> None:
    """By the bit in what is loaded; in what follows too, on a machine like the one of then."""
    expected = torch.load(FIXTURES / "expected" / f"{kind}.{form}.pt", weights_only=True)
    again = tmp_path / "again.ckpt"
    found, other = run_ranks(resume, WORLD_SIZE, kind, form, again)
    assert other["ended"] == found["ended"]
    assert found["loaded"] == expected["loaded"]
    assert_equal(found["weights"], expected["weights"], "weights", exactly=is_same(expected))
    if is_same(expected):
        assert found["ended"] == expected["ended"]
    assert found["plan"] == without_early(expected["plan"])
    assert not found["searched"]
    assert structure(saved(again)) == without_early(expected["again"])
    if kind == "tuned":
        (plan,) = (
            state["plan"]
            for state in saved(FIXTURES / f"{kind}.{form}")["callbacks"].values()
            if "plan" in state
        )
        assert found["plan"] == without_early(plan)


@pytest.mark.parametrize(("kind", "form"), [pair for pair in PAIRS if pair[0] != "tuned"])
def test_the_same_is_written_as_then(tmp_path: Path, kind: str, form: str) -> None:
    """Training from the start: a file or folder with the same keys, and the same bits."""
    path, fixture = tmp_path / f"{kind}.{form}", FIXTURES / f"{kind}.{form}"
    expected = torch.load(FIXTURES / "expected" / f"{kind}.{form}.pt", weights_only=True)
    run_ranks(written, WORLD_SIZE, kind, form, path)
    assert files_in(path) == files_in(fixture) == expected["files"]
    assert structure(saved(path)) == expected["written"]
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert_equal(saved(path)[key], saved(fixture)[key], key, exactly=is_same(expected))


def test_what_differs_is_noticed() -> None:
    one = {"a": torch.ones(3), "b": [1]}
    assert_equal({"a": torch.ones(3), "b": [1]}, one, "all")
    for other in (
        {"a": torch.ones(3) + 1e-6, "b": [1]},
        {"a": torch.ones(3).double(), "b": [1]},
        {"a": torch.ones(3), "b": [2]},
        {"b": [1], "a": torch.ones(3)},
    ):
        with pytest.raises(AssertionError):
            assert_equal(other, one, "all")
    assert structure({1: torch.ones(3), "a": [1.0]}) == {
        "'a'": ["float"],
        "1": "torch.float32 [3]",
    }
