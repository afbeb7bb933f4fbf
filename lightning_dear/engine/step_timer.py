"""Measures one step for the planner: when forward reads what, and when gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.nn import Module, Parameter

from lightning_dear.engine.gate import ModuleGate, has_gate, owners
from lightning_dear.engine.read_order import has_compiled_region
from lightning_dear.planning.measured import ModelTimes
from lightning_dear.telemetry.clock import Clock
from lightning_dear.telemetry.device_work import device_work_s

_NOTHING = nullcontext()

MarkPair = tuple[Any, Any]
"""The marks of a beginning and of an end."""


class StepTimer:
    """Marks a step's forward and backward, if it is to; nothing may be waited for meanwhile.

    A parameter's first use is where training would wait for it: in front of the forward of a module
    that owns it, or at the first read through its module, whichever comes first.

    Args:
        module: The trained module.
        clock: The device's.

    Attributes:
        is_on: Whether a step is being measured.
        times: What was measured last; None from `start` to the step's end.
    """

    def __init__(self, module: Module, clock: Clock) -> None:
        self._module, self._clock = module, clock
        self.start((), None)

    def start(
        self, parameters: Sequence[Parameter], ungated: Mapping[int, Module | None] | None
    ) -> None:
        """Measures the step that begins with the next forward.

        Args:
            parameters: The engine's list.
            ungated: See `ForwardRecorder`; None: not known yet, and nothing is measured.
        """
        self.times: ModelTimes | None = None
        self.is_on = ungated is not None
        if has_compiled_region(self._module):
            # There all parameters are waited for before forward.
            ungated, parameters = dict.fromkeys(range(len(parameters))), ()
        self._parameters, self._ungated = parameters, ungated or {}
        self._first_uses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        # Of "forward", "backward" and "step".
        self._spans: dict[str, MarkPair] = {}
        self._late_steps: list[MarkPair] = []
        self._left_out: list[MarkPair] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward whose parameters are complete. The first one counts."""
        if not self.is_on or "forward" in self._spans:
            yield
            return
        with ExitStack() as stack:
            for part, indices in self._readers().items():
                stack.enter_context(self._watched(part, indices))
            start = self._clock.mark()
            yield
            self._spans["forward"] = start, self._clock.mark()

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward. The last one counts."""
        if self.is_on:
            self._gradients.clear()
        return self._marked(partial(self._spans.__setitem__, "backward"))

    def step_begins(self) -> None:
        """All gradients are reduced."""
        if self.is_on:
            self._spans["step"] = self._clock.mark(), None

    def step_ends(self) -> None:
        """All buckets are stepped, and `times` is there. May block for a device."""
        if self.is_on:
            self._spans["step"] = self._spans["step"][0], self._clock.mark()
            self.times = self._measured()
            self.is_on = self.times is None

    def late_step(self) -> AbstractContextManager[None]:
        """Around the step of a bucket that is stepped where forward would read it."""
        return self._marked(self._late_steps.append)

    def leaving_out_codecs(self) -> AbstractContextManager[None]:
        """Around what may encode: where it does, its time is in none of the times.

        Neither is that of starting messages: both are among a codec's costs.
        """
        before_s = device_work_s()

        def note(span: MarkPair) -> None:
            if device_work_s() > before_s:
                self._left_out.append(span)

        return self._marked(note)

    def _marked(self, note: Callable[[MarkPair], object]) -> AbstractContextManager[None]:
        return self._marking(note) if self.is_on else _NOTHING

    @contextmanager
    def _marking(self, note: Callable[[MarkPair], object]) -> Iterator[None]:
        start = self._clock.mark()
        yield
        note((start, self._clock.mark()))

    def note_gradient(self, index: int) -> None:
        """Parameter `index` has a new gradient, while `is_on`."""
        self._gradients[index] = self._clock.mark()

    def _readers(self) -> dict[Module, set[int]]:
        found = owners(self._module, self._parameters).items()
        readers = {part: set(own.values()) for part, own in found if has_gate(part)}
        for index, user in self._ungated.items():
            if user is not None and has_gate(user):
                readers.setdefault(user, set()).add(index)
        return readers

    @contextmanager
    def _watched(self, part: Module, indices: set[int]) -> Iterator[None]:
        def note(*_: Any) -> None:
            gate.open()
            mark = self._clock.mark()
            for index in indices:
                self._first_uses.setdefault(index, mark)

        gate = ModuleGate(part, note)
        hook = part.register_forward_pre_hook(note, prepend=True)
        gate.close()
        try:
            yield
        finally:
            gate.open()
            hook.remove()

    def _measured(self) -> ModelTimes | None:
        """None where forward or backward was not seen."""
        if len(self._spans) < 3:
            return None
        seconds = self._standing_clock()
        forward, forward_end = self._spans["forward"]
        backward, backward_end = self._spans["backward"]
        step, step_end = self._spans["step"]
        at_entry = {index: 0.0 for index, user in self._ungated.items() if user is None}
        return ModelTimes(
            forward_s=seconds(forward_end) - seconds(forward),
            backward_s=seconds(backward_end) - seconds(backward),
            first_use_s={
                **{i: seconds(mark) - seconds(forward) for i, mark in self._first_uses.items()},
                **at_entry,
            },
            step_s=seconds(step_end) - seconds(step),
            late_step_s=sum(seconds(end) - seconds(begin) for begin, end in self._late_steps),
            ready_s={i: seconds(mark) - seconds(backward) for i, mark in self._gradients.items()},
        )

    def _standing_clock(self) -> Callable[[Any], float]:
        """Mark -> seconds, on a scale that stood still while something was encoded."""
        spans = [
            (self._clock.seconds(end), self._clock.seconds(end) - self._clock.seconds(begin))
            for begin, end in self._left_out
        ]

        def seconds(mark: Any) -> float:
            at_s = self._clock.seconds(mark)
            return at_s - sum(length_s for end_s, length_s in spans if end_s <= at_s)

        return seconds
