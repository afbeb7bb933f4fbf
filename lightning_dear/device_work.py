"""Time spent on what an accelerator does itself, between layers, although a CPU may do it here.

Encoding and decoding are such work, launching messages is not. Who plans what to compress, or
pretends that there is an accelerator, has to tell them apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_of_thread = threading.local()


@contextmanager
def device_work() -> Iterator[None]:
    """Around work on tensors; must not contain itself."""
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        _of_thread.total_s = device_work_s() + time.perf_counter() - begin_s


def device_work_s() -> float:
    """Seconds for which the host was in `device_work` so far, in the calling thread."""
    return float(getattr(_of_thread, "total_s", 0.0))
