"""A device that only lets time pass, beside a host that works meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_SLEEP_S = 2e-4
"""Shorter waits are put off until there is this much to wait for: `time.sleep` returns some 0.05 to
0.1 ms late, so that many short ones would be mostly lateness."""


class Waiter:
    """Runs the layers of a pass one after the other on a pretended device.

    The host of an accelerator hands it work ahead of time, so that its own work between two layers
    (hooks, copies into buckets, launching messages) takes place while the device computes. So a
    layer begins here when the one before it has ended, however long the host has *computed* since.
    Time in which the host stood still between them (waiting for parameters, or for a processor that
    is busy with others) does delay the layer. If the host has more to do than the device, the pass
    ends when the host is through.

    Args:
        clock: Seconds since whenever.
        sleep: Blocks for the seconds it is given, or a little longer.
        cpu_clock: Seconds for which this thread has computed.

    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._cpu_clock = cpu_clock
        self._free_s = self._left_s = self._left_cpu_s = 0.0
        self._late_s = 0.0

    @property
    def late_s(self) -> float:
        """Seconds, over all steps, by which the host was behind the device at the last layer.

        It had more to do, or the processor was busy with others. They are part of the step.
        """
        return self._late_s + max(0.0, self._left_s - self._free_s - MIN_SLEEP_S)

    def begin(self) -> None:
        """A step begins: the device is free from now on, and what came before is forgotten."""
        self._late_s = self.late_s
        self._free_s = self._left_s = self._clock()
        self._left_cpu_s = self._cpu_clock()

    def wait(self, seconds: float) -> None:
        """Blocks until the device, when it is free, has worked for another `seconds`."""
        now_s, cpu_s = self._clock(), self._cpu_clock()
        stood_still_s = (now_s - self._left_s) - (cpu_s - self._left_cpu_s)
        self._free_s += max(0.0, stood_still_s) + seconds
        if self._free_s - now_s >= MIN_SLEEP_S:
            self._sleep(self._free_s - now_s)
            now_s, cpu_s = self._clock(), self._cpu_clock()
        self._left_s, self._left_cpu_s = now_s, cpu_s
