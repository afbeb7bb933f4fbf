"""The codec of docs/write-a-codec.md works, and entry points make codecs known."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_dear import DearStrategy, compression
from lightning_dear.compression import CODECS, Codec, Int8, TopK, resolve_compressor
from lightning_dear.compression.codec import field, padded_bytes
from lightning_dear.compression.error_feedback import Memory
from lightning_dear.exchange.options import ExchangeOptions
from tests.compression.battery import check_all, check_contracts, check_losses
from tests.compression.inputs import rows
from tests.compression.properties import PROPERTIES, smallest_of
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
    check_losses(_codec_of_the_page(), some)


SPARSE = torch.zeros(3, 1001)
SPARSE[:, ::100] = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))


def test_the_page_s_codec_keeps_its_contract() -> None:
    for some in (torch.randn(3, 1001), SPARSE):
        check_contracts(_codec_of_the_page(), some)


@pytest.mark.parametrize(
    "codec",
    [one for name in CODECS for one in PROPERTIES[name].instances],
    ids=repr,
)
def test_all_codecs_keep_their_contracts(codec: Codec) -> None:
    some = torch.randn(2, 1001, generator=torch.Generator().manual_seed(2))
    check_contracts(codec, torch.cat([some, SPARSE]), smallest_of(codec))


def test_it_has_about_twenty_lines() -> None:
    (source,) = re.findall(r"class RowInt8.*?```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20


@distributed(world_sizes=(2,))
def test_the_engine_takes_it() -> None:
    run = Run(ExchangeOptions("gradients", compressor=_codec_of_the_page()))
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
    assert DearStrategy(compressor="theirs")._options.compressor == Int8()
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
        ({"randomness": "public"}, "Unknown randomness 'public' of row_int8; valid names: none,"),
    ):
        with pytest.raises(ValueError, match=message):
            type("Wrong", (page,), wrong)()


def test_a_codec_without_a_name_is_told_what_to_write() -> None:
    methods = ("wire_bytes", "encode", "decode")
    own = {one: vars(type(_codec_of_the_page()))[one] for one in methods}
    nameless = type("Nameless", (Codec,), {**own, "kind": "contractive"})
    with pytest.raises(ValueError, match="Nameless has no name. Add name: ClassVar"):
        nameless()


@pytest.mark.parametrize(
    ("wire_bytes", "message"),
    [
        (lambda self, numel: 4 + numel, r"wire_bytes\(1\) of row_int8 is 5, .* padded_bytes\("),
        (lambda self, numel: 4 + numel / 4, r"wire_bytes\(1\) of row_int8 is 4\.25, "),
        (lambda self, numel: padded_bytes(numel) + numel // 50, r"wire_bytes\(50\) "),
    ],
)
def test_sizes_are_looked_at_before_training(wire_bytes: Any, message: str) -> None:
    codec = type("Wrong", (type(_codec_of_the_page()),), {"wire_bytes": wire_bytes})()
    with pytest.raises(ValueError, match=message):
        DearStrategy(compressor=codec)
    with pytest.raises(ValueError, match=message):
        ExchangeOptions(compressor=Int8(), groups=(("*", codec),))


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


class _Numbers(type(_codec_of_the_page())):  # type: ignore[misc]
    """Sends fp32 numbers that `_made` makes of rows; so it need not pack them."""

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, rows: Tensor, wire: Tensor, generator: Any = None) -> None:
        field(wire, torch.float32, 0, rows.shape[1]).copy_(self._made(rows))

    def decode(self, wire: Tensor, rows: Tensor, generator: Any = None) -> None:
        rows.copy_(field(wire, torch.float32, 0, rows.shape[1]))


def _rounded(rows: Tensor, largest: Tensor) -> Tensor:
    """-1, 0 or 1 times the largest."""
    scale = largest.clamp(min=1e-30)
    return (rows / scale).round().clamp(-1, 1) * scale


def _without_zero(self: Codec, rows: Tensor) -> Tensor:
    """Four levels, two of either sign."""
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return ((rows / scale * 1.5 + 1.5).round() - 1.5) / 1.5 * scale


def _by_the_largest_of_all(self: Codec, rows: Tensor) -> Tensor:
    return _rounded(rows, rows.abs().amax())


def _by_the_largest_of_a_row(self: Codec, rows: Tensor) -> Tensor:
    return _rounded(rows, rows.abs().amax(1, keepdim=True))


def _by_a_constant(self: Codec, rows: Tensor) -> Tensor:
    return _rounded(rows, torch.tensor(0.5))


def _without_the_last(self: Codec, rows: Tensor) -> Tensor:
    made = rows.clone()
    made[:, -1] = 0.0
    return made


_calls = count()


def _decode_another_time(self: Codec, wire: Tensor, rows: Tensor, generator: Any = None) -> None:
    _Numbers.decode(self, wire, rows)  # type: ignore[arg-type]
    rows.mul_(0.9 if next(_calls) % 2 else 1.0)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"_made": _without_zero}, r"a number among zeros: .* have a level for 0"),
        (
            {"_made": _by_the_largest_of_all},
            r"nothing of it .* of 2 of 4 rows.* not by that of all",
        ),
        (
            {"_made": _by_the_largest_of_all, "randomness": "private"},
            r"a row's residual is as large as .* scale each row",
        ),
        ({"_made": _by_a_constant}, r"a number among zeros: nothing of it .* or a constant"),
        ({"_made": _without_the_last}, r"look at the last number of a row"),
        (
            {"_made": _by_the_largest_of_a_row, "kind": "unbiased"},
            r"whose mean size is 0\.\d+ come back as .* kind='contractive', so that what is lost",
        ),
        ({"_made": _by_the_largest_of_a_row, "kind": "vote"}, r"do not come back as their sign"),
        (
            {"_made": lambda self, rows: rows, "decode": _decode_another_time},
            r"the residual do not add up to the gradients\. decode must",
        ),
        (
            {"_made": lambda self, rows: rows, "owner_memory": lambda self, *how: Memory(*how)},
            r"has feedback, and its owner_memory keeps no residual",
        ),
    ],
)
def test_broken_contracts_are_found_whatever_rows_are_given(
    members: dict[str, Any], message: str
) -> None:
    codec = type("Wrong", (_Numbers,), members)()
    with pytest.raises(AssertionError, match=message):
        check_contracts(codec, torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)))


def test_two_bits_with_a_level_for_0_and_a_scale_of_the_row_keep_the_contract() -> None:
    codec = type("Right", (_Numbers,), {"_made": _by_the_largest_of_a_row})()
    for some in (torch.randn(3, 1001), SPARSE):
        check_contracts(codec, some)


def test_a_class_instead_of_an_instance_is_refused() -> None:
    with pytest.raises(TypeError, match=r"such as Int8\(\).*got the class Int8"):
        resolve_compressor(Int8)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["abc", "0.1", None])
def test_options_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="density of topk must be a number, got"):
        TopK(density=value)
