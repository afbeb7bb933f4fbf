"""The account of waiting, on a clock that moves only when somebody sleeps."""

import pytest

from lightning_dear.workloads.replay.waiter import MAX_CREDIT_S, MAX_OWN_S, MIN_SLEEP_S, Waiter
from tests.workloads.replaying import FakeTime

TIMER_LATE_S = 7e-5


@pytest.mark.parametrize("layer_s", [1e-5, 5e-5, 1.9e-4, 3e-4, 1e-3, 0.02])
def test_the_sum_is_right_and_no_moment_is_far_off(layer_s):
    time = FakeTime(TIMER_LATE_S)
    waiter = Waiter(time.clock, time.sleep)
    for number in range(1, 1001):
        waiter.wait(layer_s, since=time.now_s)
        assert abs(time.now_s - number * layer_s) < 5e-4
    assert time.now_s == pytest.approx(1000 * layer_s, abs=MIN_SLEEP_S + TIMER_LATE_S)
    assert waiter.late_s == 0


def test_short_waits_are_put_off():
    time = FakeTime(TIMER_LATE_S)
    waiter = Waiter(time.clock, time.sleep)
    for _ in range(600):
        waiter.wait(2e-5, since=time.now_s)
    assert time.num_sleeps <= 600 * 2e-5 / MIN_SLEEP_S


def test_a_busy_processor_is_not_made_up_for():
    time = FakeTime(late_s=5e-3)
    waiter = Waiter(time.clock, time.sleep)
    for _ in range(100):
        waiter.wait(2e-3, since=time.now_s)
    lost_s = 100 * (5e-3 - MAX_CREDIT_S)
    assert time.now_s == pytest.approx(0.2 + lost_s, abs=2 * MAX_CREDIT_S)
    assert waiter.late_s == pytest.approx(lost_s)


def test_time_between_waits_is_not_made_up_for():
    time = FakeTime()
    waiter = Waiter(time.clock, time.sleep)
    for _ in range(100):
        time.now_s += 0.01
        waiter.wait(1e-3, since=time.now_s)
    assert time.now_s == pytest.approx(100 * 0.011)


@pytest.mark.parametrize("leaves", [True, False])
def test_the_replays_own_time_is_part_of_the_wait_up_to_a_limit(leaves):
    time = FakeTime()
    waiter = Waiter(time.clock, time.sleep)
    for own_s in [2e-5] * 100 + [1e-3] * 100:
        since = time.now_s
        if not leaves:
            time.now_s += own_s
        waiter.wait(2e-3, since)
        if leaves:
            time.now_s += own_s
            waiter.leave()
    lost_s = 100 * (1e-3 - MAX_OWN_S)
    assert time.now_s == pytest.approx(200 * 2e-3 + lost_s, abs=MAX_OWN_S + 1e-9)
