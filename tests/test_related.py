"""docs/related.md: every option it names exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from lightning_dear import DearStrategy
from lightning_dear.compression import COMPRESSORS
from lightning_dear.planning import FUSIONS

PAGE = (Path(__file__).resolve().parents[1] / "docs/related.md").read_text()
OPTIONS = inspect.signature(DearStrategy).parameters
ASSIGNED = re.findall(r"`(\w+)=(?:\"?([\w]+)\"?)?`", PAGE)
VALUES = {"compressor": COMPRESSORS, "fusion": FUSIONS, "strategy": ("dear",)}
NAMED = set(re.findall(r"`\"?([a-z0-9]+)\"?`", PAGE)) - {"fsdp", "halves"}


@pytest.mark.parametrize(("name", "value"), sorted(set(ASSIGNED)))
def test_an_option_exists(name: str, value: str) -> None:
    assert name in OPTIONS or name == "strategy"
    if value and name in VALUES:
        assert value in VALUES[name]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_name_alone_is_a_compressors(name: str) -> None:
    assert name in COMPRESSORS


def test_the_page_names_options() -> None:
    assert len(set(ASSIGNED)) > 10
    assert len(NAMED) > 10
