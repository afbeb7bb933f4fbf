"""Time spent on what an accelerator does itself, between layers, although a CPU may do it here.

Encoding and decoding are such work, launching messages is not. Who plans what to compress, or
pretends that there is an accelerator, has to tell them apart.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Marking = tuple[Callable[[], Any], "list[Any] | deque[Any]"]

_of_thread = threading.local()
_NOBODY: _Marking = (lambda: None), deque(maxlen=0)
"""Marks for nobody, which are not kept."""


@contextmanager
def device_work() -> Iterator[None]:
    """Around work on tensors; must not contain itself."""
    mark, spans = getattr(_of_thread, "marking", _NOBODY)
    begin_s, begin = time.perf_counter(), mark()
    try:
        yield
    finally:
        _of_thread.total_s = device_work_s() + time.perf_counter() - begin_s
        spans.append((begin, mark()))


def device_work_s() -> float:
    """Seconds for which the host was in `device_work` so far, in the calling thread."""
    return float(getattr(_of_thread, "total_s", 0.0))


@contextmanager
def marked_device_work(mark: Callable[[], Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list that gets what `mark` returns before and after each `device_work` within.

    Of the calling thread alone.
    """
    before = getattr(_of_thread, "marking", _NOBODY)
    spans: list[tuple[Any, Any]] = []
    _of_thread.marking = mark, spans
    try:
        yield spans
    finally:
        _of_thread.marking = before
