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

from lightning_dear.telemetry.device_work import device_work_cpu_s

_PROC = Path("/proc")


@dataclass(frozen=True)
class Counters:
    """At one moment; seconds and bytes.

    Attributes:
        wall_s: `time.perf_counter`.
        process_s: CPU time of this process, all threads.
        codec_s: The part of it that encoding and decoding took.
        busy_s: CPU time of the whole machine, all cores; None if unknown.
        total_s: The same with idle time.
        sent_bytes: Sent by an interface, headers included; None if unknown.
    """

    wall_s: float
    process_s: float
    codec_s: float
    busy_s: float | None
    total_s: float | None
    sent_bytes: int | None


def counters(interface: str = "") -> Counters:
    """Return the counters of now."""
    busy_s, total_s = _machine_times()
    own = time.perf_counter(), time.process_time(), device_work_cpu_s()
    return Counters(*own, busy_s, total_s, sent_bytes(interface))


def machine_use(before: Counters, after: Counters) -> float | None:
    """Share of all cores that was busy in between, 0 to 1; None if the kernel does not tell."""
    known = before.busy_s, before.total_s, after.busy_s, after.total_s
    if None in known or before.total_s == after.total_s:
        return None
    return (after.busy_s - before.busy_s) / (after.total_s - before.total_s)  # type: ignore[operator]


def sent_bytes(interface: str) -> int | None:
    """Return all bytes that `interface` has sent, headers included."""
    for line in _read("net/dev").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
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
    for line in _read("self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _machine_times() -> tuple[float | None, float | None]:
    ticks = [int(number) for number in _read("stat").partition("\n")[0].split()[1:9]]
    if not ticks:
        return None, None
    # user, nice, system, idle, iowait, irq, softirq, steal
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, sum(ticks) / per_s


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except OSError:
        return ""
