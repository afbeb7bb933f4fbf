"""How short a step could be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dear.studies.records import compute_for_ratio, one_way_bytes
from tests.studies.examples import POINT


def test_the_link_bounds_a_step_when_it_takes_longest() -> None:
    assert POINT.bounds.bound_s == pytest.approx(0.4)  # twice 0.2 against 0.3 of compute
    assert POINT.bounds.communication_ratio == pytest.approx(0.4 / 0.3)


def test_compute_bounds_a_step_on_a_fast_link() -> None:
    fast = replace(POINT, one_way_s=1e-5)
    assert fast.bounds.bound_s == pytest.approx(0.3)
    assert fast.bounds.dear_bound_s == pytest.approx(0.3)


def test_dears_own_bound_pairs_each_half_with_what_hides_it() -> None:
    # The gather (0.2) is longer than forward (0.1), the scatter as long as backward.
    assert POINT.bounds.dear_bound_s == pytest.approx(0.2 + 0.2)
    assert replace(POINT, one_way_s=0.25).bounds.dear_bound_s == pytest.approx(0.25 + 0.25)
    long_forward = replace(POINT, alone_forward_s=0.3, alone_backward_s=0.1)
    assert long_forward.bounds.dear_bound_s == pytest.approx(0.3 + 0.2)
    assert long_forward.bounds.bound_s == pytest.approx(0.4)


def test_more_links_carry_more() -> None:
    assert [one_way_bytes(40_000_000, count) for count in (1, 2, 4)] == [0, 20e6, 30e6]


def test_what_is_not_known_has_no_bound() -> None:
    for unknown in (replace(POINT, one_way_s=None), replace(POINT, alone_backward_s=None)):
        assert unknown.bounds.bound_s is None
        assert unknown.bounds.dear_bound_s is None
        assert unknown.bounds.communication_ratio is None


@pytest.mark.parametrize("ratio", [0.5, 1.33, 4])
def test_compute_for_a_ratio_gives_that_ratio(ratio: float) -> None:
    compute_s = compute_for_ratio(ratio, 40_000_000, 4, 25_000_000.0)
    point = replace(
        POINT,
        alone_forward_s=compute_s / 3,
        alone_backward_s=compute_s * 2 / 3,
        one_way_s=one_way_bytes(40_000_000, 4) / 25_000_000,
    )
    assert point.bounds.communication_ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "num_links", "rate", "message"),
    [
        (0, 2, 1.0, "greater than 0"),
        (1, 1, 1.0, "at least two ranks"),
        (1, 2, None, "links of known rate"),
    ],
)
def test_a_ratio_needs_communication(
    ratio: float, num_links: int, rate: float | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compute_for_ratio(ratio, 1000, num_links, rate)
