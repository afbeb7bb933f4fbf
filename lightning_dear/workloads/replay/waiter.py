"""A device that only lets time pass, beside a host that works meanwhile."""

import os
import threading
import time
from typing import BinaryIO

from lightning_dear.telemetry import device_work

MIN_SLEEP_S = 2e-4
"""Shorter waits are put off until there is this much to wait for: `time.sleep` returns some 0.05 to
0.1 ms late, so that many short ones would be mostly lateness."""

MIN_STANDSTILL_S = 1e-4
"""Less is what the two clocks differ by, and the short turns that other threads take."""

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Of the thread that opens it: ns computed, ns ready to run without a core, turns (Linux)."""

_of_thread = threading.local()


def work_clock() -> float:
    """Seconds for which the calling thread has computed, or would have if a core had been free.

    What is left of a time span is what the thread was blocked for. Where the kernel does not tell
    of waits for a core, they count as blocked.
    """
    return time.thread_time() + _queued_s()


def _queued_s() -> float:
    owner, file = getattr(_of_thread, "schedstat", (None, None))
    if owner != threading.get_native_id():
        # A forked child has its parent's file.
        file = _opened()
        _of_thread.schedstat = threading.get_native_id(), file
    return int(os.pread(file.fileno(), 64, 0).split()[1]) / 1e9 if file else 0.0


def _opened() -> BinaryIO | None:
    try:
        return open(_SCHEDSTAT, "rb", buffering=0)
    except OSError:
        return None


class HostTime:
    """What a `Waiter` knows of this host's time. Blocks in `sleep`, for a little longer than asked.

    `device_clock` is for seconds of the device's own work so far (see `device_work`),
    `charged_clock` for those of them that nobody has worked for.
    """

    clock = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)
    work_clock = staticmethod(work_clock)
    device_clock = staticmethod(device_work.device_work_s)
    charged_clock = staticmethod(device_work.device_work_charged_s)


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
        charge: See `charge_device_work`; applies from each step's beginning on.
        num_quick: Steps at first in which nothing is waited for, nor charged.
        host: Its clocks, or others that look alike.
    """

    def __init__(
        self, charge: float = 0.0, num_quick: int = 0, host: HostTime | None = None
    ) -> None:
        self.host = host or HostTime()
        self._num_quick = num_quick
        self._is_quick = False
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
        device_work.charge_device_work(0.0 if self._is_quick else self._charge)
        self._late_s = self.late_s
        self._free_s = self._host_s = self._left_s = self.host.clock()
        self._left_busy_s, self._left_device_s = self._busy_s(), self.host.device_clock()

    def wait(self, seconds: float) -> None:
        """Blocks until the device, when it is free, has worked for another `seconds`."""
        if self._is_quick:
            return
        now_s, busy_s = self.host.clock(), self._busy_s()
        gap_s, device_s = now_s - self._left_s, self.host.device_clock() - self._left_device_s
        if gap_s - (busy_s - self._left_busy_s) > MIN_STANDSTILL_S:
            # What the device did itself was done before now.
            self._host_s, device_s = now_s, 0.0
        else:
            self._host_s += gap_s - device_s
        self._free_s = max(self._free_s, self._host_s) + device_s + seconds
        if self._free_s - now_s >= MIN_SLEEP_S:
            self.host.sleep(self._free_s - now_s)
            now_s, busy_s = self.host.clock(), self._busy_s()
        self._left_s, self._left_busy_s = now_s, busy_s
        self._left_device_s = self.host.device_clock()

    def _busy_s(self) -> float:
        """What is charged passes asleep, but the device is at work."""
        return self.host.work_clock() + self.host.charged_clock()
