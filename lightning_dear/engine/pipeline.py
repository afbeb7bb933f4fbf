"""READ FIRST. What is launched when, and what forward waits for.

    gradient -> bucket -> reduce-scatter -> shard -> optimizer step -> all-gather -> parameter
       |______ during backward ______|      |__ once a step __|     |_ during the next forward _|

1. backward: every gradient is copied into its bucket; a full bucket's reduce-scatter is launched,
   in reduce order (`gradient_reducer.py`).
2. step: when the last reduce-scatter is in, the user's optimizer steps this rank's shards bucket by
   bucket, in the order in which forward needs them, and each bucket's all-gather is launched as
   soon as it is stepped (`optimizers/sharded.py`).
3. next forward: a module that reads a parameter waits for its bucket, not for the others
   (`parameter_gatherer.py`, `gate.py`).

A plan may name two kinds of exceptions: *early* buckets are stepped and gathered while backward
still runs (`step.py`); *all-reduced* ones are summed whole in backward, stepped whole by
every rank, and not gathered.

A bucket's exchange says what its messages hold (`exchange/`): numbers as they are, or what a
compressor makes of them (`compression/`). With `gather="gradients"` mean gradients are gathered,
and every rank steps whole tensors when they have arrived (`optimizers/replicated.py`).

The first step is recorded instead (`read_order.py`): its order of reads and gradients makes the
plan. Each optimizer has a plan and these phases of its own (`step.py`); here is what
they share. This file and all below it know torch, not Lightning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.collectives.work import Collectives, Work
from lightning_dear.compression import Compressor
from lightning_dear.engine.hooks import before_every_step
from lightning_dear.engine.plan_lifecycle import Training
from lightning_dear.engine.read_order import has_compiled_region
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.engine.step_state import SendTime, StepState
from lightning_dear.engine.trained_parameters import check_layout, ignored_names, warn_of_others
from lightning_dear.exchange.options import ExchangeOptions, why_not_all_reduce
from lightning_dear.planning import FusionPlanner
from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.telemetry.statistics import Instruments, StepStatistics
from lightning_dear.telemetry.timeline import Timeline

REFUSALS = "_lightning_dear_refusals"
"""Attribute of an optimizer that was one of ours: its own hooks, which say that it has ended."""


class Pipeline(Training):
    """Runs the three phases above for one module and its optimizers.

    Use `forward()` around the training forward and `backward()` around `loss.backward()`; then call
    an optimizer's own `step`, with or without a closure.

    Args:
        module: Mutated from the first step on: parameters become views of flat buffers.
        optimizers: Over parameters of `module`, each parameter in one of them. Element-wise where
            shards are stepped; with `gather="gradients"` any that treats every tensor on its own.
            Mutated: step hooks and `zero_grad`. Their groups may change between a step and the next
            forward, on all ranks alike.
        collectives: What moves the bytes; at world size 1 nothing does.
        fusion: Makes each optimizer's plan from its recorded first step.
        broadcast_buffers: Whether module buffers follow rank 0 after each step.
        audit: Whether to look at every read of every forward; slow.
        first_number: What its first optimizer is numbered, where several pipelines share process
            groups; each optimizer takes a number.
        shares_groups: Whether others train through the same process groups.
        options: What travels, and how; None: gradients there and parameters back, as they are.
        clock: Tells when the device is where; None: that of the parameters' device.
        or_else: What may travel where the optimizers cannot be stepped with `options`.

    Attributes:
        remark: What people are to be told of how optimizers are stepped; None: nothing.
        parts: What each optimizer has of its own, in the order of the optimizers.
        is_stepping: Whether somebody is in `stepping_early`.
        before_change: Called before a change of the optimizers is followed. May block, and raise
            where other ranks do not come.

    Raises:
        ValueError: If an optimizer is not element-wise where it must be, or holds foreign
            parameters, or if ranks hold different models.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        fusion: FusionPlanner,
        *,
        broadcast_buffers: bool = True,
        audit: bool = False,
        first_number: int = 0,
        shares_groups: bool = False,
        options: ExchangeOptions | None = None,
        clock: Clock | None = None,
        or_else: ExchangeOptions | None = None,
    ) -> None:
        instruments = Instruments(clock or clock_of(next(module.parameters()).device), collectives)
        super().__init__(module, collectives, fusion, options or ExchangeOptions(), instruments)
        self.remark: str | None = None
        self.before_change: Callable[[], object] = int
        self._first_number, self._shares_groups = first_number, shares_groups
        self._check(optimizers, optimizers, or_else)
        self._buffers = BufferBroadcast(module, collectives) if broadcast_buffers else None
        self._has_compiled_region = has_compiled_region(module)
        if self._has_compiled_region and collectives.world_size > 1 and collectives.rank == 0:
            warnings.warn(
                "A compiled graph reads parameters where strategy='dear' cannot wait for each: all"
                " are waited for before forward, so that only reduce-scatters overlap. Leave"
                " torch.compile out if communication costs more than compiling saves.",
                stacklevel=2,
            )
        self._audit = audit
        self._is_in_forward = self.is_stepping = False
        self.parts: list[OptimizerPipeline] = []
        self._start(optimizers)
        self._strangers = before_every_step(self._refuse_stranger)

    def _check(
        self,
        optimizers: Sequence[Optimizer],
        unknown: Sequence[Optimizer],
        or_else: ExchangeOptions | None = None,
    ) -> None:
        self.options.check(self.collectives, len(optimizers))
        how = self.collectives, self.options, or_else
        self.options, self.remark = check_layout(self.module, optimizers, unknown, *how)

    def _start(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes the parts of `optimizers`, which have been checked."""
        self.parts[:] = [
            OptimizerPipeline(self, optimizer, number)
            for number, optimizer in enumerate(optimizers, start=self._first_number)
        ]
        ignored = ignored_names(self.module)
        # Noted, as a look at the module later would wait for all-gathers.
        self._own = {one for name, one in self.module.named_parameters() if name not in ignored}
        if self.collectives.world_size > 1 and self.collectives.rank == 0:
            warn_of_others(self.module, optimizers)
        self.early_refusal = self._first_refusal()
        is_one = len(optimizers) == 1 and not self._shares_groups
        self.all_reduce_refusal = why_not_all_reduce(self.options, is_one_optimizer=is_one)
        if len(optimizers) > 1:
            self.hold_back()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that train at present."""
        return [part.optimizer for part in self.parts]

    def _follow(self, changed: Sequence[OptimizerPipeline]) -> None:
        """Goes on with what optimizers hold now. Collective, blocks."""
        self.before_change()
        self.complete_parameters("re-plan")
        self._check(self.optimizers, [part.optimizer for part in changed])
        for part in changed:
            part.follow()

    def _refuse_stranger(self, optimizer: Optimizer) -> None:
        """In front of every optimizer's step: refuses others that step parameters of the module."""
        # Whoever has its state stands for one of ours, see `DeferredStep`.
        is_ours = any(optimizer.state is one.state for one in self.optimizers)
        is_known = is_ours or REFUSALS in vars(optimizer)
        # Without buckets gradients are where anybody finds them.
        if is_known or not self.options.uses_buckets(self.collectives):
            return
        own = self._own.union(*(part.parameters for part in self.parts))
        if any(one in own for group in optimizer.param_groups for one in group["params"]):
            raise RuntimeError(
                f"A {type(optimizer).__name__} that the training does not know steps parameters of"
                f" the {type(self.module).__name__}, whose .grad is not the mean over ranks. What"
                " is to be trained is returned from configure_optimizers; under Fabric"
                " fabric.setup takes it."
            )

    def hold_back(self) -> None:
        """Where collectives must keep one order, sends gradients before each step from now on.

        For several optimizers, of one pipeline or of more: in a backward that reaches them, buckets
        of one may be full sooner or later than another's, differently on each rank.
        """
        if not self.collectives.reads_flags_freely:
            for part in self.parts:
                part.sending = SendTime.BEFORE_STEP

    def _first_refusal(self) -> str | None:
        if self.options.is_of_gradients:
            return "gradients are gathered, and stepped in forward"
        if self.options.codec is not None:
            return "encoded gradients are used once all ranks' are known to be finite"
        if not self.collectives.reads_flags_freely:
            return "the backend's collectives must keep one order on all ranks"
        return None

    def of(self, optimizer: Optimizer) -> OptimizerPipeline:
        """What `optimizer` has of its own.

        Raises:
            ValueError: If it is none of the pipeline's.
        """
        for part in self.parts:
            if part.optimizer is optimizer:
                return part
        raise ValueError(f"{type(optimizer).__name__} is not an optimizer of this training.")

    def measure_next_step(self) -> None:
        """Lets the next step be timed for the planners: see `OptimizerPipeline.timer`.

        Parameters are completed before its forward, so that no wait is in the times. May block.
        """
        for part in self.parts:
            part.measure_next_step()

    def use_codec(self, codec: Compressor) -> None:
        """Another codec of the same kind, or none; see `OptimizerPipeline.use_codec`."""
        for part in self.parts:
            part.use_codec(codec)

    # --- the phases ---------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward. May block for parameters read outside any module."""
        self._finish_buffers()
        with ExitStack() as stack:
            if changed := [part for part in self.parts if part.prepare_forward()]:
                self._follow(changed)
            for part in self.parts:
                part.complete_entry(completes_all=self._has_compiled_region)
                stack.enter_context(part.watching(audits=self._audit))
            stack.enter_context(self.instruments.span("forward"))
            self._is_in_forward = True
            if self._buffers is not None:
                self._buffers.are_due = True
            try:
                yield
            finally:
                self._is_in_forward = False

    @contextmanager
    def backward(
        self, *, synchronize: bool | None = True, optimizers: Sequence[Optimizer] | None = None
    ) -> Iterator[None]:
        """Around a backward.

        Args:
            synchronize: False on all but the last backward of a step: gradients accumulate in
                `.grad` and nothing is sent before the step. None: the same where it is not known
                whether more come, and DDP would average.
            optimizers: Those whose last backward it is; None: all.
        """
        with ExitStack() as stack:
            for part in self.parts:
                is_meant = optimizers is None or part.optimizer in optimizers
                is_last = synchronize and (is_meant or None)
                stack.enter_context(part.backward(synchronize=is_last))
            stack.enter_context(self.instruments.span("backward"))
            yield

    def refuse_early(self, reason: str | None) -> None:
        """Lets plans gather nothing early if a rank gives a reason, for people. Collective."""
        reasons = self.collectives.all_gather_object(self.early_refusal or reason)
        self.early_refusal = next((one for one in reasons if one is not None), None)

    @contextmanager
    def stepping_early(self) -> Iterator[None]:
        """Lets backwards in the block step the buckets that the plan calls early.

        For a block around `optimizer.step(closure)` whose closure runs one backward, after
        `zero_grad`, and where nothing but the step uses the gradients: no clipping, no loss scale,
        no hook that reads or changes them.
        """
        self.is_stepping = True
        parts = self.parts if self.early_refusal is None else ()
        for part in parts:
            part.sending = SendTime.EARLY
        try:
            yield
        finally:
            self.is_stepping = False
            for part in parts:
                part.sending = SendTime.IN_BACKWARD

    @override
    def on_reduce(self) -> None:
        """Launches module buffers, once a forward, behind the last reduce-scatters.

        Not before: some ranks launched their last ones in backward already. Others lack a gradient
        and launch theirs only now. The buffers travel in the other group, and NCCL wants one order
        over both on all ranks.
        """
        if self._buffers is not None and self._buffers.are_due:
            self._buffers.launch()

    @override
    def on_step(self) -> None:
        self._finish_buffers()
        self.instruments.finish_step()
        if self._is_in_forward:
            # Manual optimisation: what no module waits for is read again in the same forward.
            for part in self.parts:
                part.complete_entry(completes_all=self._has_compiled_region)

    def _finish_buffers(self) -> None:
        if self._buffers is not None and self._buffers.launched:
            with self.instruments.waiting("all_gather", "module buffers"):
                self._buffers.wait()

    # --- for whoever looks in from outside ------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent."""
        self.collectives.check()
        for part in self.parts:
            part.plans.complete_parameters(reason)

    def detach(self) -> None:
        """Ends the training: the module is as it was, with the new values. Blocks.

        The optimizers' state stays here, sharded, for `optimizer_state_dict`. After an exception
        (see `abandon`) a gather that fails is warned about instead of raised, so that it does not
        hide what happened first. Idempotent.
        """
        self._strangers.remove()
        if all(part.progress.state is StepState.ENDED for part in self.parts):
            return
        if not self.collectives.was_discarded:
            self.collectives.streams.synchronize()
            for part in self.parts:
                part.drop_gradients()
        try:
            self.complete_parameters("teardown")
            self._finish_buffers()
        except RuntimeError as error:
            if not self.collectives.was_discarded:
                raise
            warnings.warn(
                f"The last step's parameters did not all arrive ({error}); the module's weights are"
                " a mixture of two steps. Load the last checkpoint.",
                stacklevel=2,
            )
        for part in self.parts:
            part.detach()

    def abandon(self) -> None:
        """After an exception: puts the optimizers' groups right; waits for nothing."""
        self.collectives.discard()
        for part in self.parts:
            part.abandon()

    @property
    def statistics(self) -> StepStatistics | None:
        """Of the last finished step of any optimizer; on a GPU None until somebody has asked."""
        return self.instruments.statistics

    @property
    def timeline(self) -> Timeline | None:
        """Where spans are recorded at present; None for nowhere."""
        return self.instruments.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.instruments.record_in(timeline)


class BufferBroadcast:
    """Broadcasts the buffers of a module from rank 0, one flat message per dtype.

    DistributedDataParallel does so in front of each forward and waits; we launch it before the
    step, behind the last gradients, and wait when the step ends.

    Args:
        module: Whose buffers; ranks other than 0 have theirs overwritten, but for `ignored_names`.
        collectives: What moves them.

    Attributes:
        are_due: Whether a forward may have changed them since, on each rank in its own way; to be
            assigned to.
        launched: What is being sent: works, flat messages, and the buffers in each.
    """

    def __init__(self, module: Module, collectives: Collectives) -> None:
        self.are_due = True
        self._module, self._collectives = module, collectives
        self.launched: list[tuple[Work, Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def launch(self) -> None:
        """Starts the broadcast of the buffers' present values. Does not block."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        if self._collectives.world_size > 1:
            ignored = ignored_names(self._module)
            for name, buffer in self._module.named_buffers():
                if name not in ignored:
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for number, buffers in enumerate(by_dtype.values()):
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            work = self._collectives.launch_broadcast(flat, number)
            self.launched.append((work, flat, buffers))
        self.are_due = False

    @torch.no_grad()
    def wait(self) -> None:
        """Blocks until the broadcast is here, then writes rank 0's values into the buffers."""
        for work, flat, buffers in self.launched:
            work.wait()
            if self._collectives.rank != 0:
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                pairs = zip(parts, buffers, strict=True)
                torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in pairs])
        self.launched.clear()
