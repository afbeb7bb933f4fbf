"""int8 and int4: errors by block, bytes, and blocks that have nothing to divide by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression.blocks import TILE_ELEMENTS
from lightning_dear.compression.integers import Int4, Int8
from tests.compression.battery import decoded, encoded, relative_error, round_trip
from tests.compression.formulas import LEVELS, TINY
from tests.compression.inputs import KINDS, LARGEST, rows

Integers = Int8 | Int4
NORMAL_KINDS = tuple(kind for kind in KINDS if kind != "denormal")

codecs = st.builds(
    lambda codec, size: codec(block_size=size),
    st.sampled_from([Int8, Int4]),
    st.sampled_from([8, 24, 64, 128, 256]),
)
both = pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)


@settings(max_examples=80)
@given(codecs, rows(NORMAL_KINDS))
def test_what_a_row_loses(codec: Integers, some: Tensor) -> None:
    spread = codec.block_size - 1
    bound = spread / (4 * LEVELS[codec.name] ** 2 + spread)
    assert (relative_error(codec, some) <= bound * (1 + 1e-5)).all()


@both
def test_the_worst_block(codec: Integers) -> None:
    """One element of L scales, all others half a scale: they are lost, and the bound is met."""
    levels, spread = LEVELS[codec.name], codec.block_size - 1
    some = torch.full((1, codec.block_size), 0.5)
    some[0, 3] = -levels
    worst = spread / (4 * levels**2 + spread)
    assert relative_error(codec, some).item() == pytest.approx(worst, rel=1e-6)


@both
def test_integers_come_back(codec: Integers) -> None:
    """All of them, in every place of a byte: the largest is L, so that the scale is 1."""
    levels = LEVELS[codec.name]
    one = torch.arange(-levels, levels + 1).float()
    some = torch.stack([one.roll(shift) for shift in range(len(one))])
    assert torch.equal(round_trip(codec, some), some)


@both
def test_ties_go_to_even(codec: Integers) -> None:
    some = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, LEVELS[codec.name]]])
    assert round_trip(codec, some).tolist() == [[0, 2, 2, 0, -2, -2, LEVELS[codec.name]]]


def test_bytes_of_int8() -> None:
    """Two blocks, the second short: scales 1 and 2, values, two bytes of zeros."""
    some = torch.tensor([[127.0, -127, 1, -1, 0, 2, 3, 4, 254, -2]])
    values = [127, 0x81, 1, 0xFF, 0, 2, 3, 4, 127, 0xFF]
    scales = [0, 0, 0x80, 0x3F, 0, 0, 0, 0x40]
    assert encoded(Int8(block_size=8), some).tolist() == [[*scales, *values, 0, 0]]


def test_bytes_of_int4() -> None:
    """Byte i is q_i + 16 q_(i + 4) in the full block, q_i + 16 q_(i + 2) in the short one."""
    some = torch.tensor([[7.0, -7, 1, -1, 0, 2, 3, -4, 14, -2, 4]])
    values = [7, (-7 + 32) % 256, 1 + 48, (-1 - 64) % 256, 7 + 32, (-1) % 256]
    scales = [0, 0, 0x80, 0x3F, 0, 0, 0, 0x40]
    assert encoded(Int4(block_size=8), some).tolist() == [[*scales, *values, 0, 0]]


@pytest.mark.parametrize(
    ("codec", "numel", "nbytes"),
    [
        (Int8(), 0, 0),
        (Int8(), 1, 4 + 4),
        (Int8(), 256, 4 + 256),
        (Int8(), 257, 8 + 260),
        (Int8(block_size=8), 20, 12 + 20),
        (Int4(), 0, 0),
        (Int4(), 1, 4 + 4),
        (Int4(), 128, 4 + 64),
        (Int4(), 137, 8 + 72),
        (Int4(block_size=8), 20, 12 + 12),
    ],
)
def test_bytes_of_a_row(codec: Integers, numel: int, nbytes: int) -> None:
    assert codec.wire_bytes(numel) == nbytes


@pytest.mark.parametrize("size", [8, 64, 128, 256, 2048])
def test_how_much_smaller_large_rows_become(size: int) -> None:
    numel = 10_000_019
    of_int8 = 4 * numel / Int8(block_size=size).wire_bytes(numel)
    of_int4 = 4 * numel / Int4(block_size=size).wire_bytes(numel)
    assert of_int8 == pytest.approx(4 * size / (size + 4), rel=1e-3)
    assert of_int4 == pytest.approx(32 * size / (4 * size + 32), rel=1e-3)


@both
def test_one_block_of_zeros_beside_another(codec: Integers) -> None:
    some = torch.zeros(1, 2 * codec.block_size)
    some[0, -1] = 3.0
    assert torch.equal(round_trip(codec, some), some)


@both
def test_denormals(codec: Integers) -> None:
    """They are rounded to multiples of the smallest normal number, which is the scale."""
    some = torch.tensor([[0.75, -0.75, 0.25, 1e-7]]) * TINY
    assert round_trip(codec, some).tolist() == [[TINY, -TINY, 0.0, 0.0]]


@both
@pytest.mark.parametrize("steps_below", [0, 1, 2, 3, 5, 8, 13, 21])
def test_the_largest_numbers_stay_finite(codec: Integers, steps_below: int) -> None:
    some = torch.tensor([[LARGEST, -LARGEST]])
    for _ in range(steps_below):
        some = torch.nextafter(some, torch.zeros(()))
    torch.testing.assert_close(round_trip(codec, some), some, rtol=1e-6, atol=0)


@both
def test_only_its_own_block_is_coarse(codec: Integers) -> None:
    """A bucket's largest element does not blur its other tensors."""
    some = torch.full((1, 2 * codec.block_size), 1e-3)
    some[0, 0] = 1e6
    came_back = round_trip(codec, some)
    torch.testing.assert_close(came_back[:, codec.block_size :], some[:, codec.block_size :])


@both
@pytest.mark.parametrize(
    ("num_rows", "numel"), [(1, 2 * TILE_ELEMENTS + 300), (3, TILE_ELEMENTS // 2 + 9)]
)
def test_more_than_one_tile(codec: Integers, num_rows: int, numel: int) -> None:
    """Byte by byte and number by number as without tiles."""
    some = torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(5))
    levels, size = LEVELS[codec.name], codec.block_size
    blocks = torch.nn.functional.pad(some, (0, -numel % size)).view(num_rows, -1, size)
    scales = blocks.abs().amax(2, keepdim=True) / levels
    expected = (blocks / scales).round() * scales
    wire = encoded(codec, some)
    assert torch.equal(decoded(codec, wire, numel), expected.flatten(1)[:, :numel])
    assert torch.equal(wire[:, : scales[0].numel() * 4], scales.flatten(1).view(torch.uint8))


@pytest.mark.parametrize("codec", [Int8, Int4])
@pytest.mark.parametrize("size", [0, -8, 4, 12, 65544, 1 << 20, 128.0, "128", None, True])
def test_block_sizes_that_are_refused(codec: type[Integers], size: Any) -> None:
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 65536|must be a number"):
        codec(block_size=size)


@pytest.mark.parametrize("codec", [Int8, Int4])
@pytest.mark.parametrize("size", [8, 65536])
def test_the_ends_of_the_range_of_block_sizes(codec: type[Integers], size: int) -> None:
    assert codec(block_size=size).block_size == size


@pytest.mark.parametrize("codec", [Int8, Int4])
def test_what_all_codecs_refuse_is_refused(codec: type[Integers]) -> None:
    with pytest.raises(ValueError, match="Unknown halves"):
        codec(halves="neither")
