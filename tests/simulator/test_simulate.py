"""Programs on ranks: by hand, with stragglers, and with computing that the link slows down."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.simulator import Stragglers, simulate
from lightning_dear.simulator.program import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
    Compute,
    Launch,
    Message,
    Program,
    Wait,
    interleaved,
)
from lightning_dear.simulator.timeline import lanes_of, spans_of


def decoupled(reduce_s: float, gather_s: float) -> Program:
    """Forward 2 s, backward 4 s with its only gradient after 1 s, step 1 s; read after 1 s."""
    return Program(
        "by hand",
        (
            *interleaved(FORWARD, 2.0, [(1.0, [Wait((ALL_GATHER, 0), from_last_step=True)])]),
            *interleaved(
                BACKWARD, 4.0, [(1.0, [Launch(Message(REDUCE_SCATTER, 0, reduce_s, 10.0))])]
            ),
            Wait((REDUCE_SCATTER, 0)),
            Compute(STEP, 1.0),
            Launch(Message(ALL_GATHER, 0, gather_s, 20.0)),
        ),
    )


@pytest.mark.parametrize(
    ("reduce_s", "gather_s", "exposed_s"),
    [(0.0, 0.0, (0, 0)), (3.0, 1.0, (0, 0)), (3.5, 1.5, (0.5, 0.5)), (10.0, 0.0, (7, 0))],
)
def test_a_step_by_hand(reduce_s: float, gather_s: float, exposed_s: tuple[float, float]) -> None:
    step = simulate(decoupled(reduce_s, gather_s), 4)
    assert step.step_s == 7 + sum(exposed_s)
    assert step.steps_s == (step.step_s,) * 4
    assert (step.exposed_s[REDUCE_SCATTER], step.exposed_s[ALL_GATHER]) == exposed_s
    assert (step.sent_bytes, step.link_busy_s) == (30, reduce_s + gather_s)


def test_the_slowest_rank_is_waited_for() -> None:
    stragglers = Stragglers(slow_share=0.25, slow_factor=2.0)
    step = simulate(decoupled(3.0, 1.0), 4, stragglers=stragglers)
    # Forward and backward take 4 and 8 s on one rank, and it waits for nothing. The others, whose
    # 2 + 4 + 1 s are shorter, do.
    assert step.step_s == pytest.approx(4 + 8 + 1)
    assert sum(step.exposed_s.values()) == pytest.approx(3 / 4 * (13 - 7))


def test_stragglers_are_drawn_alike_for_a_seed_and_differ_by_step_and_rank() -> None:
    one, again, other = (Stragglers(sigma=0.1, seed=seed).factors(1000, 3) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert len(np.unique(one)) == one.size
    assert np.median(one) == pytest.approx(1.0, abs=0.01)
    assert np.log(one).std() == pytest.approx(0.1, rel=0.05)


def test_slow_ranks_are_the_same_in_all_steps() -> None:
    factors = Stragglers(slow_share=0.1, slow_factor=3.0).factors(50, 4)
    assert (factors == 3).sum(axis=0).tolist().count(4) == 5
    assert sorted(np.unique(factors)) == [1, 3]


def test_ranks_that_are_alike_are_simulated_as_one() -> None:
    assert Stragglers().factors(4096, 2).shape == (2, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma": -1}, "sigma must be finite"),
        ({"slow_factor": 0.5}, "slow_factor finite and at least 1"),
        ({"slow_share": 1.5}, "slow_share must be between 0 and 1"),
        ({"slow_share": 0.5}, "slow_share and slow_factor go together"),
        ({"slow_factor": 2.0}, "slow_share and slow_factor go together"),
    ],
)
def test_impossible_stragglers_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Stragglers(**options)


def test_computing_takes_longer_while_the_link_is_busy() -> None:
    # Of 3 s of backward that are left 2 go with the link: 2 s of computing take 3 there.
    step = simulate(decoupled(3.0, 0.0), 2, contention=0.5)
    assert step.step_s == pytest.approx(2 + 1 + 3 + 1 + 1)
    assert step.exposed_s[REDUCE_SCATTER] == 0


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 2), st.floats(0, 0.5))
def test_contention_never_makes_steps_shorter(
    reduce_s: float, gather_s: float, contention: float, sigma: float
) -> None:
    program, stragglers = decoupled(reduce_s, gather_s), Stragglers(sigma=sigma)
    # From the beginning on: a later one may begin late and be short.
    alone = simulate(program, 3, stragglers=stragglers, warm_up_steps=0)
    shared = simulate(program, 3, stragglers=stragglers, warm_up_steps=0, contention=contention)
    assert shared.step_s >= alone.step_s * (1 - 1e-9)


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    with pytest.raises(KeyError, match="never launched"):
        simulate(Program("wrong", (Wait((REDUCE_SCATTER, 3)),)), 2)


def test_events_later_than_the_end_come_at_the_end() -> None:
    wait = Wait((ALL_GATHER, 0))
    ops = interleaved(FORWARD, 2.0, [(5.0, [wait]), (0.0, [wait]), (1.0, [wait])])
    assert ops == [wait, Compute(FORWARD, 1.0), wait, Compute(FORWARD, 1.0), wait]


def test_the_timeline_shows_two_steps() -> None:
    spans = spans_of(simulate(decoupled(3.5, 1.5), 2))
    assert lanes_of(spans) == [FORWARD, BACKWARD, REDUCE_SCATTER, STEP, ALL_GATHER, "wait"]
    assert [span.lane for span in spans].count(REDUCE_SCATTER) == 2
    assert max(span.end_s for span in spans) - spans[0].start_s == pytest.approx(16, abs=1)
