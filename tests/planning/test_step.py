"""The link: first come first served, by priority, and one message at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dear.planning.step import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
    Compute,
    Launch,
    LinkQueue,
    Message,
    Op,
    Phase,
    Run,
    Wait,
    interleaved,
)


def message(number: int, seconds: float, priority: int = 0) -> Message:
    return Message("m", number, seconds, priority=priority)


def carried(queue: LinkQueue) -> list[tuple[int, float, float]]:
    with pytest.raises(KeyError):
        queue.end_s(0, ("nothing", 0))
    return [(one.bucket, one.begin_s, one.end_s) for one in queue.spans]


def test_first_come_first_served() -> None:
    queue = LinkQueue()
    queue.launch(0, message(0, 3.0), 1.0)
    queue.launch(0, message(1, 1.0), 2.0)
    queue.launch(0, message(2, 1.0), 9.0)
    assert carried(queue) == [(0, 1, 4), (1, 4, 5), (2, 9, 10)]


def test_what_is_urgent_overtakes_what_waits_but_not_what_has_begun() -> None:
    queue = LinkQueue()
    queue.launch(0, message(0, 3.0, priority=5), 0.0)
    queue.launch(0, message(1, 1.0, priority=4), 0.0)
    queue.launch(0, message(2, 1.0, priority=0), 1.0)
    assert carried(queue) == [(1, 0, 1), (2, 1, 2), (0, 2, 5)]


def test_the_timeline_is_made_no_further_than_asked() -> None:
    queue = LinkQueue()
    for number in range(3):
        queue.launch(0, message(number, 2.0, priority=1), 0.0)
    assert queue.end_s(0, ("m", 0)) == 2
    assert len(queue.spans) == 1
    queue.launch(0, message(3, 1.0), 2.0)
    assert [number for number, *_ in carried(queue)] == [0, 3, 1, 2]


def test_steps_are_apart() -> None:
    queue = LinkQueue()
    queue.launch(0, message(0, 1.0), 0.0)
    queue.launch(1, message(0, 1.0), 5.0)
    assert (queue.end_s(0, ("m", 0)), queue.end_s(1, ("m", 0))) == (1, 6)


def test_what_was_never_launched_is_named() -> None:
    with pytest.raises(KeyError, match="m 7 of step 0 was never launched"):
        LinkQueue().end_s(0, ("m", 7))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2)), max_size=20),
    st.sets(st.integers(0, 19)),
)
def test_the_link_carries_all_one_at_a_time_and_never_rests_in_vain(
    asked: list[tuple[int, int, int]], waited: set[int]
) -> None:
    queue, ready_s = LinkQueue(), 0.0
    launched = []
    for number, (pause, seconds, priority) in enumerate(asked):
        ready_s += pause
        queue.launch(0, message(number, float(seconds), priority), ready_s)
        launched.append(ready_s)
        if number in waited:
            # Whoever waits launches nothing meanwhile.
            ready_s = max(ready_s, queue.end_s(0, ("m", number)))
    spans = carried(queue)
    assert sorted(number for number, *_ in spans) == list(range(len(asked)))
    free_s = 0.0
    for place, (number, begin_s, end_s) in enumerate(spans):
        assert begin_s >= launched[number]
        assert begin_s >= free_s
        assert begin_s == max(free_s, min(launched[other] for other, *_ in spans[place:]))
        free_s = end_s


def test_a_step_is_run_by_hand() -> None:
    run = Run()
    ops: list[Op] = [
        Wait((ALL_GATHER, 0), from_last_step=True),
        Compute(FORWARD, 2.0),
        Launch(Message(REDUCE_SCATTER, 0, 3.0)),
        Compute(BACKWARD, 1.0),
        Wait((REDUCE_SCATTER, 0)),
        Compute(STEP, 1.0),
        Launch(Message(ALL_GATHER, 0, 4.0)),
    ]
    # The first step has none to wait for.
    run.do(0, ops)
    assert run.clock_s == 2 + 3 + 1
    run.do(1, ops)
    assert run.clock_s == 6 + 4 + 2 + 3 + 1
    waits = [(one.step, one.kind, one.begin_s, one.end_s) for one in run.busy if one.is_wait]
    assert waits == [(0, REDUCE_SCATTER, 3, 5), (1, ALL_GATHER, 6, 10), (1, REDUCE_SCATTER, 13, 15)]


def test_events_later_than_the_end_come_at_the_end() -> None:
    wait = Wait((ALL_GATHER, 0))
    ops = interleaved(FORWARD, 2.0, [(5.0, [wait]), (0.0, [wait]), (1.0, [wait])])
    computed = [Compute(FORWARD, 1.0, at_s) for at_s in (1.0, 2.0)]
    begin, end = Phase(begins=True), Phase(begins=False)
    assert ops == [begin, wait, computed[0], wait, computed[1], wait, end]


def test_what_interrupts_a_phase_delays_all_that_comes_later() -> None:
    run = Run()
    events = [(1.0, [Compute(STEP, 0.5)]), (2.0, [Launch(Message(REDUCE_SCATTER, 0, 3.0))])]
    run.do(0, interleaved(BACKWARD, 4.0, events))
    assert run.clock_s == 4.5
    assert run.link.end_s(0, (REDUCE_SCATTER, 0)) == 5.5
