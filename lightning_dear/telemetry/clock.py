"""Clocks that tell when a device reaches a point of the program: the host's, and a CUDA stream's.

A mark stands for the moment at which the device reaches a point of the program. Making a mark does
not block. A mark is converted to seconds later. A lane is a kind of collective, such as
"all_gather"; see `timeline.py`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from typing_extensions import override

from lightning_dear.collectives.background import Background

Record = Callable[[Any, Any], None]
"""Function that is called with two marks: the beginning and the end of a collective."""


class HostClock:
    """Clock for the CPU, where computations are done when the call returns.

    For each lane a thread waits for its observed collectives, in the order of their launches. So if
    a collective ends before an earlier one of its lane, it is recorded as ending together with the
    earlier one.

    Attributes:
        is_free: Whether a mark costs no more than reading the host's clock. If so, waits of every
            step are timed, even if `Instruments.statistics` is never read.
    """

    def __init__(self) -> None:
        self._threads: dict[str, Background] = {}

    is_free = True

    def mark(self) -> Any:
        """Returns a mark: the present moment."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """Returns a mark in seconds of `time.perf_counter`. Does not block."""
        return float(mark)

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Makes a thread wait for a launched collective and then call `record`. Does not block.

        Args:
            lane: Lane of the collective; collectives of a lane are waited for one after the other.
            arrive: Function that waits for the collective; called in the thread.
            record: Called in the thread with the mark of this call and the mark of the collective's
                end, also if `arrive` raises.

        Returns:
            Function to call instead of `arrive`. It blocks until the thread has called `arrive` and
            `record`, and raises the exception that `arrive` raised there.
        """
        start = self.mark()

        def arrive_and_record() -> None:
            with self._beside(lane):
                try:
                    arrive()
                finally:
                    record(start, self.mark())

        thread = self._threads.setdefault(lane, Background(f"dear-timeline-{lane}"))
        return thread.submit(arrive_and_record).result

    def _beside(self, lane: str) -> AbstractContextManager[Any]:
        """Returns a context in which the end of a collective of `lane` is marked."""
        return nullcontext()

    def finish(self, *, waits: bool = True) -> None:
        """Blocks until all observed collectives have been recorded, and ends the threads.

        A collective that is observed later starts a new thread.

        Args:
            waits: Whether to block. If not, the threads end by themselves once all is recorded.
        """
        # Replaced before the loop, since another thread may add a lane in the meantime.
        threads, self._threads = self._threads, {}
        for thread in threads.values() if waits else ():
            thread.finish()


class StreamClock(HostClock):
    """Clock for a CUDA device: a mark is an event on the current stream.

    The constructor blocks the host until the device has done all of its work.

    Args:
        device: Device whose streams are marked.
        cuda: torch.cuda, or a stand-in for it in tests that simulate a device.
        in_threads: Whether threads wait for observed collectives, since that blocks the host.

    Attributes:
        is_free: False, since recording an event costs the host time; see `HostClock`.
    """

    is_free = False

    def __init__(
        self, device: torch.device, cuda: Any = torch.cuda, *, in_threads: bool = False
    ) -> None:
        super().__init__()
        self._device, self._cuda, self._in_threads = device, cuda, in_threads
        # Lane -> stream. With one stream for all lanes, a collective that takes long would delay
        # the marks of other lanes.
        self._streams: dict[str, torch.cuda.Stream] = {}
        # Synchronized before the mark, so that no work delays the mark, and after it, so that the
        # device has just passed the mark when the host reads its own clock.
        cuda.synchronize(device)
        self._origin = self.mark()
        cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    @override
    def mark(self) -> Any:
        """Returns a mark: the moment at which the current stream reaches this point.

        Does not block.
        """
        event: torch.cuda.Event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    @override
    def seconds(self, mark: Any) -> float:
        """Returns a mark in seconds of `time.perf_counter`.

        Blocks until the stream has reached the mark.
        """
        mark.synchronize()
        # `elapsed_time` returns milliseconds in fp32, which after hours cannot hold fractions of a
        # millisecond. So time is counted from the mark of the last call, which is usually near.
        self._origin_s += self._origin.elapsed_time(mark) / 1e3
        self._origin = mark
        return self._origin_s

    @override
    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Calls `record` with marks of this call and of the collective's end. Does not block.

        The second mark is on a separate stream for each lane. This stream waits for the collective,
        so that the current stream does not. Returns `arrive`. See `HostClock.observe`.
        """
        if self._in_threads:
            super().observe(lane, arrive, record)
            return arrive
        start = self.mark()
        with self._beside(lane):
            arrive()
            record(start, self.mark())
        return arrive

    @override
    def _beside(self, lane: str) -> AbstractContextManager[Any]:
        if lane not in self._streams:
            self._streams[lane] = self._cuda.Stream(self._device)
        return self._cuda.stream(self._streams[lane])  # type: ignore[no-any-return]

    @override
    def finish(self, *, waits: bool = True) -> None:
        """Blocks until the device has done all of its work, and so has reached all marks.

        Args:
            waits: Whether to block. If not, this does nothing.
        """
        super().finish(waits=waits)
        if waits:
            self._cuda.synchronize(self._device)


Clock = HostClock


def clock_of(device: torch.device, *, in_threads: bool = False) -> Clock:
    """Returns a new clock for work on `device`; `in_threads` is as in `StreamClock`.

    For a CUDA device, blocks until the device has done all of its work.
    """
    return StreamClock(device, in_threads=in_threads) if device.type == "cuda" else HostClock()
