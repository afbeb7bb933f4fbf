"""The codec of docs/write-a-codec.md works, and entry points make codecs known."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_dear import DearStrategy, compression
from lightning_dear.compression import Codec, Int8, TopK, resolve_compressor
from lightning_dear.exchange.options import ExchangeOptions
from tests.compression.battery import check_all, check_contracts
from tests.compression.inputs import rows
from tests.distributed.harness import distributed
from tests.training.linear import Run

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
    with pytest.raises(ValueError, match="gaussiank, theirs, wrong"):
        resolve_compressor("int9")


def test_a_kind_that_does_not_exist_is_refused() -> None:
    """It would be trained without feedback."""
    page = type(_codec_of_the_page())
    for wrong, message in (
        ({"kind": "wonderful"}, "Unknown kind 'wonderful' of row_int8; valid names: contractive,"),
        ({"lag": "tiny"}, "Unknown lag 'tiny' of row_int8; valid names: small"),
    ):
        with pytest.raises(ValueError, match=message):
            type("Wrong", (page,), wrong)()


def _encode_finite(self: Codec, rows: Tensor, wire: Tensor, generator: Any = None) -> None:
    """Takes a nan, and raises at inf."""
    if rows.isinf().any():
        raise OverflowError
    type(self).__mro__[1].encode(self, rows, wire, generator)  # type: ignore[attr-defined]


def _decode_finite(self: Codec, wire: Tensor, rows: Tensor, generator: Any = None) -> None:
    """Takes an inf, and raises at nan."""
    if wire[:, :4].contiguous().view(torch.float32).isnan().any():
        raise OverflowError
    type(self).__mro__[1].decode(self, wire, rows, generator)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        ("decode", lambda self, wire, rows, generator=None: rows.zero_(), "nothing of it"),
        ("wire_bytes", lambda self, numel: 4 + numel, "are no multiple of 4"),
        ("encode", _encode_finite, "rows of nan or inf raise"),
        ("decode", _decode_finite, "rows of nan or inf raise"),
    ],
)
def test_the_battery_finds_out_what_the_page_forbids(
    method: str, broken: Any, message: str
) -> None:
    codec = type("Wrong", (type(_codec_of_the_page()),), {method: broken})()
    some = torch.randn(3, 1001)

    def check() -> None:
        check_all(codec, some)
        check_contracts(codec, some)

    with pytest.raises(AssertionError, match=message):
        check()


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(TypeError, match=r"such as Int8\(\).*got the class Int8"):
        resolve_compressor(Int8)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["abc", "0.1", None])
def test_options_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="density of topk must be a number, got"):
        TopK(density=value)
