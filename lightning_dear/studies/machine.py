"""What Linux says of the machine while steps run: CPU, memory, bytes on an interface.

What `/proc` does not say is nan.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning_dear.telemetry.device_work import device_work_cpu_s

_PROC = Path("/proc")


class Counters(NamedTuple):
    """At one moment, or since another one; seconds and bytes.

    Attributes:
        wall_s: `time.perf_counter`.
        process_s: CPU time of this process, all threads.
        codec_s: The part of it that encoding and decoding took.
        busy_s: CPU time of the whole machine, all cores.
        total_s: The same with idle time.
        sent_bytes: Sent by an interface, headers included.
    """

    wall_s: float
    process_s: float
    codec_s: float
    busy_s: float
    total_s: float
    sent_bytes: float

    def since(self, before: Counters) -> Counters:
        """What has been counted in between."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def machine_use(self) -> float:
        """Share of all cores that was busy, 0 to 1, of what has been counted in between."""
        return self.busy_s / self.total_s if self.total_s else math.nan


def counters(interface: str = "") -> Counters:
    """Return the counters of now."""
    own = time.perf_counter(), time.process_time(), device_work_cpu_s()
    return Counters(*own, *_machine_times(), sent_bytes(interface))


def sent_bytes(interface: str) -> float:
    """Return all bytes that `interface` has sent, headers included."""
    for line in _read("net/dev").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return math.nan


def forget_peak_memory() -> bool:
    """Begin a new count of `peak_memory`; whether that is possible. Frees what it can."""
    gc.collect()
    with suppress(OSError, AttributeError):
        # Else pages that the block before has freed would count.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> float:
    """Return the most resident memory since `forget_peak_memory`, bytes."""
    for line in _read("self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return math.nan


def _machine_times() -> tuple[float, float]:
    ticks = [int(number) for number in _read("stat").partition("\n")[0].split()[1:9]]
    if not ticks:
        return math.nan, math.nan
    # user, nice, system, idle, iowait, irq, softirq, steal
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, sum(ticks) / per_s


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except OSError:
        return ""
