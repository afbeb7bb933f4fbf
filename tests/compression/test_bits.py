"""Bits and pairs of bits in bytes, against a loop in plain Python."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression import bits
from tests.compression.inputs import SIZES

Pack = Callable[[Tensor, Tensor], None]
Unpack = Callable[[Tensor, int], Tensor]

WIDTHS: dict[int, tuple[Pack, Unpack]] = {
    1: (bits.pack_bits, bits.unpack_bits),
    2: (bits.pack_pairs, bits.unpack_pairs),
}


def numbers(width: int, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << width, shape, generator=generator, dtype=torch.uint8)


def packed_slowly(row: list[int], width: int) -> list[int]:
    packed = [0] * -(-len(row) * width // 8)
    for i, number in enumerate(row):
        packed[i * width // 8] += number << (i * width % 8)
    return packed


@settings(max_examples=60)
@given(
    st.sampled_from((1, 2)),
    st.integers(0, 5),
    st.one_of(st.integers(0, 70), st.sampled_from(SIZES)),
    st.integers(0, 2**31),
)
def test_round_trip(width: int, num_rows: int, numel: int, seed: int) -> None:
    pack, unpack = WIDTHS[width]
    before = numbers(width, (num_rows, numel), seed)
    unchanged = before.clone()
    # A view of a wider wire, full of something else.
    wire = torch.full((num_rows, -(-numel * width // 8) + 3), 0xFF, dtype=torch.uint8)
    pack(before, wire[:, 1:-2])
    assert torch.equal(before, unchanged)
    assert wire[:, 1:-2].tolist() == [packed_slowly(row, width) for row in before.tolist()]
    assert (wire[:, :1] == 0xFF).all()
    assert (wire[:, -2:] == 0xFF).all()
    sent = wire.clone()
    after = unpack(wire[:, 1:-2], numel)
    assert after.dtype == before.dtype
    assert torch.equal(after, before)
    assert torch.equal(wire, sent)


@pytest.mark.parametrize("width", [1, 2])
def test_every_byte(width: int) -> None:
    pack, unpack = WIDTHS[width]
    before = torch.arange(256, dtype=torch.uint8).view(2, 2, 64)
    values = unpack(before, 64 * 8 // width)
    assert values.max() == (1 << width) - 1
    after = torch.zeros_like(before)
    pack(values, after)
    assert torch.equal(after, before)


@pytest.mark.parametrize("width", [1, 2])
def test_values_that_do_not_lie_side_by_side(width: int) -> None:
    pack, _ = WIDTHS[width]
    wide = numbers(width, (3, 128), 0)
    # Every other one, and some that do not begin where a word may.
    for some in wide[:, ::2], wide.flatten()[3:67][None]:
        packed, expected = torch.zeros(2, len(some), 8 * width, dtype=torch.uint8)
        pack(some, packed)
        pack(some.clone(), expected)
        assert torch.equal(packed, expected)


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="little-endian"):
        runpy.run_path(bits.__file__)
