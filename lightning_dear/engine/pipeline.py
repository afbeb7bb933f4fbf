"""READ FIRST. What is launched when, and what forward waits for.

    gradient -> bucket -> reduce-scatter -> shard -> optimizer step -> all-gather -> parameter
       |______ during backward ______|      |__ once a step __|     |_ during the next forward _|

1. backward: every gradient is copied into its bucket (`gradient_collector.py`); a full bucket's
   reduce-scatter is launched, in reduce order (`bucket_round.py`).
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

from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Compressor
from lightning_dear.engine.hooks import before_every_step
from lightning_dear.engine.module_tree import ModuleTree, ignored_names
from lightning_dear.engine.read_order import has_compiled_region
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.engine.step_state import SendTime, StepState
from lightning_dear.engine.trained_parameters import check_layout, warn_of_others
from lightning_dear.engine.training import BufferBroadcast, Training
from lightning_dear.exchange.options import ExchangeOptions, why_not_all_reduce
from lightning_dear.planning import FusionPlanner
from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.telemetry.statistics import Instruments, StepStatistics
from lightning_dear.telemetry.timeline import Timeline


class Pipeline:
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
        options: What travels, and how. None means that gradients travel there and parameters back,
            as they are.
        clock: Tells when the device is where. None means that of the parameters' device.
        or_else: What may travel where the optimizers cannot be stepped with `options`.

    Attributes:
        training: What the optimizers share.
        remark: What people are to be told of how optimizers are stepped. None means nothing.
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
        what = options or ExchangeOptions(), instruments, ModuleTree(module)
        training = self.training = Training(module, collectives, fusion, *what)
        self.remark: str | None = None
        self.before_change: Callable[[], object] = int
        self._first_number, self._shares_groups = first_number, shares_groups
        self._check(optimizers, optimizers, or_else)
        if broadcast_buffers:
            training.broadcast = BufferBroadcast(training.tree, collectives)
        training.has_compiled_region = has_compiled_region(module)
        if training.has_compiled_region and training.world.size > 1 and training.world.rank == 0:
            warnings.warn(
                "A compiled graph reads parameters where strategy='dear' cannot wait for each: all"
                " are waited for before forward, so that only reduce-scatters overlap. Leave"
                " torch.compile out if communication costs more than compiling saves.",
                stacklevel=2,
            )
        self._audit, self.is_stepping = audit, False
        self.parts: list[OptimizerPipeline] = []
        self._start(optimizers)
        self._strangers = before_every_step(training.refuse_stranger)

    def _check(
        self,
        optimizers: Sequence[Optimizer],
        unknown: Sequence[Optimizer],
        or_else: ExchangeOptions | None = None,
    ) -> None:
        training = self.training
        training.options.check(training.collectives, len(optimizers))
        how = training.collectives, training.options, or_else
        training.options, self.remark = check_layout(training.module, optimizers, unknown, *how)

    def _start(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes the parts of `optimizers`, which have been checked."""
        training = self.training
        self.parts[:] = [
            OptimizerPipeline(training, optimizer, number)
            for number, optimizer in enumerate(optimizers, start=self._first_number)
        ]
        self._note_trained()
        if training.world.size > 1 and training.world.rank == 0:
            warn_of_others(training.module, optimizers)
        training.early_refusal = self._first_refusal()
        is_one = len(optimizers) == 1 and not self._shares_groups
        training.all_reduce_refusal = why_not_all_reduce(training.options, is_one_optimizer=is_one)
        if len(optimizers) > 1:
            self.hold_back()

    def _note_trained(self) -> None:
        """Notes what is trained by now, as a look at the module later would wait for gathers."""
        training, ignored = self.training, ignored_names(self.training.module)
        named = training.module.named_parameters()
        own = {one for name, one in named if name not in ignored}
        training.optimizers = self.optimizers
        training.parameters = own.union(*(part.parameters for part in self.parts))

    @property
    def collectives(self) -> Collectives:
        """What moves the bytes."""
        return self.training.collectives

    @property
    def options(self) -> ExchangeOptions:
        """What travels, and how."""
        return self.training.options

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that train at present."""
        return [part.optimizer for part in self.parts]

    def _follow(self, changed: Sequence[OptimizerPipeline]) -> None:
        """Goes on with what optimizers hold now. Collective, blocks."""
        self.before_change()
        self.complete_parameters("re-plan")
        self._check(self.optimizers, [part.optimizer for part in changed])
        for part in changed:
            part.follow()
        self._note_trained()

    def hold_back(self) -> None:
        """Where collectives must keep one order, sends gradients before each step from now on.

        For several optimizers, of one pipeline or of more: in a backward that reaches them, buckets
        of one may be full sooner or later than another's, differently on each rank.
        """
        if not self.collectives.matches_by_tag:
            for part in self.parts:
                part.sending = SendTime.BEFORE_STEP

    def _first_refusal(self) -> str | None:
        if self.options.is_of_gradients:
            return "gradients are gathered, and stepped in forward"
        if self.options.compressor is not None:
            return "encoded gradients are used once all ranks' are known to be finite"
        if not self.collectives.matches_by_tag:
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

    def use_compressor(self, compressor: Compressor) -> None:
        """Another codec of the same kind, or none; see `OptimizerPipeline.use_compressor`."""
        for part in self.parts:
            part.use_compressor(compressor)

    # --- the phases ---------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training forward. May block for parameters read outside any module."""
        training = self.training
        training.finish_buffers()
        training.tree.look()
        with ExitStack() as stack:
            if changed := [part for part in self.parts if part.prepare_forward()]:
                self._follow(changed)
            for part in self.parts:
                part.complete_entry()
                stack.enter_context(part.watching(audits=self._audit))
            stack.enter_context(training.instruments.span("forward"))
            training.is_in_forward = True
            if training.broadcast is not None:
                training.broadcast.are_due = True
            try:
                yield
            finally:
                training.is_in_forward = False

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
            stack.enter_context(self.training.instruments.span("backward"))
            yield

    def refuse_early(self, reason: str | None) -> None:
        """Lets plans gather nothing early if a rank gives a reason, for people. Collective."""
        own = self.training.early_refusal or reason
        reasons = self.collectives.all_gather_object(own)
        self.training.early_refusal = next((one for one in reasons if one is not None), None)

    @contextmanager
    def stepping_early(self) -> Iterator[None]:
        """Lets backwards in the block step the buckets that the plan calls early.

        For a block around `optimizer.step(closure)` whose closure runs one backward, after
        `zero_grad`, and where nothing but the step uses the gradients: no clipping, no loss scale,
        no hook that reads or changes them.
        """
        self.is_stepping = True
        parts = self.parts if self.training.early_refusal is None else ()
        for part in parts:
            part.sending = SendTime.EARLY
        try:
            yield
        finally:
            self.is_stepping = False
            for part in parts:
                part.sending = SendTime.IN_BACKWARD

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
            self.training.finish_buffers()
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
        return self.training.instruments.statistics

    @property
    def timeline(self) -> Timeline | None:
        """Where spans are recorded at present; None for nowhere."""
        return self.training.instruments.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.training.instruments.record_in(timeline)
