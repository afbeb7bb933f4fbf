"""What was measured of a model, to a file and back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.paths import recipes_dir
from lightning_dear.simulator import Workload
from lightning_dear.simulator.saved import load_workload, save_workload
from tests.planning.models import chain, chains, codecs


@given(
    chains(),
    codecs,
    st.one_of(st.just("blocks"), st.floats(0, 100)),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_it_comes_back_as_it_was(tmp_path_factory, model, costs, unit_mb, sharding_s) -> None:
    tensors, times = model
    workload = Workload(
        "made up",
        tensors,
        times,
        costs,
        "int8",
        copies_s=0.25,
        sharding_s=sharding_s,
        shard_unit_mb=unit_mb,
    )
    path = tmp_path_factory.mktemp("saved") / "model.json"
    save_workload(workload, path)
    assert load_workload(path) == workload


@pytest.mark.parametrize(
    "text", ["{}", "[]", "no JSON", '{"version": 7}', '{"version": 3, "codecs": 3}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no measured model"):
        load_workload(path)


def test_one_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_workload(Workload("some", *chain([1], [1.0], [1.0])), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match=re.escape("its version is 2, not 3")):
        load_workload(path)


def test_files_of_earlier_versions_are_read() -> None:
    """They say `allows_early`, which there is no more."""
    recorded = sorted((recipes_dir() / "speed" / "hosts").rglob("model.json"))
    assert any('"allows_early"' in path.read_text() for path in recorded)
    assert all(load_workload(path).times.forward_s > 0 for path in recorded)
