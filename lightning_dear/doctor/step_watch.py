"""Times some steps of a training on this rank, without a change of what it computes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median, mode
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from torch.nn import Module, Parameter
from typing_extensions import override

from lightning_dear import private_names
from lightning_dear.engine.active_plan import spec_of
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import ModelTimes, TensorSpec, measured
from lightning_dear.strategy import DearStrategy
from lightning_dear.telemetry.clock import clock_of
from lightning_dear.telemetry.statistics import median_and_error

_NUM_TIMED = 3
"""Steps under `strategy="dear"` that the engine's timer measures."""

_USE, _BACKWARD, _READY, _ENDED, _STEPPED = "use", "backward", "ready", "ended", "stepped"
"""What is marked: a module's forward begins, a backward begins, a gradient is there, a backward has
ended with all its all-reduces, the optimizer has stepped."""

_Moment = tuple[str, int, float]
"""What happened, the number of the module or parameter, and when, in seconds."""


class StepTimes(NamedTuple):
    """Seconds of an optimizer's step on one rank: medians over several.

    Attributes:
        times: Forward and backward of one batch without communication, and the optimizer's step.
        step_s: From one optimizer step to the next.
        exposed_s: For which the rank waited for messages, and for ranks that compute longer.
        error_s: By how much `exposed_s` or `computing_s` may be wrong, see `median_and_error`.
        num_batches: Batches of a step, of which the last one communicates.
    """

    times: ModelTimes
    step_s: float
    exposed_s: float
    error_s: float
    num_batches: int

    @property
    def computing_s(self) -> float:
        """Seconds of forward, backward and step, over all batches of a step."""
        times = self.times
        return self.num_batches * (times.forward_s + times.backward_s) + times.step_s


class StepWatch:
    """Marks what happens in steps, from its creation until `end`.

    The module's parameters, gradients and results are not changed. Marks do not block.

    Args:
        wrapper: Module whose forward is a batch's: DDP, or `module` itself.
        module: The trained module.
        optimizer: Its optimizer.
    """

    def __init__(self, wrapper: Module, module: Module, optimizer: torch.optim.Optimizer) -> None:
        self._names = {one: name for name, one in module.named_parameters() if one.requires_grad}
        self.trained = list(self._names)
        self._clock = clock_of(self.trained[0].device)
        self._queue = private_names.QUEUE_CALLBACK.of(torch.autograd.Variable).queue_callback
        # (what, number of the module or parameter, mark), as they happen.
        self._marks: list[tuple[str, int, Any]] = []
        self._stack = ExitStack()
        # Parameter -> number of the first module that owns it.
        self._owners: dict[Parameter, int] = {}
        owners = [one for one in module.modules() if [*one.parameters(recurse=False)]]
        # Of the wrapper the number is -1. A compiled module calls no hook of its own.
        for number, part in enumerate([wrapper, *owners], start=-1):
            for parameter in part.parameters(recurse=False):
                self._owners.setdefault(parameter, number)
            hook = _Hook(partial(self._use, module, number))
            self._stack.callback(part.register_forward_pre_hook(hook).remove)
        for number, parameter in enumerate(self.trained):
            note = partial(self._gradient, number)
            register: Any = parameter.register_post_accumulate_grad_hook
            self._stack.callback(register(lambda _, note=note: note()).remove)
        stepped = optimizer.register_step_post_hook(lambda *_: self._mark(_STEPPED))
        self._stack.callback(stepped.remove)

    def tensors(self, times: ModelTimes) -> list[TensorSpec]:
        """Returns the trained parameters as planners get them, in the order of these times."""
        uses, ready = _places(times.first_use_s), _places(times.ready_s)
        of = enumerate(self.trained)
        return [spec_of(i, self._names[one], one, None, uses.get(i), ready.get(i)) for i, one in of]

    def step_begins(self) -> None:
        """Does nothing: the optimizer's hook marks steps."""

    def backward_begins(self) -> None:
        """To be called right before a backward."""
        self._mark(_BACKWARD)

    def _use(self, module: Module, number: int) -> None:
        # Compiled code would contain the mark for good, and validation is no step.
        if module.training and not torch.compiler.is_compiling():
            self._mark(_USE, number)

    def _mark(self, what: str, number: int = 0) -> None:
        self._marks.append((what, number, self._clock.mark()))

    def _gradient(self, number: int) -> None:
        if self._marks and self._marks[-1][0] != _READY:
            # A callback runs when backward has ended. DDP waits for its all-reduces in one that is
            # queued after this one. So this one queues the one that marks the end.
            self._queue(lambda: self._queue(partial(self._mark, _ENDED)))
        self._mark(_READY, number)

    def close(self) -> None:
        """Removes all hooks."""
        self._stack.close()

    def end(self) -> StepTimes | None:
        """Removes all hooks, and returns the times. None means that no whole step was seen.

        Blocks until the device has reached the last mark.
        """
        self.close()
        marks = [(what, number, self._clock.seconds(mark)) for what, number, mark in self._marks]
        ends = [place for place, (what, *_) in enumerate(marks) if what == _STEPPED]
        steps = [self._step(marks[begin : end + 1]) for begin, end in pairwise(ends)]
        return middle_of([one for one in steps if one is not None])

    def _step(self, marks: Sequence[_Moment]) -> StepTimes | None:
        """Returns the times of one step, whose marks these are, from the step before."""
        turns = [(at, what) for at, (what, *_) in enumerate(marks) if what not in (_USE, _READY)]
        # Where forwards run again in backward (checkpointing), the last end of a backward counts.
        ends = (place for (place, what), (_, after) in pairwise(turns) if what == _ENDED != after)
        cuts = [0, *ends]
        batches = [self._batch(marks[begin + 1 : end + 1]) for begin, end in pairwise(cuts)]
        found = [one for one in batches if one is not None]
        if not found or len(found) < len(batches):
            return None
        every, exposed_s = [times for times, _ in found], sum(exposed_s for _, exposed_s in found)
        forward_s = sum(one.forward_s for one in every) / len(every)
        backward_s = sum(one.backward_s for one in every) / len(every)
        step_s = marks[-1][2] - marks[cuts[-1]][2]
        times = replace(every[-1], forward_s=forward_s, backward_s=backward_s, step_s=step_s)
        return StepTimes(times, marks[-1][2] - marks[0][2], exposed_s, 0.0, len(found))

    def _batch(self, marks: Sequence[_Moment]) -> tuple[ModelTimes, float] | None:
        """Returns the times of one batch without the step, and for how long its backward waited.

        None means that its forward called no module, or that its backward made no gradient.
        """
        at_s: dict[str, list[tuple[int, float]]] = {}
        for what, number, moment_s in marks:
            at_s.setdefault(what, []).append((number, moment_s))
        if not {_USE, _BACKWARD, _READY} <= at_s.keys():
            return None
        backward_s, ready_s = at_s[_BACKWARD][-1][1], at_s[_READY][-1][1]
        # Of several forwards of a module the first one counts.
        uses_s = {number: one_s for number, one_s in reversed(at_s[_USE]) if one_s <= backward_s}
        begin_s = min(uses_s.values())
        times = ModelTimes(
            forward_s=backward_s - begin_s,
            backward_s=ready_s - backward_s,
            first_use_s={
                index: uses_s.get(self._owners[parameter], begin_s) - begin_s
                for index, parameter in enumerate(self.trained)
            },
            ready_s={number: one_s - backward_s for number, one_s in at_s[_READY]},
        )
        return times, marks[-1][2] - ready_s


