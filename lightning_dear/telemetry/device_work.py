"""Measures device work: work on tensors that an accelerator would do itself, if there were one.

Encoding and decoding are device work. Launching messages is not. On a CPU both take time of the
host. Planners that decide which buckets are compressed, and replays that simulate an accelerator,
need the two times apart. (A replay trains a part of a model and simulates the rest of it.)
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_dear.collectives.work import Collectives, T

_of_thread = threading.local()

MIN_SLEEP_S = 2e-4
"""The sleeps of `charge_device_work` are put off until they add up to this many seconds, since each
`time.sleep` takes about 0.07 ms longer than asked for."""

_charge = 0.0

_cpu_lock = threading.Lock()
_cpu_s = 0.0


def charge_device_work(charge: float) -> None:
    """Makes device work in all threads of this process take longer from now on, by sleeps after it.

    For replays, which do the work on a part of a model and simulate the whole model.

    Args:
        charge: Seconds to sleep for each second of CPU time that device work takes. Time in which
            the work waited for a CPU core is deducted from the sleep, since an accelerator would
            not have waited. 0, the initial value, means no sleep.
    """
    global _charge
    _charge = charge


class device_work:
    """Context manager that adds the time of the device work in it to the totals below.

    It may also sleep at its end: see `charge_device_work`. Must not be nested, since the time of
    inner work would count twice.
    """

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
        collectives: Collectives of the bucket. If a timeline records them, it records the work, as
            a span.
        lane: Lane of the span: "encode" or "decode".
        number: Tag of the bucket's messages, for the name of the span. None means all buckets.
        work: Device work, called in this thread. Must not call `as_device_work` itself.
        *args: Arguments of `work`.
    """
    # Read once, since another thread may end the recording in the meantime.
    if (show := collectives.showing) is None:
        with device_work():
            return work(*args)
    with show(lane, "all buckets" if number is None else f"bucket {number}"), device_work():
        return work(*args)


def _sleep(seconds: float) -> None:
    """Sleeps for `seconds` and for earlier sleeps that were put off.

    If that is less than `MIN_SLEEP_S`, puts all of it off to a later call of this thread.
    """
    owed_s = getattr(_of_thread, "owed_s", 0.0) + seconds
    if owed_s >= MIN_SLEEP_S:
        begin_s = time.perf_counter()
        time.sleep(owed_s)
        slept_s = time.perf_counter() - begin_s
        _of_thread.charged_s = device_work_charged_s() + slept_s
        owed_s -= slept_s
    # If there is no charge any more, a sleep that was put off is dropped. Otherwise it would be
    # made under a later charge.
    _of_thread.owed_s = owed_s if _charge else 0.0


def device_work_s() -> float:
    """Returns the seconds that the calling thread has spent in `device_work`, with sleeps."""
    return float(getattr(_of_thread, "total_s", 0.0))


def device_work_cpu_s() -> float:
    """Returns the CPU seconds of device work in all threads so far, without sleeps."""
    return _cpu_s


def device_work_charged_s() -> float:
    """Returns the seconds that the calling thread has slept because of `charge_device_work`."""
    return float(getattr(_of_thread, "charged_s", 0.0))
