"""Two clocks: the host's, and a CUDA stream's, which runs behind the host."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Record = Callable[[Any, Any], None]
"""Takes the marks between which something happened."""


class Clock(Protocol):
    """Marks moments of a device without making the host wait for them."""

    def mark(self) -> Any:
        """The moment at which the device reaches this point of the program."""

    def seconds(self, mark: Any) -> float:
        """A mark on the scale of `time.perf_counter`; may block until the device is there."""

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Lets `record` know when `arrive` (which waits for a collective) would have returned.

        Returns:
            What to wait with instead of `arrive`.
        """

    def finish(self) -> None:
        """Blocks until everything observed has been recorded."""


class _Observed:
    """A collective that a watcher waits for, and how it ended."""

    def __init__(self, start: float, arrive: Callable[[], None], record: Record) -> None:
        self._start, self._arrive, self._record = start, arrive, record
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def watch(self) -> None:
        try:
            self._arrive()
        except BaseException as error:
            self._failure = error
        self._record(self._start, time.perf_counter())
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure


class HostClock:
    """For the CPU, where the program and the work it does are at the same point.

    A thread for each lane waits for its collectives in the order of their launch, so that one which
    overtakes another is recorded as ending with it.
    """

    def __init__(self) -> None:
        self._watchers: dict[str, tuple[threading.Thread, queue.SimpleQueue[_Observed | None]]] = {}

    def mark(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """See `Clock`; never blocks."""
        return mark

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """See `Clock`: what `arrive` raises in the thread is raised again by whoever waits."""
        observed = _Observed(self.mark(), arrive, record)
        if lane not in self._watchers:
            self._watchers[lane] = _start_watcher(lane)
        self._watchers[lane][1].put(observed)
        return observed.wait

    def finish(self) -> None:
        """See `Clock`; ends the threads."""
        for thread, launched in self._watchers.values():
            launched.put(None)
            thread.join()
        self._watchers.clear()


def _start_watcher(
    lane: str,
) -> tuple[threading.Thread, queue.SimpleQueue[_Observed | None]]:
    launched: queue.SimpleQueue[_Observed | None] = queue.SimpleQueue()

    def watch() -> None:
        while (observed := launched.get()) is not None:
            observed.watch()

    thread = threading.Thread(target=watch, name=f"dear-timeline-{lane}", daemon=True)
    thread.start()
    return thread, launched


class StreamClock:
    """For CUDA: marks are events on the current stream. Making one blocks the host once.

    Args:
        device: Whose streams are marked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._beside: torch.cuda.Stream = cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._origin = self.mark()
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        cuda: Any = torch.cuda
        event: torch.cuda.Event = cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """See `Clock`; blocks until the stream has passed the mark."""
        mark.synchronize()
        since_origin_ms: float = self._origin.elapsed_time(mark)
        return self._origin_s + since_origin_ms / 1e3

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """See `Clock`: a stream of its own waits, so that the compute stream does not."""
        start = self.mark()
        with torch.cuda.stream(self._beside):
            arrive()
            record(start, self.mark())
        return arrive

    def finish(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on `device` happens."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