class _Hook:
    """A hook that marks. Whoever pickles the model gets one that does nothing."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark

    def __call__(self, *_: Any) -> None:
        self._mark()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing() -> None: ...


class _BeforeForward(Callback):
    """Lets the engine measure each step, and keeps the times.

    Attributes:
        found: Times of steps.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.found: list[ModelTimes] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        timer = self._pipeline.parts[0].timer
        if timer.times is not None:
            self.found.append(timer.times)
        if not timer.is_on:
            self._pipeline.measure_next_step()


class DearWatch:
    """Times some steps under `strategy="dear"` with the engine's own timer and statistics.

    In the first three steps the engine's timer runs, so that forward waits for all parameters
    first. Of later steps only the lengths and the waits are used.

    Args:
        trainer: The trainer. Its list of callbacks is replaced for the first steps.
        strategy: Its strategy.
    """

    def __init__(self, trainer: Any, strategy: DearStrategy) -> None:
        self._trainer, self._strategy = trainer, strategy
        self._pipeline = strategy.pipeline_of()
        self._timing = _BeforeForward(self._pipeline)
        trainer.callbacks = [*trainer.callbacks, self._timing]
        self._clock = clock_of(self._pipeline.parts[0].parameters[0].device)
        # Mark at the end of a step's forward, and what the step before it waited for.
        self._steps: list[tuple[Any, Any]] = []

    @property
    def trained(self) -> list[Parameter]:
        """Trained parameters in the order of their indices."""
        return list(self._pipeline.parts[0].parameters)

    def tensors(self, times: ModelTimes) -> list[TensorSpec]:
        """Returns the trained parameters as planners got them."""
        return list(self._pipeline.parts[0].tensors)

    def step_begins(self) -> None:
        """To be called once a step, after its first forward."""
        if len(self._timing.found) < _NUM_TIMED:
            return
        if not self._steps:
            self.close()
        self._steps.append((self._clock.mark(), self._strategy.statistics))

    def backward_begins(self) -> None:
        """Does nothing: the engine's timer knows."""

    def close(self) -> None:
        """Takes the callback out of the trainer's."""
        others = [one for one in self._trainer.callbacks if one is not self._timing]
        self._trainer.callbacks = others

    def end(self) -> StepTimes | None:
        """Returns the times. None means that too few steps were seen. Blocks as `StepWatch.end`."""
        if not self._steps:
            return None
        times = measured.combined_times(self._timing.found, median)
        moments = [self._clock.seconds(mark) for mark, _ in self._steps]
        # The first of the steps was still watched by the engine's timer.
        waits = [one.exposed_s for _, one in self._steps[2:] if one]
        lengths = [end - begin for begin, end in pairwise(moments[1:])]
        count, pairs = self._trainer.accumulate_grad_batches, zip(lengths, waits, strict=False)
        return middle_of([StepTimes(times, one_s, wait_s, 0.0, count) for one_s, wait_s in pairs])


def _places(times_s: Mapping[int, float]) -> dict[int, int]:
    """Return the place of each index in the order of times."""
    return {index: place for place, index in enumerate(sorted(times_s, key=times_s.__getitem__))}


def middle_of(steps: Sequence[StepTimes]) -> StepTimes | None:
    """Return the medians of several steps. None means that there are none.

    Of steps with other numbers of batches than most, such as the last one of an epoch, nothing
    counts.
    """
    if not steps:
        return None
    most = mode(one.num_batches for one in steps)
    steps = [one for one in steps if one.num_batches == most]
    exposed_s, exposed_error_s = median_and_error([one.exposed_s for one in steps])
    _, computing_error_s = median_and_error([one.computing_s for one in steps])
    error_s = max(exposed_error_s, computing_error_s)
    times = measured.combined_times([one.times for one in steps], median)
    return StepTimes(times, median(one.step_s for one in steps), exposed_s, error_s, most)
