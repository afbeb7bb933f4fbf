"""Programs, step after step: by hand, and as a timeline."""

from __future__ import annotations

import pytest

from lightning_dear.planning.step import (
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
from lightning_dear.simulator import simulate


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
    step = simulate(decoupled(reduce_s, gather_s))
    assert step.step_s == 7 + sum(exposed_s)
    assert (step.exposed_s[REDUCE_SCATTER], step.exposed_s[ALL_GATHER]) == exposed_s
    assert step.program.sent_bytes == 30


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    with pytest.raises(KeyError, match="never launched"):
        simulate(Program("wrong", (Wait((REDUCE_SCATTER, 3)),)))
