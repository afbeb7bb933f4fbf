"""`LocalSteps` and `Schedule` without any rank: defaults, refusals, and the law's numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

from lightning_dear.local_steps import LocalSteps, hiding
from lightning_dear.local_steps.schedule import Schedule


@pytest.mark.parametrize(
    ("every", "modules", "schedule"),
    [
        (32, 10, Schedule(32, 4, 4, 0.125)),
        (32, 3, Schedule(32, 2, 8, 0.25)),
        (8, 10, Schedule(8, 4, 1, 0.125)),
        (9, 10, Schedule(9, 3, 1, 1 / 9)),
        (7, 10, Schedule(7, 1, 3, 3 / 7)),
        (4, 10, Schedule(4, 4, 0, 0.0)),
        (1, 10, Schedule(1, 1, 0, 0.0)),
    ],
)
def test_defaults(every: int, modules: int, schedule: Schedule) -> None:
    assert LocalSteps(every=every).schedule(modules) == schedule


def test_a_replica_keeps_at_most_half_of_its_own_values_by_itself() -> None:
    assert LocalSteps(every=32, delay=16).schedule(10).mix == 0.5
    assert LocalSteps(every=32, delay=28).schedule(10).mix == 0.5
    assert LocalSteps(every=32, delay=28, mix=0.75).schedule(10).mix == 0.75


@pytest.mark.parametrize(("every", "momentum"), [(1, 0), (8, 0), (9, 0.5), (32, 0.5)])
def test_few_steps_have_no_outer_momentum(every: int, momentum: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    (group,) = LocalSteps(every=every).new_outer(parameters).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (1, momentum, momentum > 0)
    own = LocalSteps(every=every, outer=partial(SGD, lr=0.7)).new_outer(parameters)
    assert own.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.0}, "whole number"),
        ({"every": True}, "whole number"),
        ({"every": 8, "fragments": 3}, "must divide every=8"),
        ({"every": 8, "fragments": 0}, "1 or more"),
        ({"every": 8, "fragments": [["a"], ["b"], ["c"]]}, "must divide"),
        ({"every": 8, "fragments": "encoder"}, "list of names"),
        ({"every": 8, "delay": 8}, "less than every=8"),
        ({"every": 8, "delay": -1}, "0 or more"),
        ({"mix": 1.5}, "from 0 to 1"),
        ({"mix": "half"}, "from 0 to 1"),
        ({"outer": 0.7}, "make an optimizer"),
        ({"dense_steps": -1}, "0 or more"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        LocalSteps(**options)


def test_more_fragments_than_modules() -> None:
    with pytest.raises(ValueError, match="more than the 3 modules"):
        LocalSteps(every=8, fragments=4).schedule(3)


@given(st.data())
def test_each_exchange_is_sent_once_and_merged_once(data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, 5))
    every = fragments * data.draw(st.integers(1, 6))
    delay = data.draw(st.integers(0, every - 1))
    law = Schedule(every, fragments, delay, 0.5)
    sent: dict[int, int] = {}
    for step in range(1, 4 * every):
        out, back = law.sent_after(step), law.merged_after(step)
        if out is not None:
            assert out not in sent, "sent again before it was merged"
            sent[out] = step
        if back is not None:
            assert sent.pop(back) == step - delay
            assert back == (step // law.interval - 1) % fragments
        elif step % law.interval == 0:
            # Its send would not have come after the first step.
            assert step <= delay


def test_rounds_hide_behind_computing() -> None:
    assert hiding([(0.5, 0.01), (0.5, 0.02)], 8) is None
    # Messages of 9 s, computing of 0.3 s: 31 steps of a round, with a margin of a quarter 39.
    found = hiding([(9.3, 9.0), (9.3, 8.9)], 8)
    assert found == LocalSteps(every=64, fragments=4, delay=10)
    # The way back begins after a step, so that a delay of one step would always wait for it.
    fast = LocalSteps(every=4, fragments=4, delay=2)
    assert hiding([(0.6, 0.3)], 8) == hiding([(0.33, 0.03)], 8) == fast
    slow = hiding([(1000.0, 999.99)], 1)
    assert slow == LocalSteps(every=512, fragments=1, delay=511)
