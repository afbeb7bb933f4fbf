"""Time spent on what an accelerator does itself, between layers, although a CPU may do it here.

Encoding and decoding are such work, launching messages is not. Who plans what to compress, or
pretends that there is an accelerator, has to tell them apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_dear.collectives.work import Collectives, T

_of_thread = threading.local()

MIN_SLEEP_S = 2e-4
"""What is charged is put off until it is as much: `time.sleep` returns some 0.07 ms late."""

_charge = 0.0

_cpu_lock = threading.Lock()
_cpu_s = 0.0


def charge_device_work(charge: float) -> None:
    """Let device work in this process last longer from now on, before it is followed by anything.

    Where it is done on a part of a model only, and pretended to be done on the whole.

    Args:
        charge: Seconds for each second of CPU time; 0, as at first: none. They are slept, but for
            those in which the work waited for a core: a device would not have.
    """
    global _charge
    _charge = charge


class device_work:
    """Around work on tensors; must not contain itself."""

    def __enter__(self) -> None:
        self._begin_s, self._begin_cpu_s = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        global _cpu_s
        spent_s = time.thread_time() - self._begin_cpu_s
        with _cpu_lock:
            _cpu_s += spent_s
        waited_s = time.perf_counter() - self._begin_s - spent_s
        _sleep(max(0.0, _charge * spent_s - waited_s))
        _of_thread.total_s = device_work_s() + time.perf_counter() - self._begin_s


def as_device_work(
    collectives: Collectives, lane: str, number: int | None, work: Callable[..., T], *args: Any
) -> T:
    """Calls `work`, which must contain no other such work, and returns what it returns.

    Args:
        collectives: What moves the bucket. Whoever records its arrivals is shown the work, too.
        lane: "encode" or "decode".
        number: The bucket's, as for its collectives; None: of all buckets.
        work: In this thread, and on its current stream.
        *args: For it.
    """
    # Read once: a recording may end meanwhile.
    if (show := collectives.showing) is None:
        with device_work():
            return work(*args)
    with show(lane, "all buckets" if number is None else f"bucket {number}"), device_work():
        return work(*args)


def _sleep(seconds: float) -> None:
    owed_s = getattr(_of_thread, "owed_s", 0.0) + seconds
    if owed_s >= MIN_SLEEP_S:
        begin_s = time.perf_counter()
        time.sleep(owed_s)
        slept_s = time.perf_counter() - begin_s
        _of_thread.charged_s = device_work_charged_s() + slept_s
        owed_s -= slept_s
    # What is owed when charging ends is forgotten, or what is charged later would pay it.
    _of_thread.owed_s = owed_s if _charge else 0.0


def device_work_s() -> float:
    """Seconds for which the host was in `device_work` so far, in the calling thread."""
    return float(getattr(_of_thread, "total_s", 0.0))


def device_work_cpu_s() -> float:
    """CPU seconds of it in all threads, without what is charged."""
    return _cpu_s


def device_work_charged_s() -> float:
    """Seconds slept so far for what is charged, in the calling thread."""
    return float(getattr(_of_thread, "charged_s", 0.0))
