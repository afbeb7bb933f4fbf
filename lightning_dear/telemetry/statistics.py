"""What one training step cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dear.telemetry.clock import Clock


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
