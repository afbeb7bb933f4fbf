"""Which buckets one call of the optimizer steps together."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.bucket import Piece
from lightning_dear.optimizers import sharded

SIZES = st.lists(
    st.one_of(
        st.integers(0, 2 * sharded.MAX_RUN_NUMEL), st.integers(0, sharded.MAX_RUN_NUMEL // 8)
    ),
    max_size=40,
)


def pieces_of(numel: int) -> list[Piece]:
    """`numel` elements in up to two pieces, and none for none."""
    parts = [numel // 3, numel - numel // 3]
    return [Piece(0, 0, part, 0, 0, torch.empty(0), None) for part in parts if part]


@given(SIZES)
def test_runs_keep_the_order_and_are_as_long_as_they_may_be(sizes: list[int]) -> None:
    numbers = [3 * place for place in range(len(sizes))]
    pieces = dict(zip(numbers, map(pieces_of, sizes), strict=True))
    size_of = dict(zip(numbers, sizes, strict=True))
    runs = sharded.step_runs(numbers, pieces, sharded.MAX_RUN_NUMEL)
    assert [number for run in runs for number in run] == numbers
    for run, later in zip(runs, [*runs[1:], []], strict=False):
        total = sum(size_of[number] for number in run)
        assert run
        assert total <= sharded.MAX_RUN_NUMEL or all(size_of[number] == 0 for number in run[1:])
        if later:
            assert total + size_of[later[0]] > sharded.MAX_RUN_NUMEL


def test_small_buckets_share_a_call_and_large_ones_do_not() -> None:
    pieces = {
        0: pieces_of(sharded.MAX_RUN_NUMEL),
        1: pieces_of(10),
        2: pieces_of(20),
        3: pieces_of(30),
    }
    runs = sharded.step_runs([2, 0, 1, 3], pieces, sharded.MAX_RUN_NUMEL)
    assert runs == [[2], [0], [1, 3]]
