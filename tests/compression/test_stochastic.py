"""QSGD, TernGrad and Natural."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression.blocks import TILE_ELEMENTS
from lightning_dear.compression.codec import Codec
from lightning_dear.compression.stochastic import QSGD, Natural, TernGrad
from tests.compression.battery import decoded, encoded, generator_for, round_trip
from tests.compression.formulas import step_and_variance
from tests.compression.inputs import KINDS, LARGEST, SIZES, normal, rows

CODECS = [
    QSGD(),
    QSGD(num_levels=127, block_size=8),
    QSGD(num_levels=1, block_size=64),
    TernGrad(),
    TernGrad(block_size=8),
    Natural(),
]
# Natural: everything that is not beyond 2^64 is unbiased.
IN_RANGE = tuple(kind for kind in KINDS if kind not in ("huge", "largest"))
NUM_DRAWS = 500


def check_mean(codec: Codec, row: Tensor, seed: int) -> None:
    """Means of many draws, within what Bernstein's inequality allows with probability 1 - 1e-9.

    Unlike a sample's own deviation it holds for the rare draws of small elements as well.
    """
    exact = row.double()
    lost = round_trip(codec, row.expand(NUM_DRAWS, -1).contiguous(), seed).double() - exact
    step, variance = step_and_variance(codec, row, slack=1e-4)
    rounding = 2.0**-22 * (step + exact.abs())

    def slack(variance: Tensor, step: Tensor, draws: int, questions: int) -> Tensor:
        log = math.log(2e9 * questions)
        return (2 * variance * log / draws).sqrt() + step * log / draws

    each = slack(variance, step, NUM_DRAWS, len(row)) + rounding
    off = lost.mean(0).abs() > each
    assert not off.any(), f"{int(off.sum())} of {off.numel()} numbers are off"
    # In units of the steps, so that the largest number does not hide the others.
    units = lost / step
    for together in units.mean(), (units * exact.sign()).mean():
        draws = units.numel()
        mean_variance = (variance / step.square()).mean()
        assert together.abs() <= slack(mean_variance, torch.tensor(1.0), draws, 1) + 2.0**-20


@settings(max_examples=40)
@given(st.sampled_from([c for c in CODECS if not isinstance(c, Natural)]), rows(), st.integers(0))
def test_levels_are_unbiased(codec: Codec, some: Tensor, seed: int) -> None:
    """For every finite input, of any size."""
    if some.shape[1]:
        check_mean(codec, some[0, :1000], seed % 2**31)


@settings(max_examples=60)
@given(rows(IN_RANGE), st.integers(0, 2**31))
def test_powers_are_unbiased(some: Tensor, seed: int) -> None:
    if some.shape[1]:
        check_mean(Natural(), some[0, :1000], seed)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [1.3, -0.7, 1.9])
def test_a_constant_is_unbiased(codec: Codec, value: float) -> None:
    """A million equal questions, which no small bias survives."""
    row = torch.full((2048,), value)
    # Otherwise TernGrad has nothing to round.
    row[::8] *= 1.5
    check_mean(codec, row, 0)


@pytest.mark.parametrize("exponent", [-65, -62, -61, 0, 63])
def test_powers_are_unbiased_in_the_whole_window(exponent: int) -> None:
    """And a little below it."""
    row = torch.linspace(1, 2, 1001) * 2.0**exponent
    check_mean(Natural(), row, exponent + 200)


def test_below_the_window_the_next_level_is_zero() -> None:
    came_back = round_trip(Natural(), torch.full((1, 100_000), 2.0**-65))
    assert set(came_back.unique().tolist()) == {0.0, 2.0**-62}
    assert float((came_back != 0).float().mean()) == pytest.approx(1 / 8, abs=0.005)


@pytest.mark.parametrize("codec", [QSGD(), QSGD(num_levels=7), TernGrad(), Natural()], ids=repr)
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "constant", "small"])
def test_variance_is_that_of_the_formula(codec: Codec, kind: str) -> None:
    row = KINDS[kind](torch.Generator().manual_seed(3), 1, 1100)[0]
    exact = row.double()
    lost = round_trip(codec, row.expand(2000, -1).contiguous()).double() - exact
    measured = lost.square().sum(1)
    error = measured.std() / len(measured) ** 0.5
    _, variance = step_and_variance(codec, row)
    assert (measured.mean() - variance.sum()).abs() <= 5 * error + 0.02 * variance.sum()


@settings(max_examples=40)
@given(rows(tuple(k for k in KINDS if k not in ("denormal", "huge", "largest"))))
def test_bounds_of_the_papers(some: Tensor) -> None:
    """n / s^2 and sqrt(n) / s for a block of QSGD, 1 / 8 for Natural."""
    for row in some:
        squares = float(row.double().square().sum())
        for levels in 1, 64:
            codec = QSGD(num_levels=levels, block_size=4104)
            _, variance = step_and_variance(codec, row)
            bound = min(len(row) / levels**2, len(row) ** 0.5 / levels)
            assert float(variance.sum()) <= bound * squares * (1 + 1e-6)
        _, variance = step_and_variance(Natural(), row)
        assert float(variance.sum()) <= squares / 8 * (1 + 1e-6)


def test_ternary_by_hand() -> None:
    some = torch.tensor([[4.0, -4, 0, 4, -0.0, -4, 4, 4, -2, -2, -2]])
    wire = encoded(TernGrad(block_size=8), some)
    assert wire[:, :8].view(torch.float32).tolist() == [[4, 2]]
    assert wire[:, 8:].tolist() == [[0b01001101, 0b01011100, 0b111111, 0]]
    assert torch.equal(decoded(TernGrad(block_size=8), wire, 11), some)


def test_levels_by_hand() -> None:
    some = torch.tensor([[3.0, -4, 0, 0, 0, 0, 0, 0, -2]])
    codec = QSGD(num_levels=10, block_size=8)
    wire = encoded(codec, some)
    assert wire[:, :8].view(torch.float32)[0].tolist() == pytest.approx([0.5, 0.2])
    # Eight elements of block 0 and one of block 1; 6 and -8 are levels up to what is rounded off.
    assert wire[0, 8:].view(torch.int8).tolist() == [6, -8, 0, 0, 0, 0, 0, 0, -10, 0, 0, 0]


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1, 1e25, 1e36])
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    some = normal(torch.Generator().manual_seed(0), 1, 1536) * scale
    norms = some.double().view(3, 512).norm(dim=1)
    steps = encoded(QSGD(), some)[0, :12].view(torch.float32)
    assert torch.allclose(steps.double(), norms / 64, rtol=1e-6, atol=0)


def test_no_level_beyond_127() -> None:
    """Where x / (x / 127) is rounded to more than 127, one in 10^5 would be level 128."""
    values = torch.linspace(1, 2, 1001)
    value = values[values / (1 / torch.tensor(127.0) * values) > 127][0]
    some = torch.zeros(1 << 20, 8)
    some[:, 3] = value
    wire = encoded(QSGD(num_levels=127, block_size=8), some.view(1, -1))
    levels = wire[:, 4 << 20 :].view(torch.int8).view(-1, 8)
    assert set(levels[:, 3].unique().tolist()) <= {126, 127}


def test_powers_by_hand() -> None:
    some = torch.tensor([[1.0, -2, 0, -0.0, 2.0**-62, -(2.0**64), 0.25]])
    wire = encoded(Natural(), some)
    assert wire.tolist() == [[63, 128 + 64, 0, 128, 1, 128 + 127, 61, 0]]
    assert torch.equal(decoded(Natural(), wire, 7), some)


def test_every_power_of_the_window_is_exact() -> None:
    some = torch.exp2(torch.arange(-62, 65, dtype=torch.float64)).float()[None]
    for sign in 1, -1:
        assert torch.equal(round_trip(Natural(), sign * some), sign * some)


def test_what_powers_lose() -> None:
    """Beyond the window the largest power is sent, and far below it nothing."""
    some = torch.tensor([[2.0**65, -LARGEST, 2.0**-87, -(2.0**-120)]])
    assert round_trip(Natural(), some).tolist() == [[2.0**64, -(2.0**64), 0, 0]]


@pytest.mark.parametrize("codec", [QSGD(), TernGrad(), Natural()], ids=repr)
def test_random_numbers(codec: Codec) -> None:
    some = normal(torch.Generator().manual_seed(0), 1, 4000).expand(2, -1).contiguous()
    wire = encoded(codec, some, seed=1)
    assert torch.equal(wire, encoded(codec, some, seed=1))
    assert not torch.equal(wire, encoded(codec, some, seed=2))
    assert not torch.equal(wire[0], wire[1]), "two rows share their random numbers"
    generator = generator_for(codec)
    assert generator is not None
    state = generator.get_state()
    codec.encode(some, wire, generator)
    assert not torch.equal(generator.get_state(), state)
    with pytest.raises(ValueError, match="generator"):
        codec.encode(some, wire)
    # Private: decoding needs none.
    codec.decode(wire, some)


@pytest.mark.parametrize("codec", [QSGD(), TernGrad(), Natural()], ids=repr)
@pytest.mark.parametrize("shape", [(2, 2 * TILE_ELEMENTS + 1027), (5, TILE_ELEMENTS // 2 - 3)])
def test_long_rows(codec: Codec, shape: tuple[int, int]) -> None:
    """Tiles neither overlap nor leave out anything, and decode where they were encoded."""
    generator = torch.Generator().manual_seed(0)
    some = normal(generator, *shape)
    came_back = round_trip(codec, some)
    for row, level in zip(some, came_back, strict=True):
        step, _ = step_and_variance(codec, row)
        assert ((level.double() - row.double()).abs() <= step * (1 + 1e-5)).all()
    # Random numbers do not repeat from tile to tile.
    equal = torch.full((1, 2 * TILE_ELEMENTS), 1.25)
    equal[:, ::512] = 1.6
    first, second = round_trip(codec, equal).chunk(2, 1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("numel", SIZES)
def test_wire_bytes(numel: int) -> None:
    def padded(nbytes: int) -> int:
        return nbytes + -nbytes % 4

    blocks = (numel + 127) // 128
    assert QSGD(block_size=128).wire_bytes(numel) == padded(4 * blocks + numel)
    assert TernGrad(block_size=128).wire_bytes(numel) == padded(4 * blocks + (numel + 3) // 4)
    assert Natural().wire_bytes(numel) == padded(numel)


def test_ratios() -> None:
    dense, numel = 4 << 20, 1 << 20
    assert dense / QSGD().wire_bytes(numel) == pytest.approx(4 * 512 / 516)
    assert dense / TernGrad().wire_bytes(numel) == pytest.approx(16 * 512 / 528)
    assert dense / Natural().wire_bytes(numel) == 4


def test_invalid_options() -> None:
    for levels in 0, 128, 1.5:
        with pytest.raises(ValueError, match="from 1 to 127"):
            QSGD(num_levels=levels)  # type: ignore[arg-type]
    for kind in QSGD, TernGrad:
        with pytest.raises(ValueError, match="multiple of 8 from 8 to 65536"):
            kind(block_size=12)


def test_kinds_and_feedback() -> None:
    for codec in CODECS:
        assert codec.kind == "unbiased"
        assert codec.randomness == "private"
        assert not codec.has_feedback
    with pytest.raises(ValueError, match="diverges"):
        QSGD(error_feedback=True)
