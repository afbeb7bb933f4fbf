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

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dear.bucket import FlatBuffers, allocate
from lightning_dear.clock import clock_of
from lightning_dear.collectives import Collectives
from lightning_dear.exchange import DenseExchange
from lightning_dear.gatherer import ParameterGatherer
from lightning_dear.layout import (
    check_layout,
    managed_parameters,
    parameter_homes,
    restore_replaced,
    tensor_specs,
)
from lightning_dear.module_buffers import BufferBroadcast
from lightning_dear.optimizer_state import consolidate, whole_state
from lightning_dear.planning import BucketPlan, FusionPlanner
from lightning_dear.recorder import ForwardRecorder, has_compiled_region
from lightning_dear.reducer import GradientReducer
from lightning_dear.sharded_optimizer import ShardedOptimizer
from lightning_dear.statistics import StepStatistics
from lightning_dear.timeline import Timeline


class Pipeline:
    """Runs the three phases above for one module and its optimizers.

    Use `forward()` around the training forward and `backward()` around `loss.backward()`; then call
    the optimizers' own `step`.

    Args:
        module: Mutated from the first step on: parameters become views of flat buffers.
        optimizers: Element-wise, over parameters of `module`. Mutated: step hooks.
        collectives: What moves the bytes; at world size 1 nothing does.
        fusion: Makes the plan from the recorded first step.
        broadcast_buffers: Whether module buffers follow rank 0 after each step.

    Attributes:
        plan: None until the first step has been recorded.
        statistics: Of the last finished step.

    Raises:
        ValueError: If an optimizer is not element-wise or holds foreign parameters, or if ranks
            hold different models.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        fusion: FusionPlanner,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        check_layout(module, optimizers, collectives)
        self.plan: BucketPlan | None = None
        self._clock = clock_of(next(module.parameters()).device)
        self.statistics = StepStatistics(self._clock)
        self._current = StepStatistics(self._clock)
        self._module = module
        self._collectives = collectives
        self._fusion = fusion
        self._exchange = DenseExchange(collectives)
        self._buffers = BufferBroadcast(module, collectives) if broadcast_buffers else None
        self._sharded = [ShardedOptimizer(optimizer, self) for optimizer in optimizers]
        self._has_compiled_region = has_compiled_region(module)
        self._timeline: Timeline | None = None
        self._synchronize = True
        self._is_abandoned = False
        self._sent_bytes = 0
        self._flat: FlatBuffers | None = None
        self._gatherer: ParameterGatherer | None = None
        self._reducer: GradientReducer | None = None
        self._start_recording()

    # --- the three phases -------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward. May block for parameters read outside any module."""
        restore_replaced(self._homes)
        if self._has_new_parameters():
            self._dissolve()
        with ExitStack() as stack:
            if self._gatherer is None:
                if self._collectives.world_size > 1:
                    stack.enter_context(self._recorder.recording())
            elif self._has_compiled_region:
                # A compiled graph reads parameters where no gate sees it.
                self._gatherer.complete(reason="compiled region")
            else:
                self._gatherer.complete_entry()
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
        try:
            with self._span("backward", "backward"):
                yield
        finally:
            self._synchronize = before

    def _on_gradient(self, index: int, parameter: Parameter) -> None:
        if not self._synchronize:
            return
        if self._reducer is None:
            self._recorder.note_gradient(index)
        else:
            self._reducer.on_gradient(index)

    def before_step(self, sharded: ShardedOptimizer) -> Sequence[bool]:
        """See `StepListener`: the last reduce-scatters, and at the first step the plan."""
        self.complete_parameters("step")
        if self._has_new_parameters():
            raise RuntimeError(
                "Parameters began to require gradients between a forward and its optimizer step;"
                " unfreeze them, or add them to the optimizer, before the forward."
            )
        if self._buffers is not None:
            self._buffers.launch()
        if self._reducer is None:
            self._build()
        assert self._flat is not None
        assert self._reducer is not None
        for placement in self._flat.placements:
            if placement.was_replaced():
                placement.adopt_replacement()
        return self._reducer.finish()

    def stepping(self, number: int) -> None:
        """See `StepListener`."""
        self._step_began = self._clock.mark() if self._timeline is not None else None

    def stepped(self, number: int) -> None:
        """See `StepListener`: the bucket's all-gather starts before the next bucket is stepped."""
        assert self._gatherer is not None
        if self._timeline is not None:
            self._timeline.record("step", f"bucket {number}", self._step_began, self._clock.mark())
        self._gatherer.launch(number)

    def after_step(self) -> None:
        """See `StepListener`: from here on reads wait."""
        assert self._gatherer is not None
        self._gatherer.close_gates()
        if self._buffers is not None:
            self._buffers.wait()
        sent_bytes = self._collectives.ledger.total_bytes
        self._current.wire_bytes = sent_bytes - self._sent_bytes
        self._sent_bytes = sent_bytes
        self.statistics, self._current = self._current, StepStatistics(self._clock)

    # --- the plan -----------------------------------------------------------------------------

    def _start_recording(self) -> None:
        named = managed_parameters(self._module, [own.optimizer for own in self._sharded])
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._homes = parameter_homes(self._module, self._parameters)
        self._recorder = ForwardRecorder(self._module, self._parameters)
        self._hooks = [
            _after_accumulation(parameter, partial(self._on_gradient, index))
            for index, parameter in enumerate(self._parameters)
            if self._collectives.world_size > 1
        ]

    @torch.no_grad()
    def _build(self) -> None:
        """Makes the plan that rank 0's recording asks for, and the buffers it needs. Collective."""
        recorded = self._collectives.all_gather_object(
            (self._recorder.first_use, self._recorder.gradients)
        )
        first_use, gradients = recorded[0]
        optimizers = [own.optimizer for own in self._sharded]
        specs = tensor_specs(self._names, self._parameters, optimizers, first_use, list(gradients))
        world_size = self._collectives.world_size
        self.plan = self._fusion.plan(specs, world_size)
        scratch = self._collectives.scratch_numel(world_size) / world_size
        self._flat = allocate(self.plan, self._parameters, scratch)
        self._gatherer = ParameterGatherer(
            self._module,
            self._flat,
            self._exchange,
            self._recorder.ungated,
            partial(self._waiting, "all_gather"),
            is_gated=world_size > 1,
        )
        self._reducer = GradientReducer(
            self._flat,
            self._names,
            [gradients.get(index, 1) for index in range(len(self._parameters))],
            self.plan,
            self._exchange,
            self._collectives,
            self._gatherer.is_pending,
            partial(self._waiting, "reduce_scatter"),
        )
        for own in self._sharded:
            own.attach(self._flat, self._parameters, self._collectives.rank, world_size)

    def _has_new_parameters(self) -> bool:
        known = {id(parameter) for parameter in self._parameters}
        return any(
            parameter.requires_grad and id(parameter) not in known and parameter.numel()
            for own in self._sharded
            for group in own.optimizer.param_groups
            for parameter in group["params"]
        )

    def _dissolve(self) -> None:
        """Back to before the first step, values and optimizer state kept. Collective, blocks."""
        self.complete_parameters("re-plan")
        for own in self._sharded:
            if self.plan is not None:
                state = whole_state(own, self.plan, self._parameters, self._collectives)
                own.detach()
                own.optimizer.state.update(state)
        self._release()
        self.plan = self._reducer = self._gatherer = self._flat = None
        self._start_recording()

    def _release(self) -> None:
        """Gives every parameter storage of its own again, and removes hooks and gates."""
        for hook in self._hooks:
            hook.remove()
        if self._gatherer is not None and self._flat is not None:
            self._gatherer.detach()
            for placement in self._flat.placements:
                parameter = placement.parameter
                if not placement.was_replaced():
                    parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    # --- for whoever looks in from outside ------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent."""
        if self._gatherer is not None:
            self._gatherer.complete(reason=reason)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` with whole tensors, on every rank. Collective, blocks."""
        own = next(own for own in self._sharded if own.optimizer is optimizer)
        if self.plan is None:
            return optimizer.state_dict()
        own.adopt_state()
        return consolidate(own, self.plan, self._parameters, self._collectives)

    def detach(self) -> None:
        """Ends the training: the module is as it was, with the new values. Blocks.

        `optimizer_state_dict` works on; steps of the optimizers are ordinary ones again. After an
        exception (see `abandon`) a gather that fails is warned about instead of raised, so that it
        does not hide what happened first.
        """
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
        for own in self._sharded:
            own.remove_hooks()
            own.detach()
        self._gatherer = self._reducer = self._flat = None

    def abandon(self) -> None:
        """After an exception: puts the optimizers' groups right; waits for nothing."""
        self._is_abandoned = True
        for own in self._sharded:
            own.restore()

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
