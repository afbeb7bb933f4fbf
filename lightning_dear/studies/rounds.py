"""Rounds of blocks: every entry once a round, each in turn first, and each behind each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

TUNING_ROUND = -1
"""Number of the first round in which entries look for their best options; the next is one less."""

T = TypeVar("T")


class Turn(NamedTuple):
    """When an entry runs a block.

    Attributes:
        entry: Its name.
        round: From 0; below, blocks in which entries look for their best options.
        place: Place in the round, from 0.
    """

    entry: str
    round: int
    place: int


def in_turn(names: Sequence[T], round_number: int) -> list[T]:
    """Return `names` in the order of one round: in turn each is first, and each follows each.

    A Williams design: from one name outwards to both sides, shifted by one from round to round; an
    odd number of names needs every second pass backwards.
    """
    count = len(names)
    turn, is_backwards = round_number % count, count % 2 and round_number // count % 2
    offsets = [(place + 1) // 2 * (-1) ** (place + 1) for place in range(count)]
    order = [names[(turn + offset) % count] for offset in offsets]
    return order[::-1] if is_backwards else order


def turns(num_rounds: Mapping[str, int]) -> Iterator[Turn]:
    """Yield the turns of a study in their order.

    Args:
        num_rounds: Entry -> it takes part in the first so many rounds.
    """
    for number in range(max(num_rounds.values())):
        entries = [entry for entry, most in num_rounds.items() if number < most]
        for place, entry in enumerate(in_turn(entries, number)):
            yield Turn(entry, number, place)


def find_best(names: Sequence[str], num_rounds: int, measure: Callable[[Turn], float]) -> str:
    """Return the name with the shortest median step.

    Args:
        names: At least one.
        num_rounds: Blocks of each.
        measure: Runs a block, and returns seconds of a step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in turns(dict.fromkeys(names, num_rounds)):
        seconds[turn.entry].append(measure(turn._replace(round=TUNING_ROUND - turn.round)))
    return min(names, key=lambda name: median(seconds[name]))
