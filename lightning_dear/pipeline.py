"""READ FIRST. What is launched when, and what forward waits for.

    gradient -> bucket -> reduce-scatter -> shard -> optimizer step -> all-gather -> parameter
       |______ during backward ______|      |__ once a step __|     |_ during the next forward _|

1. backward: every gradient is copied into its bucket; a full bucket's reduce-scatter is launched,
   in plan order (`reducer.py`).
2. step: when the last reduce-scatter is in, the user's optimizer steps this rank's shards bucket by
   bucket, in the order in which forward needs them, and each bucket's all-gather is launched as
   soon as it is stepped (`sharded_optimizer.py`).
3. next forward: a module that reads a parameter waits for its bucket, not for the others
   (`gatherer.py`, `gate.py`).

The first step is recorded instead (`recorder.py`): its order of reads and gradients makes the plan.
This file and all below it know torch, not Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear.active_plan import ActivePlan, activate
from lightning_dear.clock import clock_of
from lightning_dear.layout import (
    check_layout,
    managed_parameters,
    parameter_homes,
    restore_replaced,
)
from lightning_dear.module_buffers import BufferBroadcast
from lightning_dear.optimizer_state import consolidate, whole_state
from lightning_dear.planning import BucketPlan, FusionPlanner
from lightning_dear.recorder import ForwardRecorder, has_compiled_region
from lightning_dear.sharded_optimizer import ShardedOptimizer
from lightning_dear.statistics import StepStatistics
from lightning_dear.timeline import Timeline
from lightning_dear.work import Collectives


class Pipeline:
    """Runs the three phases above for one module and its optimizer.

    Use `forward()` around the training forward and `backward()` around `loss.backward()`; then call
    the optimizer's own `step`, with or without a closure.

    Args:
        module: Mutated from the first step on: parameters become views of flat buffers.
        optimizer: Element-wise, over parameters of `module`. Mutated: step hooks and `zero_grad`.
        collectives: What moves the bytes; at world size 1 nothing does.
        fusion: Makes the plan from the recorded first step.
        broadcast_buffers: Whether module buffers follow rank 0 after each step.

    Attributes:
        optimizer: The user's.
        plan: None until the first step has been recorded; stays readable after `detach`.
        statistics: Of the last finished step.

    Raises:
        ValueError: If the optimizer is not element-wise or holds foreign parameters, or if ranks
            hold different models.
    """

    def __init__(
        self,
        module: Module,
        optimizer: Optimizer,
        collectives: Collectives,
        fusion: FusionPlanner,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        check_layout(module, optimizer, collectives)
        self.optimizer = optimizer
        self.plan: BucketPlan | None = None
        self._clock = clock_of(next(module.parameters()).device)
        self.statistics = StepStatistics(self._clock)
        self._current = StepStatistics(self._clock)
        self._module = module
        self._collectives = collectives
        self._fusion = fusion
        self._buffers = BufferBroadcast(module, collectives) if broadcast_buffers else None
        self._sharded = ShardedOptimizer(optimizer, self)
        self._has_compiled_region = has_compiled_region(module)
        if self._has_compiled_region and collectives.world_size > 1 and collectives.rank == 0:
            warnings.warn(
                "A compiled graph reads parameters where strategy='dear' cannot wait for each: all"
                " are waited for before forward, so that only reduce-scatters overlap. Leave"
                " torch.compile out if communication costs more than compiling saves.",
                stacklevel=2,
            )
        self._active: ActivePlan | None = None
        self._timeline: Timeline | None = None
        self._synchronize = True
        self._has_gradients = False
        self._is_abandoned = False
        self._sent_bytes = 0
        self._start_recording()

    # --- the three phases -------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward. May block for parameters read outside any module."""
        restore_replaced(self._homes)
        if self._trains_something_new():
            self._dissolve()
        with ExitStack() as stack:
            if self._active is None:
                if self._collectives.world_size > 1:
                    stack.enter_context(self._recorder.recording())
            elif self._has_compiled_region:
                # A compiled graph reads parameters where no gate sees it.
                self._active.gatherer.complete(reason="compiled region")
            else:
                self._active.gatherer.complete_entry()
            stack.enter_context(self._span("forward", "forward"))
            yield

    @contextmanager
    def backward(self, *, synchronize: bool = True) -> Iterator[None]:
        """Around a backward.

        Args:
            synchronize: False on all but the last backward of a step: gradients accumulate in
                `.grad` and nothing is sent.
        """
        before, self._synchronize = self._synchronize, synchronize
        self._has_gradients |= synchronize
        try:
            with self._span("backward", "backward"):
                yield
        finally:
            self._synchronize = before

    def _on_gradient(self, index: int, parameter: Parameter) -> None:
        if self._active is not None:
            self._active.reducer.check_was_complete(index)
        if not self._synchronize:
            return
        self._has_gradients = True
        if self._active is None:
            self._recorder.note_gradient(index)
        else:
            self._active.reducer.on_gradient(index)

    def drop_gradients(self) -> None:
        """See `StepListener`. Other ranks drop theirs too, so what was begun is ended first."""
        if self._has_gradients and self._active is not None:
            self._active.reducer.finish()
        self._recorder.gradients.clear()
        self._has_gradients = False

    def before_step(self) -> Sequence[bool]:
        """See `StepListener`: the last reduce-scatters, and at the first step the plan."""
        self.complete_parameters("step")
        if self._trains_something_new():
            raise RuntimeError(
                "Parameters began to require gradients, or a parameter group was added, between a"
                " forward and its optimizer step; do it before the forward."
            )
        if self._buffers is not None:
            # Launched first: it has the reduce-scatters' time to arrive in.
            self._buffers.launch()
        active = self._active or self._activate()
        active.adopt_replaced_data()
        self._has_gradients = False
        return active.reducer.finish()

    def stepping(self) -> None:
        """See `StepListener`."""
        self._step_began = self._clock.mark() if self._timeline is not None else None

    def stepped(self, number: int) -> None:
        """See `StepListener`: the bucket's all-gather starts before the next bucket is stepped."""
        assert self._active is not None
        if self._timeline is not None:
            self._timeline.record("step", f"bucket {number}", self._step_began, self._clock.mark())
        self._active.gatherer.launch(number)

    def after_step(self) -> None:
        """See `StepListener`: from here on reads wait."""
        assert self._active is not None
        self._active.gatherer.close_gates()
        if self._buffers is not None:
            with self._waiting("all_gather", "module buffers"):
                self._buffers.wait()
        sent_bytes = self._collectives.ledger.total_bytes
        self._current.wire_bytes = sent_bytes - self._sent_bytes
        self._sent_bytes = sent_bytes
        self.statistics, self._current = self._current, StepStatistics(self._clock)
        if self._sharded.has_foreign_post_hooks():
            self.complete_parameters("optimizer step hook")

    # --- from one plan to the next -------------------------------------------------------------

    def _start_recording(self) -> None:
        named = managed_parameters(self._module, self.optimizer)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        known = {id(parameter) for parameter in self._parameters}
        groups = self.optimizer.param_groups
        self._group_sizes = [len(group["params"]) for group in groups]
        self._untrained = [p for group in groups for p in group["params"] if id(p) not in known]
        self._homes = parameter_homes(self._module, self._parameters)
        self._recorder = ForwardRecorder(self._module, self._parameters)
        self._hooks = [
            _after_accumulation(parameter, partial(self._on_gradient, index))
            for index, parameter in enumerate(self._parameters)
            if self._collectives.world_size > 1
        ]

    def _activate(self) -> ActivePlan:
        self._active = activate(
            self._module,
            self._names,
            self._parameters,
            self._recorder,
            self._fusion,
            self._collectives,
            self._waiting,
        )
        self.plan = self._active.plan
        rank, world_size = self._collectives.rank, self._collectives.world_size
        self._sharded.attach(self._active.flat, self._parameters, rank, world_size)
        return self._active

    def _trains_something_new(self) -> bool:
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        return sizes != self._group_sizes or any(
            parameter.requires_grad and parameter.numel() for parameter in self._untrained
        )

    def _dissolve(self) -> None:
        """Back to before the first step, values and optimizer state kept. Collective, blocks."""
        self.complete_parameters("re-plan")
        if self.plan is not None:
            self._sharded.adopt_state()
            state = whole_state(self._sharded, self.plan, self._parameters, self._collectives)
            self._sharded.detach()
            self.optimizer.state.update(state)
        self._release()
        self._start_recording()

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._active is not None:
            self._active.release()
        self._active = None

    # --- for whoever looks in from outside ------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent."""
        if self._active is not None:
            self._active.gatherer.complete(reason=reason)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole tensors, on every rank. Collective, blocks."""
        self._sharded.restore()
        if self.plan is None:
            return self.optimizer.state_dict()
        if self._active is not None:
            self._sharded.adopt_state()
        sent_before = self._collectives.ledger.total_bytes
        state = consolidate(self._sharded, self.plan, self._parameters, self._collectives)
        # Not a step's traffic.
        self._sent_bytes += self._collectives.ledger.total_bytes - sent_before
        return state

    def detach(self) -> None:
        """Ends the training: the module is as it was, with the new values. Blocks.

        The optimizer's state stays here, sharded, for `optimizer_state_dict`. After an exception
        (see `abandon`) a gather that fails is warned about instead of raised, so that it does not
        hide what happened first.
        """
        if not self._is_abandoned:
            self.drop_gradients()
        try:
            self.complete_parameters("teardown")
        except RuntimeError as error:
            if not self._is_abandoned:
                raise
            warnings.warn(
                f"The last step's parameters did not all arrive ({error}); the module's weights are"
                " a mixture of two steps. Load the last checkpoint.",
                stacklevel=2,
            )
        self._release()
        self._sharded.remove_hooks()
        self._sharded.detach()

    def abandon(self) -> None:
        """After an exception: puts the optimizer's groups right; waits for nothing."""
        self._is_abandoned = True
        self._collectives.discard()
        self._sharded.restore()

    @property
    def timeline(self) -> Timeline | None:
        """Where spans are recorded at present; None for nowhere."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        if timeline is not None:
            timeline.clock = self._clock
        self._collectives.observer = None if timeline is None else timeline.observe

    def _span(self, lane: str, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._timeline is None else self._timeline.span(lane, name)

    @contextmanager
    def _waiting(self, lane: str, reason: str) -> Iterator[None]:
        with self._current.waiting(lane), self._span("wait", reason):
            yield


def _after_accumulation(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    register: Any = parameter.register_post_accumulate_grad_hook
    handle: RemovableHandle = register(hook)
    return handle
