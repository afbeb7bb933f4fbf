"""Every codec is in the table, documented, tested, and taken by the strategy."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from hypothesis import is_hypothesis_test

from lightning_dear import DearStrategy, compression
from lightning_dear.compression import (
    CODECS,
    COMPRESSORS,
    Codec,
    Gaussiank,
    GTopk,
    Int8,
    NoCompression,
    OkTopk,
    PowerSGD,
    TopkA,
    TopkDSA,
    resolve_compressor,
)
from tests.compression import test_properties
from tests.compression.properties import PROPERTIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/compressors.md").read_text()
TABLES = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
ROWS = {cells[0].strip("`"): cells for cells in TABLES if len(cells) == 7}
OPTIONS = [cells for cells in TABLES if len(cells) == 4]
SPARSE = {one.name: one for one in (OkTopk, TopkA, TopkDSA, GTopk, Gaussiank)}
CLASSES = {**CODECS, "powersgd": PowerSGD, **SPARSE}
COMMON = {"halves", "error_feedback"}
GATHERS = {"small": "parameters", "unbounded": "gradients"}


def test_every_codec_is_in_the_table() -> None:
    modules = pkgutil.iter_modules(compression.__path__, f"{compression.__name__}.")
    found = {
        value
        for module in modules
        for value in vars(importlib.import_module(module.name)).values()
        if inspect.isclass(value) and issubclass(value, Codec) and "name" in vars(value)
    }
    assert found == set(CODECS.values())
    assert {codec.__name__ for codec in found} <= set(compression.__all__)


def test_every_codec_has_a_row_and_every_row_a_codec() -> None:
    assert ["none", *ROWS] == list(COMPRESSORS)


@pytest.mark.parametrize("name", CODECS)
def test_the_row_is_true(name: str) -> None:
    codec, numel = CODECS[name](), 1 << 20
    _, _, kind, gathers, ratio, options, _ = ROWS[name]
    assert kind == codec.kind
    assert gathers == GATHERS[codec.lag]
    assert DearStrategy(compressor=name)._options.gather == gathers
    assert ratio == f"{4 * numel / codec.wire_bytes(numel):.2f}"
    assert set(re.findall(r"`(\w+)`", options)) == vars(codec).keys() - COMMON


def test_the_table_of_options_is_true_and_whole() -> None:
    told: dict[str, set[str]] = {name: set() for name in CLASSES}
    for options, of, defaults, _ in OPTIONS:
        names, named = re.findall(r"`(\w+)`", options), re.findall(r"`(\w+)`", of)
        if of.startswith("all"):
            named = [name for name in CLASSES if name not in named]
        values = [one.strip(" `") for one in defaults.split(",")]
        pairs = [(option, name) for option in names for name in named]
        # One value for each option, or for each codec, or for all.
        each = values if len(values) == len(pairs) else [v for v in values for _ in named]
        for (option, name), value in zip(pairs, each, strict=True):
            told[name].add(option)
            default = vars(CLASSES[name]())[option]
            assert value in (str(default).lower(), "null" if default is None else ""), option
    hidden = {"fp32": COMMON}
    for name, options_told in told.items():
        assert options_told >= vars(CLASSES[name]()).keys() - hidden.get(name, set()), name


def test_the_row_of_the_low_rank_one_is_true() -> None:
    codec, (num_rows, num_columns) = PowerSGD(), (1024, 1024)
    _, _, kind, gathers, ratio, options, _ = ROWS["powersgd"]
    assert (kind, gathers) == (codec.kind, "nothing")
    assert DearStrategy(compressor="powersgd")._options.all_reduces
    sent = (num_rows + num_columns) * codec.rank_of(num_rows, num_columns)
    assert ratio == f"{num_rows * num_columns / sent:.2f}"
    assert set(re.findall(r"`(\w+)`", options)) == vars(codec).keys() - COMMON


@pytest.mark.parametrize("name", SPARSE)
def test_the_row_of_a_sparse_all_reduce_is_true(name: str) -> None:
    codec, numel, num_ranks = SPARSE[name](), 1 << 20, 8
    _, _, kind, gathers, ratio, options, _ = ROWS[name]
    assert (kind, gathers) == (codec.kind, "nothing" if codec.all_reduces else "gradients")
    assert DearStrategy(compressor=name)._options.gather == "gradients"
    dense = 2 * numel * (num_ranks - 1) / num_ranks
    assert ratio == f"{dense / codec.usual_words(numel, num_ranks):.2f}"
    assert set(re.findall(r"`(\w+)`", options)) == vars(codec).keys() - COMMON


def test_one_test_goes_through_the_properties_of_every_compressor() -> None:
    assert list(PROPERTIES) == list(COMPRESSORS[1:])
    test = test_properties.test_every_formula_is_true
    (over,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    assert over.args == ("name", PROPERTIES)
    assert is_hypothesis_test(test)


@pytest.mark.parametrize("name", COMPRESSORS[1:])
def test_every_compressor_says_what_is_tested_of_it(name: str) -> None:
    properties, (*_, paper) = PROPERTIES[name], ROWS[name]
    assert {type(one) for one in properties.instances} == {CLASSES[name]}
    says = " ".join((inspect.getdoc(CLASSES[name]) or "").split())
    assert properties.formula in says, "another formula, or none"
    assert name == "fp32" or paper in says, "another paper, or none"


@pytest.mark.parametrize("name", COMPRESSORS[1:])
def test_only_what_is_contractive_has_feedback(name: str) -> None:
    compressor = CLASSES[name]
    assert compressor().has_feedback is (compressor().kind == "contractive")
    if name == "dgc":
        with pytest.raises(ValueError, match="dgc needs error feedback"):
            compressor(error_feedback=False)
    else:
        assert not compressor(error_feedback=False).has_feedback
    if compressor().kind != "contractive":
        with pytest.raises(ValueError, match=f"{name} is .* diverges"):
            compressor(error_feedback=True)


def test_the_examples_of_the_page_run() -> None:
    codec_alone, with_a_trainer = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(codec_alone, names)
    exec(with_a_trainer, {})
    rows = names["rows"]
    assert isinstance(rows, torch.Tensor)
    assert len(rows[0, :128].unique()) < 128


@pytest.mark.parametrize("compressor", ["int8", Int8()])
def test_the_strategy_takes_names_and_instances(compressor: str | Codec) -> None:
    assert DearStrategy(compressor=compressor)._options.compressor == Int8()


def test_what_is_no_compressor_is_refused() -> None:
    class Other(NoCompression):
        """Would be taken for none."""

    for wrong in (Other(), 3, ["none"]):
        with pytest.raises(TypeError, match="compressor must be one of none"):
            resolve_compressor(wrong)
    with pytest.raises(ValueError, match="Unknown compressor 'int9'; valid names: none"):
        resolve_compressor("int9")
    for wrong, meant in (("OkTopK", "oktopk"), ("ok-topk", "oktopk"), ("int9", "int8")):
        with pytest.raises(ValueError, match=rf"\. Is '{meant}' meant\?"):
            resolve_compressor(wrong)
