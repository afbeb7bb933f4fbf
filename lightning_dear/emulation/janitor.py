"""End what runs in the namespaces of an emulated cluster, also after the process that made them.

This file uses nothing but the standard library, because it is also run as a program:

    python janitor.py <prefix of the namespaces' names> <process that made them>

which sleeps until that process has ended, and removes what it left. A SIGKILL leaves no other way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps its names."""

_KILL_S = 5.0
_POLL_S = 0.02


def start_janitor(prefix: str) -> subprocess.Popen[bytes]:
    """Start the program above for this process; it ignores the terminal's Ctrl-C.

    The caller ends it, once it has removed its namespaces itself.

    Args:
        prefix: What the names of the namespaces begin with, and no other names.
    """
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, prefix, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Return the numbers of all processes, but for this one, that run in one of the namespaces."""
    found: set[int] = set()
    for name in namespaces:
        command = ["ip", "netns", "pids", name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        found.update(map(int, said.split()))
    return sorted(found - {os.getpid()})


def end_processes_in(namespaces: Iterable[str]) -> list[int]:
    """Kill all processes in the namespaces; return those that are left after 5 s.

    Finds children that have left their parent's session too, since a network namespace is
    inherited by all that a process starts. Blocks until they are gone.
    """
    names = list(namespaces)
    deadline = time.monotonic() + _KILL_S
    # Again and again, because a process may have started another one meanwhile.
    while (left := processes_in(names)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)
    return left


def _wait_for_end_of(process: int) -> None:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    if os.getppid() == process:  # else it ended, and its number may be another's by now
        select.select([descriptor], [], [])


def _main(prefix: str, process: int) -> None:
    _wait_for_end_of(process)
    names = [path.name for path in NAMESPACES.glob(f"{prefix}*")]
    end_processes_in(names)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
