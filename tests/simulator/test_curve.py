"""What a collective takes by its size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator.curve import Curve, rising

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
    curve = rising([10.0 * (1 + place) for place in range(len(seconds))], seconds)
    assert sum(curve.seconds) == pytest.approx(sum(seconds))
    assert list(curve.seconds) == seconds or seconds != sorted(seconds)
    less, more = sorted((one, other))
    assert curve.message_s(less) <= curve.message_s(more) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ((), (), "needs seconds for each of its sizes"),
        ((1.0,), (1.0, 2.0), "got 2 for 1"),
        ((2.0, 1.0), (1.0, 2.0), "must be positive and rise"),
        ((0.0,), (1.0,), "must be positive and rise"),
        ((1.0,), (-1.0,), "finite and not negative"),
        ((1.0,), (float("nan"),), "finite and not negative"),
    ],
)
def test_what_is_no_curve_is_refused(sizes: tuple, seconds: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Curve(sizes, seconds)
