"""Rounds of blocks: every entry once a round, each in turn first, and each behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.studies.block import BlockLength
from lightning_dear.studies.records import Block, RankBlock
from lightning_dear.studies.summary import block_of

TUNING_ROUND = -1
"""Number of the first round in which entries look for their best options; the next is one less."""

T = TypeVar("T")

Measured = tuple[Block, Sequence[RankBlock]]
"""A block, and what its ranks have measured."""


@dataclass(frozen=True)
class Candidate:
    """An entry that is ready to run.

    Attributes:
        name: For people; differs from the others'.
        run: Fits a fresh module and returns what this rank measured. Collective, blocks.
        num_rounds: It takes part in the first so many rounds; None: in all.
        num_warm_up_steps: Of its blocks; None: as many as of others'.
        number: Place among the entries.
        note: What was found by tuning, for people.
    """

    name: str
    run: Callable[[BlockLength], RankBlock]
    num_rounds: int | None = None
    num_warm_up_steps: int | None = None
    number: int = 0
    note: str = ""

    def measure(self, usual: BlockLength, round_number: int, place: int) -> Measured:
        """Run one block on all ranks; the same comes back on each. Collective, blocks."""
        length = usual
        if self.num_warm_up_steps is not None:
            length = replace(usual, num_warm_up_steps=self.num_warm_up_steps)
        # Nobody starts while others still end the block before, or load their model.
        from_all_ranks(None)
        ranks = from_all_ranks(self.run(length))
        place_of = {"number": self.number, "round": round_number, "place": place}
        return block_of(self.name, ranks, **place_of, note=self.note), ranks


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


def takes_part(num_rounds: int | None, round_number: int) -> bool:
    """Whether what takes part in the first `num_rounds` rounds (None: all) is in that one."""
    return num_rounds is None or round_number < num_rounds


def rounds_to_go(
    num_rounds: Mapping[str, int | None], blocks: Iterable[Block], wanted: int
) -> range:
    """Return the rounds still to run, behind all that have begun.

    Args:
        num_rounds: Entry -> it takes part in the first so many rounds; None: in all.
        blocks: What has been measured. A round that was broken off counts for nothing here: another
            one takes its place.
        wanted: Whole rounds, in all.
    """
    ran: dict[int, set[str]] = {}
    for block in blocks:
        if block.round >= 0:
            ran.setdefault(block.round, set()).add(block.entry)
    whole = [
        number
        for number, names in ran.items()
        if names >= {name for name, most in num_rounds.items() if takes_part(most, number)}
    ]
    begin = max(ran, default=-1) + 1
    return range(begin, begin + max(wanted - len(whole), 0))


def run_rounds(
    candidates: Sequence[Candidate],
    length: BlockLength,
    rounds: range,
    on_begin: Callable[[str], None],
) -> Iterator[Measured]:
    """Yield block after block, complete on every rank. Collective, blocks.

    Args:
        candidates: The first one is what the others are compared with.
        length: Of every block, unless a candidate says otherwise.
        rounds: Which to run.
        on_begin: Told each block's name before it runs.
    """
    for round_number in rounds:
        taking_part = [one for one in candidates if takes_part(one.num_rounds, round_number)]
        for place, candidate in enumerate(in_turn(taking_part, round_number)):
            on_begin(f"{candidate.name}, round {round_number + 1} of {rounds.stop}")
            yield candidate.measure(length, round_number, place)


def find_best(
    candidates: Sequence[Candidate],
    length: BlockLength,
    num_rounds: int,
    on_begin: Callable[[str], None],
    on_block: Callable[[Measured], None],
) -> Candidate:
    """Return the candidate with the shortest median step, the same on every rank.

    Collective, blocks; arguments as for `run_rounds`.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for round_number in range(num_rounds):
        for place, candidate in enumerate(in_turn(candidates, round_number)):
            on_begin(f"looking for the best: {candidate.name}")
            measured = candidate.measure(length, TUNING_ROUND - round_number, place)
            on_block(measured)
            seconds[candidate.name].append(measured[0].step_s)
    return min(candidates, key=lambda candidate: median(seconds[candidate.name]))
