"""When each step began, forward and backward included, without making anything wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

STEP = "run_training_batch"
"""What Lightning calls one batch's forward, backward and optimizer step."""


class StepStamps(Profiler):
    """Notes when batches, forwards and backwards begin and end, for `Trainer(profiler=)`.

    A profiler and no callback: before a callback that it does not know, `strategy="dear"` completes
    all parameters, and the overlap to be measured would be gone.

    Args:
        begin_step: Called at the beginning of every batch with its number.

    Attributes:
        begins_s: Beginning of each batch, `time.perf_counter` seconds.
        forward_s: Seconds that each batch's `training_step` took.
        backward_s: Seconds that each batch's backward took.
    """

    def __init__(self, begin_step: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self._begin_step = begin_step
        self._phase_began_s = 0.0
        self.begins_s: list[float] = []
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def _phase(self, action_name: str) -> list[float] | None:
        if not action_name.startswith("[Strategy]"):
            return None
        if action_name.endswith(".training_step"):
            return self.forward_s
        return self.backward_s if action_name.endswith(".backward") else None

    @override
    def start(self, action_name: str) -> None:
        if action_name == STEP:
            if self._begin_step is not None:
                self._begin_step(len(self.begins_s))
            self.begins_s.append(time.perf_counter())
        elif self._phase(action_name) is not None:
            self._phase_began_s = time.perf_counter()

    @override
    def stop(self, action_name: str) -> None:
        phase = self._phase(action_name)
        if phase is not None:
            phase.append(time.perf_counter() - self._phase_began_s)

    def __getstate__(self) -> dict[str, Any]:
        """Without the function, which may hold anything."""
        return {**self.__dict__, "_begin_step": None}
