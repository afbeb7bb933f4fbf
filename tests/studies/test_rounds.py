"""Rounds of blocks: who takes part in which, and in what order."""

from __future__ import annotations

from lightning_dear.studies.block import BlockLength
from lightning_dear.studies.records import RankBlock
from lightning_dear.studies.rounds import Candidate, run_rounds
from tests.studies.examples import rank_block


def test_the_order_changes_among_those_that_take_part() -> None:
    def candidate(name: str, num_rounds: int | None = None) -> Candidate:
        return Candidate(name, lambda length: rank_block(0, 1.0), num_rounds)

    told: list[str] = []
    candidates = [candidate("a"), candidate("b", 1), candidate("c")]
    measured = run_rounds(candidates, BlockLength(3, 1), range(3), told.append)
    ran = [(block.entry, block.round, block.place) for block, _ in measured]
    assert ran == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 0, 2),
        ("c", 1, 0),
        ("a", 1, 1),
        ("a", 2, 0),
        ("c", 2, 1),
    ]
    assert told[-1] == "c, round 3 of 3"


def test_a_warm_up_may_be_an_entry_s_own() -> None:
    lengths: list[BlockLength] = []

    def run(length: BlockLength) -> RankBlock:
        lengths.append(length)
        return rank_block(0, 1.0)

    candidates = [Candidate("usual", run), Candidate("longer", run, num_warm_up_steps=9)]
    list(run_rounds(candidates, BlockLength(3, 1), range(1), lambda name: None))
    assert lengths == [BlockLength(3, 1), BlockLength(9, 1)]
