"""Measures device work: work on tensors that an accelerator would do itself, if there were one.

Encoding and decoding are device work, launching messages is not. On the CPU both take time of the
host. Planners that decide what to compress, and replays that simulate an accelerator, need to tell
them apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_dear.collectives.work import Collectives, T

_of_thread = threading.local()

MIN_SLEEP_S = 2e-4
"""Sleeps that `charge_device_work` asks for are put off until they add up to this many seconds, as
`time.sleep` returns about 0.07 ms late."""

_charge = 0.0

_cpu_lock = threading.Lock()
_cpu_s = 0.0


def charge_device_work(charge: float) -> None:
    """Makes device work in this process take longer from now on, by a sleep after it.

    For replays that do the work on a part of a model and simulate the whole model.

    Args:
        charge: Seconds to sleep for each second of CPU time that device work takes. Time in which
            the work waited for a CPU core is deducted, since a device would not have waited. 0, the
            initial value, means no sleep.
    """
    global _charge
    _charge = charge


class device_work:
    """Context manager around device work, whose time it measures; must not be nested."""

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
    """Calls `work(*args)` as device work, and returns its result.

    Args:
        collectives: Collectives of the bucket. If a timeline records them, it records the work,
            too.
        lane: "encode" or "decode".
        number: Tag of the bucket, as its collectives have it. None means all buckets.
        work: Device work, called in this thread; must not call `as_device_work` itself.
        *args: Arguments of `work`.
    """
    # Read once, since another thread may end the recording in the meantime.
    if (show := collectives.showing) is None:
        with device_work():
            return work(*args)
    with show(lane, "all buckets" if number is None else f"bucket {number}"), device_work():
        return work(*args)


def _sleep(seconds: float) -> None:
    """Sleeps, or puts the sleep off to a later call if it is too short; see `MIN_SLEEP_S`."""
    owed_s = getattr(_of_thread, "owed_s", 0.0) + seconds
    if owed_s >= MIN_SLEEP_S:
        begin_s = time.perf_counter()
        time.sleep(owed_s)
        slept_s = time.perf_counter() - begin_s
        _of_thread.charged_s = device_work_charged_s() + slept_s
        owed_s -= slept_s
    # Without a charge the put-off sleep is dropped, or it would count for a later charge.
    _of_thread.owed_s = owed_s if _charge else 0.0


def device_work_s() -> float:
    """Returns the seconds that the calling thread has spent in `device_work` so far."""
    return float(getattr(_of_thread, "total_s", 0.0))


def device_work_cpu_s() -> float:
    """Returns the CPU seconds of device work in all threads so far, without sleeps."""
    return _cpu_s


def device_work_charged_s() -> float:
    """Returns the seconds that the calling thread has slept so far; see `charge_device_work`."""
    return float(getattr(_of_thread, "charged_s", 0.0))
