"""EFSignSGD, OneBit, SignSGD and Signum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression.blocks import TILE_ELEMENTS
from lightning_dear.compression.codec import Codec
from lightning_dear.compression.signs import EFSignSGD, OneBit, SignSGD, Signum
from tests.compression.battery import encoded, relative_error, round_trip
from tests.compression.inputs import KINDS, LARGEST, SIZES, normal, rows

SCALED = [
    EFSignSGD(),
    EFSignSGD(block_size=8),
    EFSignSGD(block_size=120),
    OneBit(),
    OneBit(block_size=8),
    OneBit(block_size=120),
]
VOTES = [SignSGD(), Signum()]
# Below n 2^-126 a mean loses digits.
EXACT = tuple(kind for kind in KINDS if kind != "denormal")


def what_is_kept(codec: Codec, block: Tensor) -> Tensor:
    """|x|^2 - |C(x) - x|^2 of a block in fp64, by the codec's formula."""
    if isinstance(codec, EFSignSGD):
        return block.abs().sum() ** 2 / len(block)
    parts = block[block < 0], block[block >= 0]
    return sum((part.sum() ** 2 / len(part) for part in parts if len(part)), torch.tensor(0.0))


def expected_error(codec: Codec, some: Tensor) -> Tensor:
    """|C(x) - x|^2 / |x|^2 of each row; 0 where x is 0."""
    errors = []
    for row in some.double():
        if not row.any():
            errors.append(0.0)
            continue
        kept = sum(float(what_is_kept(codec, block)) for block in row.split(codec.block_size))
        errors.append(1 - kept / float(row.square().sum()))
    return torch.tensor(errors, dtype=torch.float64)


@settings(max_examples=80)
@given(st.sampled_from(SCALED), rows(EXACT))
def test_error_is_that_of_the_formula(codec: Codec, some: Tensor) -> None:
    expected = expected_error(codec, some)
    assert torch.allclose(relative_error(codec, some), expected, rtol=1e-5, atol=2e-6)


@settings(max_examples=40)
@given(rows(EXACT))
def test_two_means_are_never_worse_than_one(some: Tensor) -> None:
    one, two = EFSignSGD(block_size=64), OneBit(block_size=64)
    assert (relative_error(two, some) <= relative_error(one, some) + 1e-6).all()


@pytest.mark.parametrize("codec", [EFSignSGD(), OneBit()], ids=repr)
@pytest.mark.parametrize("sign", [1, -1])
def test_means_of_the_largest_numbers(codec: Codec, sign: int) -> None:
    """For some counts the sum of x / n is rounded to more than x."""
    for numel in range(1, 300):
        some = torch.full((1, numel), sign * LARGEST)
        assert torch.allclose(round_trip(codec, some), some)


def test_zero_of_either_sign_votes_for_plus_one() -> None:
    assert round_trip(SignSGD(), torch.tensor([[0.0, -0.0, -1e-45]])).tolist() == [[1, 1, -1]]


def test_one_mean_by_hand() -> None:
    some = torch.tensor([[1.0, -3, 0, -0.0, 2, -2, 4, -4, -5, 1]])
    wire = encoded(EFSignSGD(block_size=8), some)
    assert wire[:, :8].view(torch.float32).tolist() == [[2, 3]]
    assert wire[:, 8:].tolist() == [[0b10100010, 0b01, 0, 0]]
    expected = [2, -2, 2, 2, 2, -2, 2, -2, -3, 3]
    assert round_trip(EFSignSGD(block_size=8), some).tolist() == [expected]


def test_two_means_by_hand() -> None:
    some = torch.tensor([[1.0, -3, 0, -0.0, 2, -2, 7, -4, -5, -1]])
    wire = encoded(OneBit(block_size=8), some)
    assert wire[:, :16].view(torch.float32).tolist() == [[-3, 2, -3, 0]]
    assert wire[:, 16:].tolist() == [[0b10100010, 0b11, 0, 0]]
    expected = [2, -3, 2, 2, 2, -3, 2, -3, -3, -3]
    assert round_trip(OneBit(block_size=8), some).tolist() == [expected]


@pytest.mark.parametrize("codec", [*SCALED, *VOTES], ids=repr)
@pytest.mark.parametrize("shape", [(2, 2 * TILE_ELEMENTS + 1027), (5, TILE_ELEMENTS // 2 - 3)])
def test_long_rows_are_their_parts(codec: Codec, shape: tuple[int, int]) -> None:
    """Tiles neither overlap nor leave out anything."""
    some = normal(torch.Generator().manual_seed(0), *shape)
    cut = 120 * 1024
    parts = [round_trip(codec, part.contiguous()) for part in some.split(cut, 1)]
    assert torch.equal(round_trip(codec, some), torch.cat(parts, 1))


@pytest.mark.parametrize("numel", SIZES)
def test_wire_bytes(numel: int) -> None:
    def padded(nbytes: int) -> int:
        return nbytes + -nbytes % 4

    bits = (numel + 7) // 8
    blocks = (numel + 127) // 128
    assert EFSignSGD(block_size=128).wire_bytes(numel) == padded(4 * blocks + bits)
    assert OneBit(block_size=128).wire_bytes(numel) == padded(8 * blocks + bits)
    assert SignSGD().wire_bytes(numel) == Signum().wire_bytes(numel) == padded(bits)


@pytest.mark.parametrize("size", [64, 1024, 4096])
def test_ratios(size: int) -> None:
    numel = 10**6
    dense = 4 * numel
    one = dense / EFSignSGD(block_size=size).wire_bytes(numel)
    two = dense / OneBit(block_size=size).wire_bytes(numel)
    assert one == pytest.approx(32 * size / (size + 32), rel=1e-3)
    assert two == pytest.approx(32 * size / (size + 64), rel=1e-3)
    assert dense / SignSGD().wire_bytes(numel) == 32
    assert dense / EFSignSGD().wire_bytes(numel) >= 31
    assert dense / OneBit().wire_bytes(numel) >= 31


@pytest.mark.parametrize("block_size", [0, 4, 12, -8, 65544, 8.0])
@pytest.mark.parametrize("kind", [EFSignSGD, OneBit])
def test_invalid_block_sizes(kind: type[EFSignSGD | OneBit], block_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 65536"):
        kind(block_size=block_size)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_invalid_momentum(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        Signum(momentum=momentum)


def test_kinds_and_feedback() -> None:
    assert all(codec.kind == "contractive" and codec.has_feedback for codec in SCALED)
    assert all(codec.kind == "vote" and not codec.has_feedback for codec in VOTES)
    with pytest.raises(ValueError, match="diverges"):
        SignSGD(error_feedback=True)
    assert Signum().momentum == 0.9
    assert Signum(momentum=0).momentum == 0
