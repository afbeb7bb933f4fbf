"""Measures one step for planners: when forward reads each parameter, when gradients are ready."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.nn import Module, Parameter

from lightning_dear.engine.gate import ModuleGate, has_gate, owners
from lightning_dear.engine.read_order import Ungated, has_compiled_region
from lightning_dear.planning.measured import ModelTimes
from lightning_dear.telemetry.clock import Clock
from lightning_dear.telemetry.device_work import device_work_s

_NOTHING = nullcontext()

MarkPair = tuple[Any, Any]
"""Marks of a clock at the beginning and at the end of a piece of work. A mark is what `Clock.mark`
returns: a time of the host, or an event of a CUDA stream."""


class StepTimer:
    """Measures forward, backward and step of one step on this rank, after `start` was called.

    All parameters must be complete before its forward. If not, the times include waits.
    A parameter's first use is the point at which training would wait for it: before the forward of
    the module that owns it, or at the first read through that module, whichever comes first.

    Args:
        module: The trained module.
        clock: Clock of the device.

    Attributes:
        is_on: Whether a step is being measured, or the next one will be.
        times: Times of the last measured step. None from `start` until that step has ended. A step
            without forward or backward is not measured, and the next one is instead.
    """

    def __init__(self, module: Module, clock: Clock) -> None:
        self._module, self._clock = module, clock
        self.start((), None)

    def start(self, parameters: Sequence[Parameter], ungated: Ungated | None) -> None:
        """Measures the step that begins with the next forward. Forgets earlier times.

        Args:
            parameters: The trained parameters, in the order of their indices.
            ungated: See `ForwardRecorder`. None means that no step was recorded yet. Then nothing
                is measured.
        """
        self.times: ModelTimes | None = None
        self.is_on = ungated is not None
        if has_compiled_region(self._module):
            # All parameters count as read when forward begins, since it waits for all of them then.
            ungated, parameters = dict.fromkeys(range(len(parameters)), {None}), ()
        self._parameters, self._ungated = parameters, ungated or {}
        self._first_uses: dict[int, Any] = {}
        self._gradients: dict[int, Any] = {}
        # "forward", "backward" and "step" -> marks around it.
        self._spans: dict[str, MarkPair] = {}
        # Marks around steps of single buckets in forward (`late_step`), and around code that is
        # left out of all times, since it encodes or communicates.
        self._late_steps: list[MarkPair] = []
        self._left_out: list[MarkPair] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context around a training forward. Only the first forward of a measured step counts."""
        if not self.is_on or "forward" in self._spans:
            yield
            return
        with ExitStack() as stack:
            for part, indices in self._readers().items():
                self._watch(stack, part, indices)
            stack.enter_context(self._marking(partial(self._spans.__setitem__, "forward")))
            yield

    def backward(self) -> AbstractContextManager[None]:
        """A context around a backward. Only the last backward of a measured step counts."""
        if self.is_on:
            self._gradients.clear()
        return self._marked(partial(self._spans.__setitem__, "backward"))

    def step_begins(self) -> None:
        """Marks the beginning of the optimizer's step, if a step is measured.

        To be called when all gradients are reduced.
        """
        if self.is_on:
            self._spans["step"] = self._clock.mark(), None

    def step_ends(self) -> None:
        """Marks the end of the optimizer's step, and computes `times`, if a step is measured.

        To be called when all buckets are stepped. Without a measured step nothing happens. Blocks
        until the device has reached the last mark.
        """
        if self.is_on:
            self._spans["step"] = self._spans["step"][0], self._clock.mark()
            self.times = self._measured()
            self.is_on = self.times is None

    def late_step(self) -> AbstractContextManager[None]:
        """A context around the step of a bucket that is stepped at its first read in forward.

        So buckets are stepped with gathered gradients. Their times add up to `late_step_s`.
        """
        return self._marked(self._late_steps.append)

    def leaving_out(self) -> AbstractContextManager[None]:
        """A context around code whose time is left out of `times`."""
        return self._marked(self._left_out.append)

    def leaving_out_codecs(self) -> AbstractContextManager[None]:
        """A context around code that may encode. If it does, all its time is left out of `times`.

        Planners count encoding, and launching what was encoded, among the costs of a compressor.
        """
        before_s = device_work_s()

        def store(span: MarkPair) -> None:
            if device_work_s() > before_s:
                self._left_out.append(span)

        return self._marked(store)

    def _marked(self, store: Callable[[MarkPair], object]) -> AbstractContextManager[None]:
        return self._marking(store) if self.is_on else _NOTHING

    @contextmanager
    def _marking(self, store: Callable[[MarkPair], object]) -> Iterator[None]:
        start = self._clock.mark()
        yield
        store((start, self._clock.mark()))

    def note_gradient(self, index: int) -> None:
        """Marks the time at which parameter `index` gets a gradient; the last call counts.

        To be called only while `is_on`.
        """
        self._gradients[index] = self._clock.mark()

    def _readers(self) -> dict[Module, set[int]]:
        found = owners(self._module, self._parameters).items()
        readers = {part: set(own.values()) for part, own in found if has_gate(part)}
        for index, users in self._ungated.items():
            for user in users:
                if user is not None and has_gate(user):
                    readers.setdefault(user, set()).add(index)
        return readers

    def _watch(self, stack: ExitStack, part: Module, indices: set[int]) -> None:
        """Notes the first read of `part`'s parameters `indices`, until `stack` ends."""

        def on_read(*_: Any) -> None:
            gate.open()
            mark = self._clock.mark()
            for index in indices:
                self._first_uses.setdefault(index, mark)

        gate = ModuleGate(part)
        gate.close(on_read)
        stack.callback(gate.open)
        stack.callback(part.register_forward_pre_hook(on_read, prepend=True).remove)

    def _measured(self) -> ModelTimes | None:
        """Returns the times of the step. None means that its forward or backward is missing.

        Blocks until the device has reached all marks.
        """
        if len(self._spans) < 3:
            return None
        seconds = self._standing_clock()
        forward, forward_end = self._spans["forward"]
        backward, backward_end = self._spans["backward"]
        step, step_end = self._spans["step"]
        first_use_s = {i: seconds(mark) - seconds(forward) for i, mark in self._first_uses.items()}
        at_entry = {index: 0.0 for index, users in self._ungated.items() if None in users}
        return ModelTimes(
            forward_s=seconds(forward_end) - seconds(forward),
            backward_s=seconds(backward_end) - seconds(backward),
            first_use_s=first_use_s | at_entry,
            step_s=seconds(step_end) - seconds(step),
            late_step_s=sum(seconds(end) - seconds(begin) for begin, end in self._late_steps),
            ready_s={i: seconds(mark) - seconds(backward) for i, mark in self._gradients.items()},
        )

    def _standing_clock(self) -> Callable[[Any], float]:
        """Returns a function: mark -> seconds on a clock that stands still in `_left_out` spans.

        So differences of two marks include no time of encoding between them.
        """
        spans: list[tuple[float, float]] = []
        # A span in another one ends first, and counts once.
        for begin, end in reversed(self._left_out):
            span = self._clock.seconds(begin), self._clock.seconds(end)
            if not any(begin_s <= span[0] and span[1] <= end_s for begin_s, end_s in spans):
                spans.append(span)

        def seconds(mark: Any) -> float:
            at_s = self._clock.seconds(mark)
            return at_s - sum(end_s - begin_s for begin_s, end_s in spans if end_s <= at_s)

        return seconds
