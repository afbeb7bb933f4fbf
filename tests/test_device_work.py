"""What counts as the device's own work."""

from __future__ import annotations

import threading
import time

import pytest

from lightning_dear.device_work import device_work, device_work_s


def test_its_time_adds_up_in_its_own_thread() -> None:
    before_s = device_work_s()
    for _ in range(2):
        with device_work():
            time.sleep(0.01)
    time.sleep(0.01)
    others: list[float] = []
    thread = threading.Thread(target=lambda: others.append(device_work_s()))
    thread.start()
    thread.join()
    assert 0.02 <= device_work_s() - before_s < 0.5
    assert others == [0.0]


def test_work_that_fails_took_its_time() -> None:
    before_s = device_work_s()
    with pytest.raises(ValueError, match="bad"), device_work():
        raise ValueError("bad")
    assert device_work_s() > before_s
