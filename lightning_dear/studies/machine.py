"""What Linux says of the machine while steps run: CPU, memory, bytes on an interface.

Every function returns None where `/proc` does not say.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTimes:
    """At one moment, seconds.

    Attributes:
        wall_s: `time.perf_counter`.
        process_s: CPU time of this process, all threads.
        busy_s: CPU time of the whole machine, all cores; None if unknown.
        total_s: The same with idle time.
    """

    wall_s: float
    process_s: float
    busy_s: float | None
    total_s: float | None


def cpu_times() -> CpuTimes:
    """Return the CPU times of now."""
    busy_s, total_s = _machine_times()
    return CpuTimes(time.perf_counter(), time.process_time(), busy_s, total_s)


def machine_use(before: CpuTimes, after: CpuTimes) -> float | None:
    """Share of all cores that was busy in between, 0 to 1; None if the kernel does not tell."""
    if before.busy_s is None or after.busy_s is None:
        return None
    if before.total_s is None or after.total_s is None or after.total_s <= before.total_s:
        return None
    return (after.busy_s - before.busy_s) / (after.total_s - before.total_s)


def sent_bytes(interface: str) -> int | None:
    """Return all bytes that `interface` has sent, headers included."""
    text = _read("net/dev")
    for line in (text or "").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return None


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


def peak_memory() -> int | None:
    """Return the most resident memory since `forget_peak_memory`, bytes."""
    for line in (_read("self/status") or "").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _machine_times() -> tuple[float | None, float | None]:
    text = _read("stat")
    if text is None:
        return None, None
    ticks = [int(number) for number in text.splitlines()[0].split()[1:9]]
    # user, nice, system, idle, iowait, irq, softirq, steal
    total = sum(ticks)
    per_s = os.sysconf("SC_CLK_TCK")
    return (total - ticks[3] - ticks[4]) / per_s, total / per_s


def _read(name: str) -> str | None:
    try:
        return (_PROC / name).read_text()
    except OSError:
        return None
