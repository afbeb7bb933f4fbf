"""Where configs and recipes are found, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dear import paths


@pytest.mark.parametrize("name", ["conf", "recipes"])
def test_beside_the_package_in_a_checkout(name: str) -> None:
    found: Path = getattr(paths, f"{name}_dir")()
    assert found == Path(__file__).resolve().parents[1] / name
    assert found.is_dir()


@pytest.mark.parametrize("name", ["conf", "recipes"])
def test_inside_the_package_when_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path)
    (tmp_path / name).mkdir()
    assert getattr(paths, f"{name}_dir")() == tmp_path / name
