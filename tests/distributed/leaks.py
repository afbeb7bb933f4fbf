"""A fixture that fails a test which leaves processes, variables or a process group behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

_OWN_VARIABLES = ("PYTEST_CURRENT_TEST",)

_RESTORED_VARIABLES = ("KMP_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "TORCHINDUCTOR_")
"""Set by importing scikit-learn, by `seed_everything` and by a process's first optimizer: put back
without complaint."""

_STANDING_SERVICES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that `multiprocessing` starts once and keeps."""

_EXIT_WAIT_S = 1.0


@pytest.fixture(autouse=True)
def check_leaks() -> Iterator[None]:
    """Fail a test that leaks, after undoing the leak so that the next test starts clean."""
    children = _children()
    variables = dict(os.environ)
    yield
    leaks = [*_end_children(children), *_restore_variables(variables), *_end_process_group()]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _children() -> dict[int, str]:
    """Living child processes of this process: their command lines by number."""
    pids: list[str] = []
    # A walk through all of /proc takes 10 ms where a hundred processes run, twice a test.
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            pids += (thread / "children").read_text().split()
    found = {}
    for pid in pids:
        with suppress(OSError):
            command = Path("/proc", pid, "cmdline").read_text().replace("\0", " ").strip()
            # Not only one that has ended has no command line: one that starts has none yet.
            ended = not command and "\nState:\tZ" in Path("/proc", pid, "status").read_text()
            if not ended and not any(name in command for name in _STANDING_SERVICES):
                found[int(pid)] = command
    return found


def _children_since(before: Mapping[int, str]) -> dict[int, str]:
    return {pid: command for pid, command in _children().items() if pid not in before}


def _end_children(before: Mapping[int, str]) -> list[str]:
    end = time.monotonic() + _EXIT_WAIT_S
    while (left := _children_since(before)) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [f"process {pid} ({command})" for pid, command in sorted(left.items())]


def _restore_variables(before: Mapping[str, str]) -> list[str]:
    names = sorted({name for name, _ in before.items() ^ os.environ.items()})
    leaks = []
    for name in names:
        if name in _OWN_VARIABLES:
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
        if not name.startswith(_RESTORED_VARIABLES):
            leaks.append(f"environment variable {name}")
    return leaks


def _end_process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised process group"]
