"""What the pipeline does around an optimizer's step, wherever its parameters are stepped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class StepListener(Protocol):
    """What the pipeline does around the optimizer's inner step."""

    def drop_gradients(self) -> None:
        """The user called `zero_grad`: what backward has produced since the last step is void."""

    def without_arrivals(self) -> AbstractContextManager[Any]:
        """Context in which no other thread completes parameters, which might use `.grad`."""

    def masters_dropped(self) -> None:
        """Masters were loaded that differ from the weights, and here weights are stepped."""

    def before_step(self) -> None:
        """Blocks until the pieces have their gradients and their state."""

    def steps_first(self) -> Sequence[int]:
        """All buckets that are gathered, in the order of their gathers; the others come last."""

    def stepping(self) -> None:
        """A run of buckets is about to be stepped."""

    def stepped(self, number: int) -> None:
        """Bucket `number`'s own shard holds new values."""

    def after_step(self) -> None:
        """All buckets have been stepped and the groups hold the user's parameters again."""


class GatherListener(StepListener, Protocol):
    """What the pipeline does besides where gradients are gathered."""

    def launch(self, number: int) -> None:
        """Bucket `number`'s own shard of the mean gradient may travel."""

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until every bucket has arrived, and been stepped by `ReplicatedOptimizer`."""
