"""When all-gathers go in a ring, and that training has the same bits with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.compression import Bf16
from lightning_dear.engine import notes
from lightning_dear.engine.notes import RingTrial
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.training.delays import Delays
from tests.training.three_ways import train_dear

WINDOW, REST = notes._WINDOW, notes._FIRST_REST * notes._WINDOW

StepOf = Callable[[int, int, bool], tuple[float, float]]
"""(step, rank, whether it gathers in a ring) -> seconds of the step, seconds it waited."""


def _in_ring(num_steps: int, step_of: StepOf, num_ranks: int = 3) -> list[bool]:
    """Plays the steps on all ranks. Returns for each step whether it gathered in a ring."""
    now_s, rank, seen = [0.0] * num_ranks, 0, []
    waits: Any = [SimpleNamespace(exposed_s=0.0) for _ in now_s]
    kinds: Any = [SimpleNamespace(can_use_rings=True, in_rings=set[int]()) for _ in now_s]
    with mock.patch.object(notes.time, "monotonic", side_effect=lambda: now_s[rank]):
        clock = SimpleNamespace(is_free=True)
        tells: list[Any] = [SimpleNamespace(statistics=one, clock=clock) for one in waits]
        trials = [RingTrial(told, kind, 5) for told, kind in zip(tells, kinds, strict=True)]
        assert all(trial.num_bytes == 1 for trial in trials)
        for step in range(num_steps):
            in_ring = bool(kinds[0].in_rings)
            assert all(kind.in_rings == ({5} if in_ring else set()) for kind in kinds)
            seen.append(in_ring)
            said = []
            for rank, trial in enumerate(trials):
                step_s, waits[rank].exposed_s = step_of(step, rank, in_ring)
                now_s[rank] += step_s
                said.append(trial.say()[0])
            maxima = [max(said)]
            for trial in trials:
                trial.hear(maxima)
    return seen


def test_a_ring_that_is_faster_stays() -> None:
    def step_of(step: int, rank: int, in_ring: bool) -> tuple[float, float]:
        # Ranks differ from step to step, and now and then all of them validate.
        step_s = (0.97 if in_ring else 1.0) + 0.01 * ((step + rank) % 3)
        return step_s + (20.0 if step % 13 == 4 else 0.0), 0.6

    assert _in_ring(12 * WINDOW, step_of) == [False] * WINDOW + [True] * 11 * WINDOW


def test_a_ring_that_is_slower_on_one_rank_is_tried_ever_less_often() -> None:
    def step_of(step: int, rank: int, in_ring: bool) -> tuple[float, float]:
        return 1.02 if in_ring and rank == 1 else 1.0, 0.9

    seen = _in_ring(6 * REST, step_of)
    tried = [step for step in range(0, len(seen), WINDOW) if seen[step]]
    assert tried == [WINDOW, REST + 2 * WINDOW, 3 * REST + 3 * WINDOW]
    assert sum(seen) == len(tried) * WINDOW


@pytest.mark.parametrize("begins", [0, 4 * WINDOW])
def test_no_ring_beside_a_rank_that_computes_most_of_the_time(begins: int) -> None:
    def step_of(step: int, rank: int, in_ring: bool) -> tuple[float, float]:
        return 0.9 if in_ring else 1.0, 0.4 if rank == 2 and step >= begins else 0.8

    seen = _in_ring(12 * WINDOW, step_of)
    assert seen == [WINDOW <= step < begins + WINDOW and begins > 0 for step in range(12 * WINDOW)]


@pytest.mark.parametrize(
    ("hosts", "hops", "can"),
    [
        ((), 1, False),
        ((0, 1), 1, False),
        ((0, 1, 2), 1, True),
        ((0, 1, 1), 1, False),
        ((0, 0, 2, 2), 2, False),
        ((0, 1, 2, 3), 1, True),
    ],
)
def test_which_hosts_can_use_rings(hosts: tuple[int, ...], hops: int, can: bool) -> None:
    collectives = mock.Mock(world=SimpleNamespace(hosts=hosts), hops=hops)
    kind: Any = PairwiseCollectives.can_use_rings
    assert kind.fget(collectives) == can


def _change(trial: Any, maxima: Any, **_: Any) -> None:
    """In place of `hear`: the other way after each round."""
    assert maxima == [1]
    trial._collectives.in_rings ^= {trial._number}


OPTIONS = {
    "parameters": ExchangeOptions(),
    "gradients": ExchangeOptions("gradients"),
    "bf16": ExchangeOptions("gradients", compressor=Bf16()),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", OPTIONS)
@distributed(world_sizes=(3, 4))
def test_to_change_between_both_ways_changes_no_bit(what: str, late: bool, world_size: int) -> None:
    delays = Delays(step_s=0.02, forward_s=0.01) if late else None
    train = partial(train_dear, "gpt", "adamw", 6, delays=delays, options=OPTIONS[what])
    in_ring = PairwiseCollectives._gather_in_ring
    with (
        mock.patch.object(PairwiseCollectives, "can_use_rings", True),
        mock.patch.object(RingTrial, "say", return_value=b"\x01"),
        mock.patch.object(RingTrial, "hear", _change),
        mock.patch.object(
            PairwiseCollectives, "_gather_in_ring", autospec=True, side_effect=in_ring
        ) as gather,
    ):
        ours = train()
    assert gather.call_count >= 3
    assert_equal_on_all_ranks(ours)
    assert_equal(ours, train())
