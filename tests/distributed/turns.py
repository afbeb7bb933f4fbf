"""Whose turn it is: what measures runs alone, while other workers of pytest-xdist stand still."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(door: Path, room: Path, *, alone: bool) -> Iterator[None]:
    """Around a test. Blocks while another process's test runs alone; if `alone`, while any does.

    Who is to run alone waits at the door, so that no new test gets past it.

    Args:
        door: A file or folder to lock for a moment. Any will do, as it is not touched.
        room: Another, to lock during the test.
        alone: Whether nothing else may run meanwhile.
    """
    with _opened(door) as outside, _opened(room) as inside:
        fcntl.flock(outside, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(outside, fcntl.LOCK_UN)
        yield


@contextmanager
def key(path: Path) -> Iterator[None]:
    """Around a test that none of its own kind may run beside. Blocks while one does.

    Args:
        path: A file or folder to lock during the test. Any will do, as it is not touched.
    """
    with _opened(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # children that were forked meanwhile would keep it
        os.close(file)
