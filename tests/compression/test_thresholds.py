"""Which numbers are large: the k largest, and those above a threshold that is used again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dear.compression.selectors import (
    FEWEST,
    MOST,
    LocalThreshold,
    all_above,
    largest,
)

FEW = st.sampled_from([0.0, 0.5, -0.5, 1.0, -2.0, 3.0, 1e-44, 3e38, -math.inf])


def plainly(numbers: list[float], count: int) -> list[int]:
    """The largest |x| other than 0, of equal ones the first, places ascending."""
    places = [place for place, one in enumerate(numbers) if one]
    return sorted(sorted(places, key=lambda place: (-abs(numbers[place]), place))[:count])


@given(st.lists(FEW, max_size=40), st.integers(0, 45))
def test_the_largest_are_found_whatever_is_equal(numbers: list[float], count: int) -> None:
    assert largest(torch.tensor(numbers), count).tolist() == plainly(numbers, count)


@pytest.mark.parametrize("count", [1, 100, 20_000, 49_999])
def test_the_largest_of_many(count: int) -> None:
    numbers = (torch.randn(50_000, generator=torch.Generator().manual_seed(1)) * 8).round()
    assert largest(numbers, count).tolist() == plainly(numbers.tolist(), count)


@pytest.mark.parametrize("numel", [65_535, 65_536, 70_001, 600_003])
def test_places_above_a_floor(numel: int) -> None:
    """In long rows, and in what is left of them; nan is above all."""
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    numbers[::997] = math.nan
    numbers[-3:] = -math.inf
    numbers[5::1009] = 2.5
    for floor in (2.5, 0.0, 1.0, 3.0):
        found = all_above(numbers, floor)
        expected = (~(numbers.abs() <= floor)).nonzero().view(-1)
        assert torch.equal(found, expected)


def test_a_step_that_is_not_made_changes_no_threshold() -> None:
    threshold, numbers = LocalThreshold(), torch.arange(1.0, 101.0)
    threshold.find(numbers, 10, is_exact=True)
    threshold.commit()
    value = threshold.value
    threshold.find(10 * numbers, 10, is_exact=True)
    threshold.discard()
    threshold.commit()
    assert threshold.value == value > 0


def test_of_nothing_nothing_is_large() -> None:
    """As in a region between two equal boundaries."""
    nothing = torch.empty(0)
    assert all_above(nothing, 1.0).tolist() == []
    assert largest(nothing, 3).tolist() == []


def test_nan_comes_first() -> None:
    some = torch.tensor([3.0, math.nan, 0.0, math.inf, math.nan])
    assert largest(some, 1).tolist() == [1]
    assert largest(some, 2).tolist() == [1, 4]
    assert largest(some, 3).tolist() == [1, 3, 4]


def _normal(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(100_000, generator=torch.Generator().manual_seed(seed)) * size


def test_a_threshold_is_used_again() -> None:
    threshold, k = LocalThreshold(), 1000
    places, found = threshold.find(_normal(0), k, is_exact=True)
    assert len(places) == k
    assert torch.equal(found, _normal(0)[places])
    threshold.commit()
    value, other = threshold.value, _normal(1, 1.02)
    found, numbers = threshold.find(other, k, is_exact=False)
    assert torch.equal(numbers, other[found])
    assert found.tolist() == (other.abs() >= value).nonzero()[:, 0].tolist()
    assert len(found) != k
    threshold.commit()
    assert (threshold.value > value) == (len(found) > k)


@pytest.mark.parametrize("size", [0.0, 0.2, 0.9, 0.97, 1.03, 1.1, 5.0])
def test_the_count_stays_within_its_bands(size: float) -> None:
    """Whatever the numbers become: where too few or too many reach it, exactly k are taken."""
    threshold, k = LocalThreshold(), 1000
    for step, factor in enumerate([1.0, *[size] * 40]):
        numbers = _normal(step, factor)
        found, _ = threshold.find(numbers, k, is_exact=step == 0)
        if size:
            assert FEWEST * k <= len(found) <= MOST * k
        assert numbers[found].all()
        threshold.commit()
    assert len(found) == (0 if size == 0 else pytest.approx(k, rel=0.1))


def test_of_a_power_law_a_threshold_is_set_right_at_once() -> None:
    """Numbers of which so many exceed x as x^-3 says; Hill's estimate finds the 3."""
    uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    numbers, k = uniform ** (-1 / 3), 1000
    for off in (0.93, 1.07):
        exact = float(numbers.topk(k).values[-1])
        threshold = LocalThreshold(exact * off)
        found, _ = threshold.find(numbers, k, is_exact=False)
        assert abs(len(found) / k - 1) > 0.15
        threshold.commit()
        assert threshold.value == pytest.approx(exact, rel=0.01)


def test_what_was_not_committed_does_not_count() -> None:
    threshold = LocalThreshold()
    threshold.find(_normal(0), 10, is_exact=True)
    assert threshold.value == 0.0
    threshold.commit()
    before = threshold.value
    threshold.find(torch.full((50,), math.nan), 10, is_exact=False)
    assert threshold.value == before > 0
