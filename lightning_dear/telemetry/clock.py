"""Clocks that tell when a device reaches a point of the program: the host's, and a CUDA stream's.

A mark is a moment that is noted without making the host wait for the device. It can be converted to
seconds later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_dear.collectives.background import Background

Record = Callable[[Any, Any], None]
"""Called with the marks at which something began and ended."""


class HostClock:
    """Clock for the CPU, where work is done when the program reaches it.

    Observed collectives are waited for by a thread for each lane, in the order of their launches. A
    collective that ends before an earlier one of its lane is recorded as ending with that one.

    Attributes:
        is_free: Whether a mark costs no more than reading the host's clock.
    """

    def __init__(self) -> None:
        self._threads: dict[str, Background] = {}

    mark = staticmethod(time.perf_counter)
    """Returns a mark: the moment at which the device reaches this point of the program."""
    is_free = True

    def seconds(self, mark: Any) -> float:
        """Returns a mark in seconds of `time.perf_counter`; may block until the device is there."""
        known_s: float = mark
        return known_s

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Has `record` called once a launched collective has ended, without blocking the caller.

        Args:
            lane: Lane of the collective; collectives of a lane are observed one after the other.
            arrive: Function that waits for the collective.
            record: Called with the mark of this call and the mark of the collective's end.

        Returns:
            Function to call instead of `arrive`: it blocks until the thread has called `arrive`,
            and raises the exception that `arrive` raised there.
        """
        start = self.mark()

        def arrive_and_record() -> None:
            try:
                arrive()
            finally:
                record(start, self.mark())

        thread = self._threads.setdefault(lane, Background(f"dear-timeline-{lane}"))
        return thread.submit(arrive_and_record).result

    def finish(self) -> None:
        """Blocks until all observed collectives have been recorded; ends the threads."""
        # Taken at once: another thread may begin a new lane in the meantime.
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.finish()


class StreamClock:
    """Clock for a CUDA device: a mark is an event on the current stream.

    Making a clock blocks the host once, until the device has done all of its work.

    Args:
        device: Device whose streams are marked.
        cuda: torch.cuda, or a stand-in for it in tests that simulate a device.
    """

    is_free = False

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        # Lane -> stream. With one stream for all lanes, a collective that ends late would delay the
        # marks of other lanes.
        self._beside: dict[str, torch.cuda.Stream] = {}
        # Once before the mark, so that no work delays it, and once after it, so that the device has
        # passed it when the host reads its own clock.
        cuda.synchronize(device)
        self._origin = self.mark()
        cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> Any:
        """Returns a mark on the current stream; does not block."""
        event: torch.cuda.Event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """Returns a mark in seconds of `time.perf_counter`; blocks until the stream is there."""
        mark.synchronize()
        # `elapsed_time` returns milliseconds in fp32, which after hours has no fractions left. So
        # time is counted from the mark of the last call, which is usually near this one.
        self._origin_s += self._origin.elapsed_time(mark) / 1e3
        self._origin = mark
        return self._origin_s

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Has `record` called with marks of the launch and of the end; see `HostClock.observe`.

        A separate stream for each lane waits for the collective, so that the compute stream does
        not. Does not block.
        """
        start = self.mark()
        if lane not in self._beside:
            self._beside[lane] = self._cuda.Stream(self._device)
        with self._cuda.stream(self._beside[lane]):
            arrive()
            record(start, self.mark())
        return arrive

    def finish(self) -> None:
        """Blocks until the device has reached all marks."""
        self._cuda.synchronize(self._device)


Clock = HostClock | StreamClock


def clock_of(device: torch.device) -> Clock:
    """Returns a new clock that tells when work on `device` is done."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
