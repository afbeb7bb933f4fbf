"""What `time_trees.py` makes of measured steps."""

from __future__ import annotations

import pytest

from tests.net.time_trees import ratios_of, summary


def test_equal_trees_have_a_ratio_of_1_whatever_the_machine_does() -> None:
    """A machine that slows down evenly: pairs in both directions cancel out."""
    rounds = []
    for number in range(8):
        first, last = ("before", "again") if number % 2 == 0 else ("again", "before")
        rounds.append({first: 1.0, "now": 1.1, last: 1.2})
    own, same = ratios_of(rounds)
    assert sorted(same) == pytest.approx([1 / 1.2] * 4 + [1.2] * 4)
    assert sorted(own) == pytest.approx([1.1 / 1.2] * 4 + [1.1] * 4)


def test_a_slower_tree_is_seen() -> None:
    rounds = [{"before": 0.1, "now": 0.11, "again": 0.1}] * 4
    own, same = ratios_of(rounds)
    assert own == pytest.approx([1.1] * 4)
    assert same == [1.0] * 4
    said = summary("one", rounds)
    assert said.startswith("one: now/before 1.1000 in 4 pairs (100.000 ms before, 110.000 ms now)")
    assert said.endswith("A/A 1.0000, usually off by 0.00%")
