"""A device that only lets time pass, beside a host that works meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_dear.telemetry.device_work import (
    charge_device_work,
    device_work_charged_s,
    device_work_s,
)
from lightning_dear.workloads.replay.work_clock import work_clock

MIN_SLEEP_S = 2e-4
"""Shorter waits are put off until there is this much to wait for: `time.sleep` returns some 0.05 to
0.1 ms late, so that many short ones would be mostly lateness."""

MIN_STANDSTILL_S = 1e-4
"""Less is what the two clocks differ by, and the short turns that other threads take."""


class Waiter:
    """Runs the layers of a step one after the other on a pretended device.

    The host of an accelerator hands it work ahead of time, so that its own work between two layers
    (hooks, copies into buckets, launching messages) takes place while the device computes. So a
    layer begins when the one before it has ended and the host *would have* got there, had it only
    computed: waiting for the device is not counted. Where the host stood still between two layers
    (waiting for parameters), the layer begins no earlier than now. Waiting for a core counts as
    work: on a machine of its own the host would have been ahead by as much. What the device would
    do itself between two layers (encoding gradients) takes its time, and is not hidden.

    Args:
        clock: Seconds since whenever.
        sleep: Blocks for the seconds it is given, or a little longer.
        work_clock: See `work_clock`.
        device_clock: Seconds of the device's own work so far; see `device_work`.
        charged_clock: Those of them that nobody has worked for.
        charge: See `charge_device_work`; applies from each step's beginning on.
        num_quick: Steps at first in which nothing is waited for, nor charged.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        work_clock: Callable[[], float] = work_clock,
        device_clock: Callable[[], float] = device_work_s,
        charged_clock: Callable[[], float] = device_work_charged_s,
        charge: float = 0.0,
        num_quick: int = 0,
    ) -> None:
        self._num_quick = num_quick
        self._is_quick = False
        self._clock = clock
        self._sleep = sleep
        self._work_clock = work_clock
        self._device_clock = device_clock
        self._charged_clock = charged_clock
        self._charge = charge
        self._free_s = self._host_s = self._left_s = 0.0
        self._left_busy_s = self._left_device_s = 0.0
        self._late_s = 0.0

    @property
    def late_s(self) -> float:
        """Seconds, over all steps, by which the last layer was left later than the device ended it.

        The processor was busy with others. They are part of the step.
        """
        return self._late_s + max(0.0, self._left_s - self._free_s - MIN_SLEEP_S)

    def begin(self) -> None:
        """A step begins: the device is free from now on, and what came before is forgotten."""
        self._is_quick = self._num_quick > 0
        self._num_quick -= self._is_quick
        charge_device_work(0.0 if self._is_quick else self._charge)
        self._late_s = self.late_s
        self._free_s = self._host_s = self._left_s = self._clock()
        self._left_busy_s, self._left_device_s = self._busy_s(), self._device_clock()

    def wait(self, seconds: float) -> None:
        """Blocks until the device, when it is free, has worked for another `seconds`."""
        if self._is_quick:
            return
        now_s, busy_s = self._clock(), self._busy_s()
        gap_s, device_s = now_s - self._left_s, self._device_clock() - self._left_device_s
        if gap_s - (busy_s - self._left_busy_s) > MIN_STANDSTILL_S:
            # What the device did itself was done before now.
            self._host_s, device_s = now_s, 0.0
        else:
            self._host_s += gap_s - device_s
        self._free_s = max(self._free_s, self._host_s) + device_s + seconds
        if self._free_s - now_s >= MIN_SLEEP_S:
            self._sleep(self._free_s - now_s)
            now_s, busy_s = self._clock(), self._busy_s()
        self._left_s, self._left_busy_s = now_s, busy_s
        self._left_device_s = self._device_clock()

    def _busy_s(self) -> float:
        """What is charged passes asleep, but the device is at work."""
        return self._work_clock() + self._charged_clock()
