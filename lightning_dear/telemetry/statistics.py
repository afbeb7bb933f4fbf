"""What a pipeline measures of itself: exposed communication, bytes, and spans for a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd import profiler

from lightning_dear import private_names
from lightning_dear.collectives.work import Collectives
from lightning_dear.telemetry.clock import Clock
from lightning_dear.telemetry.timeline import Timeline

_IS_PROFILING = private_names.IS_PROFILING.name


class Instruments:
    """Shared by all parts of one pipeline.

    Args:
        clock: Counts.
        collectives: Whose bytes are counted, and whose arrivals are shown.

    Attributes:
        clock: See above.
        timeline: Where spans are recorded at present; None for nowhere.
    """

    def __init__(self, clock: Clock, collectives: Collectives) -> None:
        self.clock = clock
        self._collectives = collectives
        self.timeline: Timeline | None = None
        self._sent_bytes = 0
        self._step_began: Any = None
        self._is_asked = clock.is_free
        self._last = self._current = self._new_statistics()

    def _new_statistics(self) -> StepStatistics | None:
        return StepStatistics(self.clock) if self._is_asked else None

    @property
    def statistics(self) -> StepStatistics | None:
        """Of the last finished optimizer step.

        On a device waits are timed from the step on that follows the first call. Before it is None.
        """
        self._is_asked = True
        return self._last

    def record_in(self, timeline: Timeline | None) -> None:
        """Records spans, collectives launched from now on, and codecs, there; None: nowhere."""
        self.timeline = timeline
        if timeline is not None:
            timeline.clock = self.clock
        self._collectives.observer = None if timeline is None else timeline.observe
        self._collectives.showing = None if timeline is None else timeline.span

    @contextmanager
    def span(self, lane: str) -> Iterator[None]:
        """Shows what happens within in the timeline and in torch's profiler, if they record."""
        with _in_profiler(lane), self.timeline.span(lane, lane) if self.timeline else nullcontext():
            yield

    @contextmanager
    def waiting(self, lane: str, reason: str) -> Iterator[None]:
        """What happens in it counts as exposed communication.

        Args:
            lane: Which half of the exchange, "reduce_scatter" or "all_gather".
            reason: What forces the wait, for the timeline.
        """
        # Nobody wants to know? On a device each wait would cost the host two marks.
        is_timed = self._current is not None or self.timeline is not None
        start = self.clock.mark() if is_timed else None
        # Not with `finally`: after a failure the device may refuse a mark, which would hide it.
        with _in_profiler(f"wait for {lane}: {reason}"):
            yield
        if is_timed:
            end = self.clock.mark()
            if self._current is not None:
                self._current.waits[lane].append((start, end))
            if self.timeline is not None:
                self.timeline.record("wait", reason, start, end)

    def begin_step(self) -> None:
        """Notes that a bucket begins to be stepped, if a timeline is recorded."""
        self._step_began = None if self.timeline is None else self.clock.mark()

    def record_step(self, number: int) -> None:
        """Shows that bucket `number` was stepped since then."""
        if self.timeline is not None and self._step_began is not None:
            self.timeline.record("step", f"bucket {number}", self._step_began, self.clock.mark())

    def finish_step(self) -> None:
        """Ends a step: its figures become `statistics`."""
        sent_bytes = self._collectives.ledger.total()
        if self._current is not None:
            self._current.wire_bytes = sent_bytes - self._sent_bytes
        self._sent_bytes = sent_bytes
        self._last, self._current = self._current, self._new_statistics()


def _in_profiler(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, where one records: without one it would cost some 15 us."""
    if not getattr(profiler, _IS_PROFILING):
        return nullcontext()
    return profiler.record_function(f"dear: {name}")


class StepStatistics:
    """Of one optimizer step: where compute stood still for communication, and what was sent.

    Args:
        clock: The device's. With a CUDA device, reading seconds blocks until the step is over.

    Attributes:
        waits: Lane -> marks between which the host, or the stream, stood still for it.
        wire_bytes: Payload this rank sent from the end of the step before to the end of this one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waits: dict[str, list[tuple[Any, Any]]] = {"reduce_scatter": [], "all_gather": []}
        self.wire_bytes = 0

    def _exposed_s(self, lane: str) -> float:
        seconds = self._clock.seconds
        return sum(seconds(end) - seconds(start) for start, end in self.waits[lane])

    @property
    def exposed_reduce_scatter_s(self) -> float:
        """Waited for gradients in the step, seconds."""
        return self._exposed_s("reduce_scatter")

    @property
    def exposed_all_gather_s(self) -> float:
        """Waited for parameters of the step before, seconds."""
        return self._exposed_s("all_gather")

    @property
    def exposed_s(self) -> float:
        """All exposed communication, seconds."""
        return self.exposed_reduce_scatter_s + self.exposed_all_gather_s
