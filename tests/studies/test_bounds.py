"""How short a step could be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dear.studies.bounds import compute_for_ratio
from tests.studies.examples import BOUNDS


def test_the_link_bounds_a_step_when_it_takes_longest() -> None:
    assert BOUNDS.one_way_bytes == 20_000_000
    assert BOUNDS.one_way_s == pytest.approx(0.2)
    assert BOUNDS.step_s == pytest.approx(0.4)  # twice 0.2 against 0.3 of compute
    assert BOUNDS.communication_ratio == pytest.approx(0.4 / 0.3)


def test_compute_bounds_a_step_on_a_fast_link() -> None:
    fast = replace(BOUNDS, rate=1e12)
    assert fast.step_s == pytest.approx(0.3)
    assert fast.dear_s == pytest.approx(0.3)


def test_dears_own_bound_pairs_each_half_with_what_hides_it() -> None:
    # The gather (0.2) is longer than forward (0.1), the scatter as long as backward.
    assert BOUNDS.dear_s == pytest.approx(0.2 + 0.2)
    slower = replace(BOUNDS, rate=80_000_000.0)
    assert slower.dear_s == pytest.approx(0.25 + 0.25)
    long_forward = replace(BOUNDS, forward_s=0.3, backward_s=0.1)
    assert long_forward.dear_s == pytest.approx(0.3 + 0.2)
    assert long_forward.step_s == pytest.approx(0.4)


def test_more_ranks_send_more() -> None:
    assert replace(BOUNDS, world_size=4).one_way_bytes == 30_000_000
    assert replace(BOUNDS, world_size=1).one_way_bytes == 0


def test_what_is_not_known_has_no_bound() -> None:
    for unknown in (replace(BOUNDS, rate=None), replace(BOUNDS, backward_s=None)):
        assert unknown.step_s is None
        assert unknown.dear_s is None
        assert unknown.communication_ratio is None


@pytest.mark.parametrize("ratio", [0.5, 1.33, 4])
def test_compute_for_a_ratio_gives_that_ratio(ratio: float) -> None:
    compute_s = compute_for_ratio(ratio, 40_000_000, 4, 25_000_000.0)
    bounds = replace(
        BOUNDS,
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        world_size=4,
        rate=25_000_000.0,
    )
    assert bounds.communication_ratio == pytest.approx(ratio)


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
