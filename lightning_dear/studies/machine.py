"""Counters of the machine while steps run, from `/proc`: CPU, memory, bytes on an interface.

A value that `/proc` does not have is nan.
"""

import ctypes
import gc
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_dear.telemetry.device_work import device_work_cpu_s

_PROC = Path("/proc")


class Counters(NamedTuple):
    """Counters at one moment, or their differences between two moments; in seconds and bytes.

    Attributes:
        wall_s: `time.perf_counter`.
        process_s: CPU time of this process, all threads.
        codec_s: CPU time of this process in encoding and decoding.
        busy_s: CPU time of the whole machine, all cores.
        total_s: Same as `busy_s`, plus idle time.
        sent_bytes: Bytes that an interface has sent, headers included.
    """

    wall_s: float
    process_s: float
    codec_s: float
    busy_s: float
    total_s: float
    sent_bytes: float

    def since(self, before: "Counters") -> "Counters":
        """Return the differences between these counters and earlier ones."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def machine_use(self) -> float:
        """Busy share of all cores, 0 to 1, if these are differences between two moments."""
        return self.busy_s / self.total_s if self.total_s else math.nan


def counters(interface: str = "") -> Counters:
    """Return the present counters; `interface` is the network interface whose bytes count."""
    own = time.perf_counter(), time.process_time(), device_work_cpu_s()
    return Counters(*own, *_machine_times(), sent_bytes(interface))


def sent_bytes(interface: str) -> float:
    """Return all bytes that `interface` has sent, headers included."""
    counts = re.search(rf"^ *{re.escape(interface)}:(.*)", _read("net/dev"), re.MULTILINE)
    return int(counts[1].split()[8]) if counts else math.nan


def forget_peak_memory() -> bool:
    """Collect garbage and reset `peak_memory`. Return False if the system does not allow that."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Returns freed pages to the system. Otherwise those of an earlier block would count.
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5")
        return True
    return False


def peak_memory() -> float:
    """Return the most resident memory since `forget_peak_memory`, in bytes."""
    most = re.search(r"^VmHWM:\s*(\d+)", _read("self/status"), re.MULTILINE)
    return int(most[1]) * 1024 if most else math.nan


def _machine_times() -> tuple[float, float]:
    ticks = [int(number) for number in _read("stat").partition("\n")[0].split()[1:9]]
    if not ticks:
        return math.nan, math.nan
    # user, nice, system, idle, iowait, irq, softirq, steal
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, sum(ticks) / per_s


def _read(name: str) -> str:
    with suppress(OSError):
        return (_PROC / name).read_text()
    return ""
