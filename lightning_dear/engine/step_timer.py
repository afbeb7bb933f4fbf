"""Measures one step for planners: when forward reads each parameter, when gradients are ready."""

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
"""Marks of a clock at the beginning and at the end of something."""


class StepTimer:
    """Measures forward, backward and step of one step on this rank, after `start` was called.

    All parameters must be complete before its forward, so that the times include no waits.
    A parameter's first use is the point at which training would wait for it: before the forward of
    the module that owns it, or at the first read through that module, whichever comes first.

    Args:
        module: The trained module.
        clock: Clock of the device.

    Attributes:
        is_on: Whether a step is being measured, or the next one will be.
        times: Times of the last measured step. None from `start` until that step has ended.
    """

    def __init__(self, module: Module, clock: Clock) -> None:
        self._module, self._clock = module, clock
        self.start((), None)

    def start(
        self, parameters: Sequence[Parameter], ungated: Mapping[int, Module | None] | None
    ) -> None:
        """Measures the step that begins with the next forward.

        Args:
            parameters: The trained parameters, in the order of their indices.
            ungated: See `ForwardRecorder`. None means that no step was recorded yet; then nothing
                is measured.
        """
        self.times: ModelTimes | None = None
        self.is_on = ungated is not None
        if has_compiled_region(self._module):
            # Its forward waits for all parameters before it begins.
            ungated, parameters = dict.fromkeys(range(len(parameters))), ()
        self._parameters, self._ungated = parameters, ungated or {}
        self._first_uses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        # Marks of "forward", "backward" and "step".
        self._spans: dict[str, MarkPair] = {}
        self._late_steps: list[MarkPair] = []
        self._left_out: list[MarkPair] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context around a training forward. Only the first one in a step is measured."""
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
        """A context around a backward. The last one in a step counts."""
        if self.is_on:
            self._gradients.clear()
        return self._marked(partial(self._spans.__setitem__, "backward"))

    def step_begins(self) -> None:
        """To be called when all gradients are reduced."""
        if self.is_on:
            self._spans["step"] = self._clock.mark(), None

    def step_ends(self) -> None:
        """To be called when all buckets are stepped. Sets `times`; may block for the device."""
        if self.is_on:
            self._spans["step"] = self._spans["step"][0], self._clock.mark()
            self.times = self._measured()
            self.is_on = self.times is None

    def late_step(self) -> AbstractContextManager[None]:
        """A context around the step of a bucket that is stepped at its first read in forward."""
        return self._marked(self._late_steps.append)

    def leaving_out_codecs(self) -> AbstractContextManager[None]:
        """A context around code that may encode. If it does, all its time is left out of `times`.

        Planners count encoding, and launching what was encoded, among the costs of a compressor.
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
        """To be called when parameter `index` gets a gradient, while `is_on`."""
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

        gate = ModuleGate(part)
        hook = part.register_forward_pre_hook(note, prepend=True)
        gate.close(note)
        try:
            yield
        finally:
            gate.open()
            hook.remove()

    def _measured(self) -> ModelTimes | None:
        """The times of the step. None if it had no measured forward or backward."""
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
        """Returns a function: mark -> seconds on a clock that stood still during encoding."""
        spans = [
            (self._clock.seconds(end), self._clock.seconds(end) - self._clock.seconds(begin))
            for begin, end in self._left_out
        ]

        def seconds(mark: Any) -> float:
            at_s = self._clock.seconds(mark)
            return at_s - sum(length_s for end_s, length_s in spans if end_s <= at_s)

        return seconds
