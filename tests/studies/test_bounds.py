"""How short a step could be."""

from __future__ import annotations

import pytest

from lightning_dear.studies.summary import bounds_of
from tests.studies.examples import POINT


def test_the_link_bounds_a_step_when_it_takes_longest() -> None:
    bounds = bounds_of(POINT)
    assert bounds["bound_s"] == pytest.approx(0.4)  # twice 0.2 against 0.3 of compute
    assert bounds["communication_ratio"] == pytest.approx(0.4 / 0.3)


def test_compute_bounds_a_step_on_a_fast_link() -> None:
    fast = bounds_of({**POINT, "one_way_s": 1e-5})
    assert fast["bound_s"] == pytest.approx(0.3)
    assert fast["dear_bound_s"] == pytest.approx(0.3)


def test_dears_own_bound_pairs_each_half_with_what_hides_it() -> None:
    # The gather (0.2) is longer than forward (0.1), the scatter as long as backward.
    assert bounds_of(POINT)["dear_bound_s"] == pytest.approx(0.2 + 0.2)
    assert bounds_of({**POINT, "one_way_s": 0.25})["dear_bound_s"] == pytest.approx(0.25 + 0.25)
    long_forward = bounds_of({**POINT, "forward_s": 0.3, "backward_s": 0.1})
    assert long_forward["dear_bound_s"] == pytest.approx(0.3 + 0.2)
    assert long_forward["bound_s"] == pytest.approx(0.4)


@pytest.mark.parametrize("unknown", ["one_way_s", "backward_s"])
def test_what_is_not_known_has_no_bound(unknown: str) -> None:
    assert set(bounds_of({**POINT, unknown: None}).values()) == {None}
