"""What a pipeline measures of itself: exposed communication, bytes, and spans for a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_dear.collectives.work import Collectives
from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.telemetry.timeline import Timeline


class Instruments:
    """Shared by all parts of one pipeline.

    Args:
        device: Whose clock counts.
        collectives: Whose bytes are counted, and whose arrivals are shown.

    Attributes:
        clock: The device's.
        statistics: Of the last finished optimizer step.
    """

    def __init__(self, device: torch.device, collectives: Collectives) -> None:
        self.clock = clock_of(device)
        self._collectives = collectives
        self._timeline: Timeline | None = None
        self._sent_bytes = 0
        self.statistics = StepStatistics(self.clock)
        self._current = StepStatistics(self.clock)

    @property
    def timeline(self) -> Timeline | None:
        """Where spans are recorded at present; None for nowhere."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        if timeline is not None:
            timeline.clock = self.clock
        self._collectives.observer = None if timeline is None else timeline.observe

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Shows the `with` block in the timeline, if one is recorded."""
        return nullcontext() if self._timeline is None else self._timeline.span(lane, name)

    @contextmanager
    def waiting(self, lane: str, reason: str) -> Iterator[None]:
        """Counts the `with` block as exposed communication of `lane`."""
        with self._current.waiting(lane), self.span("wait", reason):
            yield

    def mark(self) -> Any:
        """The present moment, if a timeline is recorded."""
        return self.clock.mark() if self._timeline is not None else None

    def record_step(self, name: str, began: Any) -> None:
        """Shows what was stepped since the mark `began`."""
        if self._timeline is not None and began is not None:
            self._timeline.record("step", name, began, self.clock.mark())

    def finish_step(self) -> None:
        """Ends a step: its figures become `statistics`."""
        sent_bytes = self._collectives.ledger.total_bytes
        self._current.wire_bytes = sent_bytes - self._sent_bytes
        self._sent_bytes = sent_bytes
        self.statistics, self._current = self._current, StepStatistics(self.clock)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What is sent meanwhile (a checkpoint's) belongs to no step."""
        before = self._collectives.ledger.total_bytes
        yield
        self._sent_bytes += self._collectives.ledger.total_bytes - before


class StepStatistics:
    """Of one optimizer step: where compute stood still for communication, and what was sent.

    Args:
        clock: The device's. With a CUDA device, reading seconds blocks until the step is over.

    Attributes:
        wire_bytes: Payload this rank sent from the end of the step before to the end of this one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[str, list[tuple[Any, Any]]] = {"reduce_scatter": [], "all_gather": []}
        self.wire_bytes = 0

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        """Counts the time in the `with` block as exposed in `lane`."""
        start = self._clock.mark()
        yield
        self._waits[lane].append((start, self._clock.mark()))

    def _exposed_s(self, lane: str) -> float:
        seconds = self._clock.seconds
        return sum(seconds(end) - seconds(start) for start, end in self._waits[lane])

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
