"""Exact selection, and selection by a threshold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression import selectors
from lightning_dear.compression.blocks import TILE_ELEMENTS
from lightning_dear.compression.selectors import SELECTORS, select
from tests.compression.inputs import KINDS, heavy_tailed, normal, rows

DENSITIES = (0.01, 0.1, 0.5, 1.0)


def laplace(generator: torch.Generator, *size: int) -> Tensor:
    return torch.empty(size).exponential_(generator=generator) * normal(generator, *size).sign()


def student(generator: torch.Generator, *size: int) -> Tensor:
    """Three degrees of freedom: a tail like |x|^-3."""
    squares = sum(normal(generator, *size).square() for _ in range(3))
    return normal(generator, *size) / (squares / 3).sqrt()


def num_selected(places: Tensor, numel: int) -> Tensor:
    return (places < numel).sum(1)


@settings(max_examples=60)
@given(rows(), st.sampled_from(DENSITIES), st.sampled_from(sorted(SELECTORS)))
def test_places_are_distinct_and_not_of_zeros(some: Tensor, density: float, name: str) -> None:
    numel = some.shape[1]
    if not numel:
        return
    k = max(1, math.ceil(density * numel))
    places = select(name, some, k)
    assert places.shape == (len(some), k)
    for row, chosen in zip(some, places, strict=True):
        used = chosen[chosen != numel]
        assert len(used.unique()) == len(used)
        assert ((used >= 0) & (used < numel)).all()
        if row.any():
            assert row[used].any(), "nothing of a row that is not zero was selected"
        if name != "exact":
            assert row[used].all(), "a zero was selected"


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_small_row_by_hand(name: str) -> None:
    row = torch.tensor([[-1.0, -5.0, 0.0, -0.5, -4.0, -0.25, -0.125, -0.0625]])
    assert sorted(select(name, row, 2)[0].tolist()) == [1, 4]


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("place", [0, 17, 999, 300_000])
def test_a_number_among_zeros_is_found(name: str, place: int) -> None:
    """A threshold of 0 that zeros reach would select the first zeros instead."""
    row = torch.zeros(1, 1000 if place < 1000 else 300_001)
    row[0, place] = -1e-3
    assert place in select(name, row, 10)[0]


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("number", [-0.3, 1e-45, 3e38])
def test_constant_rows_fill_all_slots(name: str, number: float) -> None:
    """Also those of the smallest number, below which there is only 0."""
    row = torch.full((1, 1000), number)
    assert num_selected(select(name, row, 10), 1000).item() == 10


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("numel", [100, 2 * TILE_ELEMENTS + 77])
def test_of_rows_that_are_nan_nan_is_selected(name: str, numel: int) -> None:
    """Whatever the threshold; zeros among them, which no parameter has, are not."""
    row = torch.full((1, numel), math.nan)
    row[:, ::2] = 0.0
    chosen = select(name, row, numel // 4)[0]
    assert len(chosen.unique()) == len(chosen)
    assert row[0, chosen].isnan().all()


def test_nan_is_above_every_floor() -> None:
    row = torch.tensor([[0.5, math.nan, 0.0, 3.0]])
    for find in (selectors.first_above, selectors.first_above_static):
        assert find(row, torch.tensor([[1.0]]), 2).tolist() == [[1, 3]]
    assert selectors.first_above(row, torch.tensor([[math.nan]]), 4).tolist() == [[0, 1, 3, 4]]


def test_zero_rows_leave_all_slots_empty() -> None:
    assert (select("sampled", torch.zeros(2, 100), 5) == 100).all()


@pytest.mark.parametrize("numel", [100_000, 2 * TILE_ELEMENTS + 77])
@pytest.mark.parametrize("density", [0.01, 0.1])
@pytest.mark.parametrize("draw", [laplace, normal, student, heavy_tailed])
def test_how_many_a_threshold_selects(draw, density, numel) -> None:
    """k_hat / k in [0.6, 1]; and what is selected is among the 1.5 k largest."""
    k = math.ceil(density * numel)
    for seed in range(3):
        row = draw(torch.Generator().manual_seed(seed), 1, numel)
        places = select("sampled", row, k)
        count = int(num_selected(places, numel))
        assert 0.6 * k <= count <= k
        smallest = row[0, places[0, :count]].abs().min()
        assert (row.abs() >= smallest).sum() <= 1.5 * k


def test_sampled_takes_the_quantile_of_its_sample() -> None:
    """k = 128: every second entry would be sampled, so every one is (2 divides widths)."""
    row = torch.arange(1.0, 12801)[torch.randperm(12800)][None]
    assert selectors.sample_stride(128) == 1
    places = selectors.sampled(row, 128)[0]
    assert sorted(row[0, places].tolist()) == list(range(12673, 12801))


def test_sampled_sees_a_sample_only() -> None:
    """What lies between sampled entries does not move the threshold."""
    numel, k = 100_000, 1000
    stride = selectors.sample_stride(k)
    assert stride == 13
    row = torch.zeros(1, numel)
    row[0, ::stride] = torch.linspace(1, 2, len(row[0, ::stride]))
    size = math.ceil(numel / stride)
    count = int(num_selected(selectors.sampled(row, k), numel))
    assert count == round(size * k / numel) == 77


def test_strides_share_no_factor_with_widths() -> None:
    for k in (1, 63, 64, 640, 1000, 6400, 10**7):
        stride = selectors.sample_stride(k)
        assert math.gcd(stride, 210) == 1
        assert 1 <= stride <= max(1, min(100, k / 64))
    assert selectors.sample_stride(10**7) == 97


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "constant", "zero", "one-hot"])
def test_exact_in_blocks_is_topk(kind: str) -> None:
    row = KINDS[kind](torch.Generator().manual_seed(0), 1, 2 * TILE_ELEMENTS + 3)
    places = selectors.exact(row, 5000)
    assert len(places.unique()) == 5000
    expected = row.abs().topk(5000).values
    assert torch.equal(row[0, places[0]].abs().sort(descending=True).values, expected[0])


def test_exact_survives_a_sample_that_misleads() -> None:
    """Only the sampled entries are large, so that too few exceed the threshold."""
    numel, k = 2 * TILE_ELEMENTS, 50_000
    row = torch.arange(1.0, numel + 1)[None]
    row[0, :: selectors.sample_stride(k)] += 1e7
    places = selectors.exact(row, k)[0]
    assert set(places.tolist()) == set(row.topk(k).indices[0].tolist())


@settings(max_examples=60)
@given(rows(), st.floats(0, 2, width=32), st.integers(1, 300))
def test_both_ways_to_find_places_agree(some: Tensor, quantile: float, k: int) -> None:
    if not some.shape[1]:
        return
    floor = some.abs().mean(1, keepdim=True, dtype=torch.float64).float() * quantile
    floor = floor.clamp_max(torch.finfo(torch.float32).max)
    k = min(k, some.shape[1])
    alone = [
        selectors.first_above(row, one, k)
        for row, one in zip(some.split(1), floor.split(1), strict=True)
    ]
    assert torch.equal(torch.cat(alone), selectors.first_above_static(some, floor, k))


def test_both_ways_agree_over_many_blocks() -> None:
    row = normal(torch.Generator().manual_seed(0), 1, 2 * TILE_ELEMENTS + 5)
    floor = torch.tensor([[1.0]])
    for k in (10, TILE_ELEMENTS // 2, 2 * TILE_ELEMENTS):
        places = selectors.first_above(row, floor, k)
        assert torch.equal(places, selectors.first_above_static(row, floor, k))


def test_first_above_by_hand() -> None:
    row = torch.tensor([[0.5, -2.0, 1.0, 3.0, -1.5]])
    for find in (selectors.first_above, selectors.first_above_static):
        assert find(row, torch.tensor([[1.0]]), 2).tolist() == [[1, 3]]
        assert find(row, torch.tensor([[1.0]]), 4).tolist() == [[1, 3, 4, 5]]
        assert find(row, torch.tensor([[9.0]]), 2).tolist() == [[5, 5]]
