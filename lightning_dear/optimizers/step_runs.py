"""Which buckets one call of the optimizer steps together, and which parts it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_dear.bucket import Piece

MAX_RUN_NUMEL = 1 << 16
"""Elements of shards that are stepped at once."""


def step_runs(numbers: Sequence[int], pieces: Mapping[int, Sequence[Piece]]) -> list[list[int]]:
    """Cuts a list of buckets into runs that one call of the optimizer steps, small ones together.

    A call costs as much as stepping some tens of thousands of elements, and the first gather of a
    run waits for the whole run.
    """
    runs: list[list[int]] = []
    room = 0
    for number in numbers:
        numel = sum(piece.numel for piece in pieces[number])
        if not runs or numel > room:
            runs.append([])
            room = MAX_RUN_NUMEL
        runs[-1].append(number)
        room -= numel
    return runs


def mark_stepped(pieces: Iterable[Piece]) -> list[int]:
    """Notes which pieces a step has just changed; returns their parameters' numbers."""
    stepped = [piece for piece in pieces if piece.parameter.grad is not None]
    for piece in stepped:
        piece.was_stepped = True
    return [piece.tensor_index for piece in stepped]
