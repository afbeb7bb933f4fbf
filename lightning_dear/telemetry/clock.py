"""Two clocks: the host's, and a CUDA stream's, which runs behind the host.

They mark moments of a device without making the host wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_dear.collectives.background import Background

Record = Callable[[Any, Any], None]
"""Takes the marks between which something happened."""


class HostClock:
    """For the CPU, where the program and the work it does are at the same point.

    A thread for each lane waits for its collectives in the order of their launch, so that one which
    overtakes another is recorded as ending with it.

    Attributes:
        is_free: Whether marks cost no more than a look at the host's clock.
    """

    def __init__(self) -> None:
        self._threads: dict[str, Background] = {}

    mark = staticmethod(time.perf_counter)
    """The moment at which the device reaches this point of the program."""
    is_free = True

    def seconds(self, mark: Any) -> float:
        """A mark on the scale of `time.perf_counter`; may block until the device is there."""
        known_s: float = mark
        return known_s

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """Lets `record` know when `arrive` (which waits for a collective) would have returned.

        Returns:
            What to wait with instead of `arrive`. It raises what `arrive` raises in the thread.
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
        """Blocks until everything observed has been recorded; ends the threads."""
        # Another thread may begin a lane meanwhile; that one ends by itself.
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.finish()


class StreamClock:
    """For CUDA: marks are events on the current stream. Making one blocks the host once.

    Args:
        device: Whose streams are marked.
        cuda: What is called: torch.cuda, or what stands in for it where a device is simulated.
    """

    is_free = False

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        # By lane: one that ends late would hold up what others have to say.
        self._beside: dict[str, torch.cuda.Stream] = {}
        # Twice: nothing must stand before the mark, and it must be passed when the host looks at
        # its own clock.
        cuda.synchronize(device)
        self._origin = self.mark()
        cuda.synchronize(device)
        self._origin_s = time.perf_counter()

    def mark(self) -> Any:
        """See `HostClock`."""
        event: torch.cuda.Event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """See `HostClock`; blocks until the stream has passed the mark."""
        mark.synchronize()
        # Devices count milliseconds in fp32, after hours only whole ones: so from the mark that was
        # asked for last, which lies near this one.
        self._origin_s += self._origin.elapsed_time(mark) / 1e3
        self._origin = mark
        return self._origin_s

    def observe(self, lane: str, arrive: Callable[[], None], record: Record) -> Callable[[], None]:
        """See `HostClock`: a stream of its own waits, so that the compute stream does not."""
        start = self.mark()
        if lane not in self._beside:
            self._beside[lane] = self._cuda.Stream(self._device)
        with self._cuda.stream(self._beside[lane]):
            arrive()
            record(start, self.mark())
        return arrive

    def finish(self) -> None:
        """See `HostClock`."""
        self._cuda.synchronize(self._device)


Clock = HostClock | StreamClock


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on `device` happens."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
