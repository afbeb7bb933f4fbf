"""What is counted without a GPU is still counted, for every kind of exchange."""

from __future__ import annotations

import pytest

from lightning_dear.compression import OkTopk, resolve_compressor
from tests.gpu.costs import Case, count, on_meta

CASES = {
    "dense": Case(),
    "int8": Case(resolve_compressor("int8")),
    "powersgd": Case(resolve_compressor("powersgd")),
    "oktopk": Case(OkTopk(mode="static")),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_counted_on_a_device_without_numbers(name: str) -> None:
    with on_meta():
        kernels, calls = count(CASES[name], 2)
    assert calls > 0
    assert kernels.counts["optimizer", "step"] > 0
    # A gradient is copied in, and scaled; of what is encoded there is more to do.
    own = kernels.counts["engine", "backward"]
    assert own == 2 * 2 if name == "dense" else own > 2 * 2
