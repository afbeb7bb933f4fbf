"""What ranks hear of the end of an epoch, in rounds that are heard at once or one round later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_dear.engine.shared_end import BatchesAhead, SharedEnd


class _Rank:
    """A rank with a number of batches, and a note for each optimizer."""

    def __init__(self, number: int, num_optimizers: int, lookahead: int) -> None:
        self.number = number
        self.end = SharedEnd(lookahead=lookahead)
        self.notes = [BatchesAhead(lambda: self.end) for _ in range(num_optimizers)]

    def fetch(self, ahead: int) -> None:
        self.end.ahead = max(0, min(ahead, self.number - self.end.given))


def _play(
    numbers: Sequence[int], every: Sequence[int], *, is_late: bool, lookahead: int, epochs: int = 3
) -> tuple[list[int], int]:
    """Plays epochs in which optimizer n has a round in each `every[n]`th batch.

    Returns:
        The number of batches of each epoch, and how often ranks had to ask each other in addition.
    """
    ranks = [_Rank(number, len(every), lookahead) for number in numbers]
    before: list[list[int]] = [[0] for _ in every]
    lengths, num_asked, batch = [], 0, 0

    def ask() -> None:
        ahead = max(rank.end.ahead for rank in ranks)
        for rank in ranks:
            rank.end.hear(rank.end.given, ahead)

    for _ in range(epochs):
        for rank in ranks:
            rank.end = SharedEnd(lookahead=lookahead)
            rank.fetch(1 + lookahead)
        ask()
        while True:
            facts = {(rank.end.given, rank.end.known, rank.end.is_final) for rank in ranks}
            assert len(facts) == 1
            ((given, known, is_final),) = facts
            if given == known and not is_final:
                num_asked += 1
                ask()
            if given == ranks[0].end.known:
                break
            for rank in ranks:
                rank.end.given += 1
                rank.fetch(lookahead)
            batch += 1
            for number in [one for one, period in enumerate(every) if batch % period == 0]:
                said = [max(rank.notes[number].say()[0] for rank in ranks)]
                heard, before[number] = (before[number] if is_late else said), said
                for rank in ranks:
                    rank.notes[number].hear(heard, is_of_round_before=is_late)
        lengths.append(given)
    return lengths, num_asked


@pytest.mark.parametrize("numbers", [(8, 5, 1), (1, 8), (3,), (2, 2), (0, 1)])
@pytest.mark.parametrize("is_late", [False, True])
def test_all_end_after_the_longest_and_rounds_tell_it(
    numbers: Sequence[int], is_late: bool
) -> None:
    played = _play(numbers, [1], is_late=is_late, lookahead=1 + is_late)
    assert played == ([max(numbers)] * 3, 0)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("every", [(1, 5), (2,), (7, 3), (64,)])
@pytest.mark.parametrize("lookahead", [1, 2])
def test_rounds_that_are_rare_tell_nothing_wrong(
    is_late: bool, every: Sequence[int], lookahead: int
) -> None:
    lengths, num_asked = _play((23, 70, 40), every, is_late=is_late, lookahead=lookahead)
    assert lengths == [70] * 3
    assert num_asked or min(every) <= lookahead


def test_a_known_length_stays() -> None:
    end = SharedEnd(known=3, is_final=True)
    end.hear(0, 7)
    assert (end.known, end.is_final) == (3, True)


def test_nothing_is_heard_of_another_epoch() -> None:
    ends = [SharedEnd(lookahead=2)]
    note = BatchesAhead(lambda: ends[-1])
    assert note.say() == bytes([0])
    ends.append(SharedEnd(lookahead=2))
    note.hear([0])
    assert note.say() == bytes([0])
    note.hear([0], is_of_round_before=True)
    assert [end.is_final for end in ends] == [True, False]
