"""What one training step cost, as the host saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepStatistics:
    """Of the step under way, or the last one.

    Exposed seconds are those for which the host (or, with a device clock, the compute stream)
    stood still for communication.

    Attributes:
        exposed_reduce_scatter_s: Waited for gradients at the optimizer step.
        exposed_all_gather_s: Waited for parameters, of the previous step's gathers.
        wire_bytes: Payload this rank sent from one optimizer step to the next.
    """

    exposed_reduce_scatter_s: float = 0.0
    exposed_all_gather_s: float = 0.0
    wire_bytes: int = 0

    @property
    def exposed_s(self) -> float:
        """All exposed communication, seconds."""
        return self.exposed_reduce_scatter_s + self.exposed_all_gather_s
