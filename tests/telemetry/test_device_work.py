"""What device work is counted as, and what is charged for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.telemetry import device_work as module
from lightning_dear.telemetry.device_work import (
    as_device_work,
    charge_device_work,
    device_work,
    device_work_charged_s,
    device_work_cpu_s,
    device_work_s,
)
from lightning_dear.telemetry.statistics import Instruments
from lightning_dear.telemetry.timeline import Timeline


class Clocks:
    """Wall time and CPU time, which only the test lets pass."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def work(self, cpu_s: float, waiting_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s + waiting_s

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.cpu_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds + 7e-5


@pytest.fixture(name="clocks")
def _clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    clocks = Clocks()
    monkeypatch.setattr(module, "time", clocks)
    yield clocks
    charge_device_work(0.0)


def test_it_is_counted_by_both_clocks(clocks: Clocks) -> None:
    before_s, before_cpu_s = device_work_s(), device_work_cpu_s()
    with device_work():
        clocks.work(0.01, waiting_s=0.02)
    clocks.work(1.0)
    assert device_work_s() - before_s == pytest.approx(0.03)
    assert device_work_cpu_s() - before_cpu_s == pytest.approx(0.01)
    assert clocks.wall_s == pytest.approx(1.03)


def test_a_call_is_counted_and_says_what_it_returns(clocks: Clocks) -> None:
    def work(seconds: float, result: str) -> str:
        clocks.work(seconds)
        return result

    before_s, collectives = device_work_s(), PairwiseCollectives(None, None, None)
    assert as_device_work(collectives, "encode", 3, work, 0.01, "done") == "done"
    assert device_work_s() - before_s == pytest.approx(0.01)


def test_it_is_shown_as_long_as_it_takes_in_whatever_thread() -> None:
    collectives, timeline = PairwiseCollectives(None, None, None), Timeline()
    Instruments(timeline.clock, collectives).record_in(timeline)

    def work() -> None:
        as_device_work(collectives, "encode", 3, time.sleep, 0.05)

    thread = threading.Thread(target=work)
    thread.start()
    as_device_work(collectives, "decode", None, time.sleep, 0.02)
    thread.join()
    assert {(one.lane, one.name) for one in timeline.spans} == {
        ("encode", "bucket 3"),
        ("decode", "all buckets"),
    }
    for one in timeline.spans:
        slept_s = 0.05 if one.lane == "encode" else 0.02
        assert slept_s <= one.end_s - one.start_s < slept_s + 0.5


def test_nothing_is_shown_when_nothing_is_recorded() -> None:
    collectives, timeline = PairwiseCollectives(None, None, None), Timeline()
    instruments = Instruments(timeline.clock, collectives)
    instruments.record_in(timeline)
    instruments.record_in(None)
    as_device_work(collectives, "encode", 3, int)
    assert timeline.spans == []


def test_what_is_charged_passes_before_anything_else(clocks: Clocks) -> None:
    before_s, before_cpu_s = device_work_s(), device_work_cpu_s()
    charge_device_work(9.0)
    with device_work():
        clocks.work(0.01)
    assert clocks.wall_s == pytest.approx(0.01 + 0.09, abs=1e-4)
    assert device_work_s() - before_s == pytest.approx(0.10, abs=1e-4)
    assert device_work_cpu_s() - before_cpu_s == pytest.approx(0.01)
    charge_device_work(0.0)
    with device_work():
        clocks.work(0.01)
    assert clocks.wall_s == pytest.approx(0.11, abs=1e-4)


@pytest.mark.parametrize("waiting_s", [0.02, 0.2])
def test_who_waits_for_a_core_is_charged_for_the_rest(clocks: Clocks, waiting_s: float) -> None:
    """Ten times its CPU time passes, or as much as has passed."""
    charge_device_work(9.0)
    for _ in range(2):
        with device_work():
            clocks.work(0.01, waiting_s=waiting_s)
    assert clocks.wall_s == pytest.approx(2 * max(0.10, 0.01 + waiting_s), abs=1e-3)


def test_work_that_raises_is_counted_too(clocks: Clocks) -> None:
    before_s = device_work_s()
    with suppress(KeyError), device_work():
        clocks.work(0.01)
        raise KeyError
    assert device_work_s() - before_s == pytest.approx(0.01)


def test_each_thread_counts_its_own_seconds_and_all_count_cpu_time(clocks: Clocks) -> None:
    charge_device_work(1.0)
    before_s, before_cpu_s = (device_work_s(), device_work_charged_s()), device_work_cpu_s()
    counted: list[float] = []

    def work() -> None:
        with device_work():
            clocks.work(0.01)
        counted.extend([device_work_s(), device_work_charged_s()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counted == pytest.approx([0.02, 0.01], abs=1e-4)
    assert before_s == (device_work_s(), device_work_charged_s())
    assert device_work_cpu_s() - before_cpu_s == pytest.approx(0.01, abs=1e-4)


def test_short_charges_add_up(clocks: Clocks) -> None:
    """However late a sleep comes back."""
    charge_device_work(3.0)
    for _ in range(1000):
        with device_work():
            clocks.work(1e-5)
    assert clocks.wall_s == pytest.approx(1000 * 4e-5, abs=3e-4)
