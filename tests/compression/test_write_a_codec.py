"""The codec of docs/write-a-codec.md works, and entry points make codecs known."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from torch import Tensor

from lightning_dear import DearStrategy, compression
from lightning_dear.compression import Codec, Int8, resolve_compressor
from lightning_dear.exchange_options import ExchangeOptions
from tests.compression.battery import check_all, check_contracts
from tests.compression.inputs import rows
from tests.distributed.harness import distributed
from tests.engine.linear import Run

PAGE = Path(__file__).resolve().parents[2] / "docs/write-a-codec.md"


def _codec_of_the_page() -> Codec:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(source, names)
    codec: Codec = names["RowInt8"]()
    return codec


@settings(max_examples=60)
@given(rows().filter(lambda some: some.numel()))
def test_the_page_s_codec_is_what_it_says(some: Tensor) -> None:
    check_all(_codec_of_the_page(), some)
    check_contracts(_codec_of_the_page(), some)


def test_it_has_about_twenty_lines() -> None:
    (source,) = re.findall(r"class RowInt8.*?```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20


@distributed(world_sizes=(2,))
def test_the_engine_takes_it() -> None:
    run = Run(ExchangeOptions("gradients", codec=_codec_of_the_page()))
    for _ in range(10):
        run.step()
    assert run.error() <= 1e-5


def test_entry_points_name_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = compression.ENTRY_POINTS
    found = [
        EntryPoint("theirs", "lightning_dear.compression:Int8", group),
        EntryPoint("wrong", "lightning_dear.compression:NoCompression", group),
    ]
    monkeypatch.setattr(compression, "entry_points", lambda group: found)
    assert resolve_compressor("theirs") == Int8()
    assert DearStrategy(compressor="theirs")._options.codec == Int8()
    with pytest.raises(TypeError, match="NoCompression, registered as compressor 'wrong'"):
        resolve_compressor("wrong")
    with pytest.raises(ValueError, match="powersgd, theirs, wrong"):
        resolve_compressor("int9")
