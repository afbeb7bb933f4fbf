"""Rounds of blocks. Every entry runs once a round; the order changes from round to round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

TUNING_ROUND = -1
"""Number of the first round of a search for an entry's best options. The next round is -2."""


class Turn(NamedTuple):
    """One block of an entry, and when it runs.

    Attributes:
        entry: Name of the entry.
        round: Number of the round, from 0. A negative number means a search for the entry's best
            options.
        place: Position in the round, from 0.
    """

    entry: str
    round: int
    place: int


def in_turn(names: Sequence[str], round_number: int) -> list[str]:
    """Return `names` in the order of one round.

    Over the rounds each name is first equally often, and follows each other name equally often (a
    Williams design). The order goes from one name outwards to both sides, and is shifted by one
    from round to round. For an odd number of names every second pass through all shifts is
    reversed.
    """
    count = len(names)
    turn, is_backwards = round_number % count, count % 2 and round_number // count % 2
    offsets = [(place + 1) // 2 * (-1) ** (place + 1) for place in range(count)]
    order = [names[(turn + offset) % count] for offset in offsets]
    return order[::-1] if is_backwards else order


def turns(num_rounds: Mapping[str, int]) -> Iterator[Turn]:
    """Yield the blocks of a study in the order in which they run.

    Args:
        num_rounds: Entry -> number of rounds, from the first on, in which it takes part.
    """
    for number in range(max(num_rounds.values())):
        entries = [entry for entry, most in num_rounds.items() if number < most]
        for place, entry in enumerate(in_turn(entries, number)):
            yield Turn(entry, number, place)


def find_best(names: Sequence[str], num_rounds: int, measure: Callable[[Turn], float]) -> str:
    """Return the name with the shortest median step.

    Args:
        names: Names, at least one.
        num_rounds: Number of blocks of each name.
        measure: Runs a block, and returns the seconds of a step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in turns(dict.fromkeys(names, num_rounds)):
        seconds[turn.entry].append(measure(turn._replace(round=TUNING_ROUND - turn.round)))
    return min(names, key=lambda name: median(seconds[name]))
