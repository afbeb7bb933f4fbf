"""The pretended device, on clocks that move only when somebody sleeps, works or stands still."""

import pytest

from lightning_dear.workloads.replay.waiter import MIN_SLEEP_S, Waiter
from tests.workloads.replaying import FakeTime

TIMER_LATE_S = 7e-5


def new_waiter(time):
    waiter = Waiter()
    time.drive(waiter)
    waiter.begin()
    return waiter


@pytest.mark.parametrize("layer_s", [1e-5, 5e-5, 1.9e-4, 3e-4, 1e-3, 0.02])
def test_the_sum_is_right_and_no_moment_is_far_off(layer_s):
    time = FakeTime(TIMER_LATE_S)
    waiter = new_waiter(time)
    for number in range(1, 1001):
        waiter.wait(layer_s)
        assert abs(time.now_s - number * layer_s) < 5e-4
    assert time.now_s == pytest.approx(1000 * layer_s, abs=MIN_SLEEP_S + TIMER_LATE_S)
    assert waiter.late_s == 0


def test_quick_steps_take_no_time():
    time = FakeTime()
    waiter = Waiter(num_quick=2)
    time.drive(waiter)
    took = []
    for _ in range(4):
        begin_s = time.now_s
        waiter.begin()
        time.work(2e-3)
        for _ in range(10):
            waiter.wait(1e-2)
        took.append(time.now_s - begin_s)
    assert took == pytest.approx([2e-3, 2e-3, 0.102, 0.102], abs=1e-3)


def test_short_waits_are_put_off():
    time = FakeTime(TIMER_LATE_S)
    waiter = new_waiter(time)
    for _ in range(600):
        waiter.wait(2e-5)
    assert time.num_sleeps <= 600 * 2e-5 / MIN_SLEEP_S


@pytest.mark.parametrize("device_s", [0.0, 1e-3])
def test_the_host_works_beside_the_device_which_works_itself(device_s):
    time = FakeTime()
    waiter = new_waiter(time)
    for number in range(100):
        time.work_as_device(device_s)
        time.work(3e-3 if number % 2 else 2e-4)
        waiter.wait(2e-3)
    assert time.now_s == pytest.approx(0.2 + 100 * device_s, abs=2.5e-3)


def test_what_is_charged_lets_the_host_work_beside_the_device_all_the_same():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(100):
        time.work(4e-3)
        time.work_as_device(1e-3)
        time.charge(9e-3)
        waiter.wait(2e-2)
    assert time.now_s == pytest.approx(100 * 0.03 + 4e-3)


def test_what_the_device_does_after_it_stood_still_is_not_counted_twice():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(10):
        time.stand_still(0.01)
        time.work_as_device(0.02)
        waiter.wait(1e-3)
        time.work_as_device(0.03)
        waiter.wait(1e-3)
    assert time.now_s == pytest.approx(10 * 0.062)


def test_a_host_that_cannot_keep_up_counts():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(100):
        time.work(5e-3)
        waiter.wait(2e-3)
    assert time.now_s == pytest.approx(0.502)


def test_a_layer_begins_when_the_host_got_there():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(10):
        time.work(5e-3)
        waiter.wait(1e-3)
    waiter.wait(0.06)
    assert time.now_s == pytest.approx(0.05 + 0.06 + 1e-3)


def test_a_layer_begins_when_what_the_host_waited_for_is_there():
    time = FakeTime()
    waiter = new_waiter(time)
    waiter.wait(1e-3)
    time.work(0.01)
    time.stand_still(0.01)
    waiter.wait(0.02)
    assert time.now_s == pytest.approx(0.041)


def test_a_host_that_stands_still_holds_up_the_device():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(100):
        time.stand_still(0.01)
        waiter.wait(2e-3)
    assert time.now_s == pytest.approx(100 * 0.012)
    assert waiter.late_s == 0


def test_what_lies_between_two_steps_is_not_the_devices():
    time = FakeTime()
    waiter = new_waiter(time)
    for _ in range(10):
        time.work(0.05)
        waiter.begin()
        waiter.wait(0.02)
        time.work(0.03)
        waiter.wait(0.001)
    assert time.now_s == pytest.approx(10 * 0.1)
    assert waiter.late_s == pytest.approx(10 * (0.05 - 0.031 - MIN_SLEEP_S))
