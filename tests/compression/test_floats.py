"""fp16 and bf16: their largest and smallest numbers, and their bytes."""

from __future__ import annotations

import pytest
import torch

from lightning_dear.compression.blocks import TILE_ELEMENTS
from lightning_dear.compression.codec import Codec
from lightning_dear.compression.floats import Bf16, Fp16
from tests.compression.battery import encoded, round_trip
from tests.compression.formulas import FLOATS
from tests.compression.inputs import LARGEST

both = pytest.mark.parametrize("codec", [Bf16(), Fp16()], ids=lambda codec: codec.name)


@both
def test_the_bounds_are_met(codec: Codec) -> None:
    """So that they cannot be halved: numbers half-way between two of the format."""
    relative, absolute, _ = FLOATS[codec.name]
    some = torch.tensor([[1 + relative, absolute, 3 * absolute]], dtype=torch.float64)
    assert round_trip(codec, some.float()).tolist() == [[1.0, 0.0, 4 * absolute]]


@both
def test_what_is_too_large_becomes_the_largest(codec: Codec) -> None:
    largest = FLOATS[codec.name][2]
    some = torch.tensor([[LARGEST, -LARGEST, largest, -largest, 1.0]])
    assert round_trip(codec, some).tolist() == [[largest, -largest, largest, -largest, 1.0]]


@both
def test_tiles_whose_sum_is_not_finite(codec: Codec) -> None:
    """The first tile's overflows though no number does; the second's is inf - inf."""
    largest = FLOATS[codec.name][2]
    some = torch.full((1, 2 * TILE_ELEMENTS), largest)
    some[:, TILE_ELEMENTS:] = 0.5
    expected = some.clone()
    some[0, -2:] = torch.tensor([LARGEST, -LARGEST])
    expected[0, -2:] = torch.tensor([largest, -largest])
    assert torch.equal(round_trip(codec, some), expected)


@both
def test_signs_of_zeros(codec: Codec) -> None:
    assert round_trip(codec, torch.tensor([[0.0, -0.0]])).signbit().tolist() == [[False, True]]


@both
@pytest.mark.parametrize(("numel", "nbytes"), [(0, 0), (1, 4), (2, 4), (3, 8), (1000, 2000)])
def test_bytes_of_a_row(codec: Codec, numel: int, nbytes: int) -> None:
    assert codec.wire_bytes(numel) == nbytes


def test_the_bytes_themselves() -> None:
    some = torch.tensor([[1.0, -2.0, 0.5]])
    assert encoded(Bf16(), some).tolist() == [[0x80, 0x3F, 0x00, 0xC0, 0x00, 0x3F, 0, 0]]
    assert encoded(Fp16(), some).tolist() == [[0x00, 0x3C, 0x00, 0xC0, 0x00, 0x38, 0, 0]]


@both
@pytest.mark.parametrize(
    ("num_rows", "numel"), [(1, 2 * TILE_ELEMENTS + 3), (3, TILE_ELEMENTS // 2 + 1)]
)
def test_more_than_one_tile(codec: Codec, num_rows: int, numel: int) -> None:
    some = torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(5))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[codec.name]
    assert torch.equal(round_trip(codec, some), some.to(dtype).float())
