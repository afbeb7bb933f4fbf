"""What counts as the device's own work, and who is told of it."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from lightning_dear.device_work import device_work, device_work_s, marked_device_work


def test_its_time_adds_up_in_its_own_thread() -> None:
    before_s = device_work_s()
    for _ in range(2):
        with device_work():
            time.sleep(0.01)
    others: list[float] = []
    thread = threading.Thread(target=lambda: others.append(device_work_s()))
    thread.start()
    thread.join()
    assert 0.02 <= device_work_s() - before_s < 0.5
    assert others == [0.0]


def test_work_that_fails_took_its_time() -> None:
    before_s = device_work_s()
    with (
        marked_device_work(lambda: "mark") as spans,
        pytest.raises(ValueError, match="bad"),
        device_work(),
    ):
        raise ValueError("bad")
    assert device_work_s() > before_s
    assert spans == [("mark", "mark")]


def test_marks_stand_around_each_work_and_nothing_else() -> None:
    numbers = count()
    with device_work():
        pass
    with marked_device_work(lambda: next(numbers)) as spans:
        with device_work():
            pass
        with marked_device_work(lambda: "inner") as inner, device_work():
            pass
        with device_work():
            pass
    with device_work():
        pass
    assert spans == [(0, 1), (2, 3)]
    assert inner == [("inner", "inner")]
