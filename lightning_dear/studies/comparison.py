"""Rounds of blocks: every entry once a round, each in turn first, and each behind each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_dear.collectives.store import from_all_ranks
from lightning_dear.studies.block import BlockLength
from lightning_dear.studies.records import Block, RankBlock
from lightning_dear.studies.summary import in_turn

TUNING_ROUND = -1
"""Number of the first round in which entries look for their best options; the next is one less."""


@dataclass(frozen=True)
class Candidate:
    """An entry that is ready to run.

    Attributes:
        name: For people; differs from the others'.
        run: Fits a fresh module and returns what this rank measured. Collective, blocks.
        num_rounds: It takes part in the first so many rounds; None: in all.
        num_warm_up_steps: Of its blocks; None: as many as of others'.
    """

    name: str
    run: Callable[[BlockLength], RankBlock]
    num_rounds: int | None = None
    num_warm_up_steps: int | None = None

    def length_of(self, usual: BlockLength) -> BlockLength:
        """How long its blocks are."""
        if self.num_warm_up_steps is None:
            return usual
        return replace(usual, num_warm_up_steps=self.num_warm_up_steps)

    def takes_part(self, round_number: int) -> bool:
        """Whether it runs in that round."""
        return self.num_rounds is None or round_number < self.num_rounds


def run_rounds(
    candidates: Sequence[Candidate],
    length: BlockLength,
    num_rounds: int,
    on_begin: Callable[[str], None],
) -> Iterator[Block]:
    """Yield block after block, complete on every rank. Collective, blocks.

    Args:
        candidates: The first one is what the others are compared with.
        length: Of every block, unless a candidate says otherwise.
        num_rounds: How often each candidate runs that takes part in all.
        on_begin: Told each block's name before it runs.
    """
    for round_number in range(num_rounds):
        taking_part = [one for one in candidates if one.takes_part(round_number)]
        for place, candidate in enumerate(in_turn(taking_part, round_number)):
            on_begin(f"{candidate.name}, round {round_number + 1} of {num_rounds}")
            yield _run(candidate, length, round_number, place)


def find_best(
    candidates: Sequence[Candidate],
    length: BlockLength,
    num_rounds: int,
    on_begin: Callable[[str], None],
    on_block: Callable[[Block], None],
) -> Candidate:
    """Return the candidate with the shortest median step, the same on every rank.

    Collective, blocks; arguments as for `run_rounds`.
    """
    seconds: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for round_number in range(num_rounds):
        for place, candidate in enumerate(in_turn(candidates, round_number)):
            on_begin(f"looking for the best: {candidate.name}")
            block = _run(candidate, length, TUNING_ROUND - round_number, place)
            on_block(block)
            seconds[candidate.name] += [step.step_s for step in block.steps]
    return min(candidates, key=lambda candidate: median(seconds[candidate.name]))


def _run(candidate: Candidate, length: BlockLength, round_number: int, place: int) -> Block:
    # Nobody starts while others still end the block before, or load their model.
    from_all_ranks(None)
    ranks = from_all_ranks(candidate.run(candidate.length_of(length)))
    return Block(candidate.name, round_number, place, tuple(ranks))
