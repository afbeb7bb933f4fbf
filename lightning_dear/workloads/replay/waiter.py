"""A pretended device, whose layers take time but compute nothing, while the host works."""

import os
import threading
import time
from typing import BinaryIO

from lightning_dear.telemetry import device_work

MIN_SLEEP_S = 2e-4
"""Waits are added up until they are this long, because `time.sleep` returns 0.05 to 0.1 ms
late, which would dominate many short waits."""

MIN_STANDSTILL_S = 1e-4
"""Seconds above which a gap counts as blocked. Shorter ones are differences of the two clocks, and
short turns of other threads."""

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Linux's file on the calling thread: ns on a core, ns waiting for a core, time slices."""

_of_thread = threading.local()


def work_clock() -> float:
    """Return the seconds for which the calling thread has computed or waited for a core.

    In the rest of a time span the thread was blocked. If the kernel does not report waits for a
    core, they count as blocked.
    """
    return time.thread_time() + _queued_s()


def _queued_s() -> float:
    owner, file = getattr(_of_thread, "schedstat", (None, None))
    if owner != threading.get_native_id():
        # A new thread, or a forked child, which has inherited its parent's file.
        file = _opened()
        _of_thread.schedstat = threading.get_native_id(), file
    return int(os.pread(file.fileno(), 64, 0).split()[1]) / 1e9 if file else 0.0


def _opened() -> BinaryIO | None:
    try:
        return open(_SCHEDSTAT, "rb", buffering=0)
    except OSError:
        return None


class Waiter:
    """Runs the layers of a step one after the other on a pretended device.

    The host of an accelerator launches work ahead of time, so that its own work between two layers
    (hooks, copies into buckets, launching messages) overlaps with the device's computation. So a
    layer begins when the layer before has ended on the device and the host would have launched it,
    not counting the host's waits for the device. If the host was blocked between two layers
    (waiting for parameters), the layer begins no earlier than now. Waiting for a core counts as
    work, because on a machine of its own the host would have been ahead by as much. Work that the
    device itself would do between two layers (encoding gradients) takes time on the device.

    Args:
        charge: Factor for `charge_device_work`, set at the beginning of each step.
        num_quick: Number of first steps that do not wait and are not charged.

    Its clocks and its sleep are those of this host. `sleep` blocks, for a little longer than asked.
    `device_clock` returns the seconds of encoding and decoding so far, which are the device's work
    (see `device_work`). `charged_clock` returns those of them that were slept instead of computed.
    """

    clock = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)
    work_clock = staticmethod(work_clock)
    device_clock = staticmethod(device_work.device_work_s)
    charged_clock = staticmethod(device_work.device_work_charged_s)

    def __init__(self, charge: float = 0.0, num_quick: int = 0) -> None:
        self._num_quick = num_quick
        self._is_quick = False
        self._charge = charge
        self._free_s = self._host_s = self._left_s = 0.0
        self._left_busy_s = self._left_device_s = 0.0
        self._late_s = 0.0

    @property
    def late_s(self) -> float:
        """Seconds, over all steps, by which the host returned from the last layer too late.

        The pretended device had ended the layer, but the processor was busy with other processes.
        These seconds are part of the step.
        """
        return self._late_s + max(0.0, self._left_s - self._free_s - MIN_SLEEP_S)

    def begin(self) -> None:
        """Begin a step: the device is free from now on, and earlier waits are forgotten."""
        self._is_quick = self._num_quick > 0
        self._num_quick -= self._is_quick
        device_work.charge_device_work(0.0 if self._is_quick else self._charge)
        self._late_s = self.late_s
        self._free_s = self._host_s = self._left_s = self.clock()
        self._left_busy_s, self._left_device_s = self._busy_s(), self.device_clock()

    def wait(self, seconds: float) -> None:
        """Block until the device, which begins when it is free, has worked for `seconds` more."""
        if self._is_quick:
            return
        now_s, busy_s = self.clock(), self._busy_s()
        gap_s, device_s = now_s - self._left_s, self.device_clock() - self._left_device_s
        if gap_s - (busy_s - self._left_busy_s) > MIN_STANDSTILL_S:
            # The host was blocked, so the device has ended its own work before now.
            self._host_s, device_s = now_s, 0.0
        else:
            self._host_s += gap_s - device_s
        self._free_s = max(self._free_s, self._host_s) + device_s + seconds
        if self._free_s - now_s >= MIN_SLEEP_S:
            self.sleep(self._free_s - now_s)
            now_s, busy_s = self.clock(), self._busy_s()
        self._left_s, self._left_busy_s = now_s, busy_s
        self._left_device_s = self.device_clock()

    def _busy_s(self) -> float:
        """Return the host's work time plus charged time, which is slept: the device's work."""
        return self.work_clock() + self.charged_clock()
