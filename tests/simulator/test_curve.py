"""What a collective takes by its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator import Curve

CURVE = Curve((10.0, 20.0, 40.0), (1.0, 1.0, 5.0))


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(0, 1), (10, 1), (15, 1), (20, 1), (30, 3), (40, 5), (80, 10)],
)
def test_it_is_straight_between_what_was_measured(nbytes: float, seconds: float) -> None:
    assert CURVE.message_s(nbytes) == pytest.approx(seconds)


def test_nothing_takes_less_than_the_least() -> None:
    slow = Curve(CURVE.sizes, CURVE.seconds, least_s=2.0)
    assert (slow.message_s(0), slow.message_s(30)) == (2.0, 3.0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=6), st.floats(0, 100), st.floats(0, 100))
def test_more_bytes_are_never_faster(seconds: list[float], one: float, other: float) -> None:
    sizes = tuple(10.0 * (1 + place) for place in range(len(seconds)))
    curve = Curve(sizes, tuple(sorted(seconds)))
    less, more = sorted((one, other))
    assert curve.message_s(less) <= curve.message_s(more) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1.0,), (1.0, 2.0)), ((2.0, 1.0), (1.0, 2.0)), ((0.0,), (1.0,))],
)
def test_what_is_no_curve_is_refused(sizes: tuple, seconds: tuple) -> None:
    with pytest.raises(ValueError, match="positive and rise, and seconds for each size"):
        Curve(sizes, seconds)
