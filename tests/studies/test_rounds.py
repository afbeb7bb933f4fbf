"""Rounds of blocks: who takes part in which, and in what order."""

from __future__ import annotations

from lightning_dear.studies.rounds import Turn, find_best, turns


def test_the_order_changes_among_those_that_take_part() -> None:
    assert [tuple(turn) for turn in turns({"a": 3, "b": 1, "c": 3})] == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 0, 2),
        ("c", 1, 0),
        ("a", 1, 1),
        ("a", 2, 0),
        ("c", 2, 1),
    ]


def test_the_best_has_the_shortest_median_of_rounds_that_do_not_count() -> None:
    seconds = {"a": [1.0, 9.0, 9.0], "b": [2.0, 2.0, 2.0]}
    told: list[Turn] = []

    def measure(turn: Turn) -> float:
        told.append(turn)
        return seconds[turn.entry][-1 - turn.round]

    assert find_best(["a", "b"], 3, measure) == "b"
    assert [(turn.entry, turn.round) for turn in told] == [
        *[("a", -1), ("b", -1), ("b", -2), ("a", -2), ("a", -3), ("b", -3)]
    ]
