"""READ FIRST. When a training step launches which collectives, and what forward waits for.

    gradient -> bucket -> reduce-scatter -> shard -> optimizer step -> all-gather -> parameter
       |______ during backward ______|      |__ once a step __|     |_ during the next forward _|

1. Backward: each gradient is copied into its bucket (`gradient_collector.py`). Once a bucket is
   full, its reduce-scatter is launched. All ranks launch buckets in the plan's reduce order
   (`bucket_round.py`).
2. Step: when the last reduce-scatter has arrived, the user's optimizer steps this rank's shards,
   bucket by bucket, in the order in which forward needs them. Each bucket's all-gather is launched
   as soon as the bucket is stepped (`optimizers/sharded.py`).
3. Next forward: a module that reads a parameter waits for the all-gather of that parameter's
   bucket, not for other buckets (`parameter_gatherer.py`, `gate.py`).

A plan may treat some buckets in another way. *Early* buckets are stepped and gathered while
backward still runs (`step.py`). *All-reduced* buckets are all-reduced in backward; then every rank
steps all of the bucket, and no all-gather follows.

The exchange decides what a bucket's messages hold (`exchange/`): plain values, or what a compressor
makes of them (`compression/`). With `gather="gradients"` mean gradients are gathered instead of
parameters, and every rank steps whole tensors once the means have arrived
(`optimizers/replicated.py`).

The first step overlaps nothing. It is recorded (`read_order.py`), and the plan is made from the
order in which it read parameters and produced gradients. Each optimizer has a plan and these three
phases of its own (`step.py`). This file holds what the optimizers of one module share. The engine
imports torch, but not Lightning.
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

    The caller enters `forward()` around the training forward and `backward()` around
    `loss.backward()`, and then calls an optimizer's own `step`, with or without a closure. Each
    optimizer has an `OptimizerPipeline`. What all of them need is in one `Training`.

    The constructor is collective and blocks: it compares models and options between ranks.

    Args:
        module: The module. Mutated from the first step on: its parameters become views of flat
            buffers.
        optimizers: Optimizers of parameters of `module`; each parameter is in one optimizer. Where
            shards are stepped they must be element-wise. With `gather="gradients"` it is enough
            that they treat each tensor on its own. Mutated: they get step hooks, and another
            `zero_grad`. Their parameter groups may change between a step and the next forward, on
            all ranks alike.
        collectives: Launches all messages. At world size 1 nothing is sent.
        fusion: Planner that makes each optimizer's plan from its recorded first step.
        broadcast_buffers: Whether rank 0's module buffers are broadcast after each step.
        audit: Whether to check every read of a parameter in every forward. Slow.
        first_number: Optimizer number of the first optimizer; the others have the numbers after it.
            It tells apart the messages of pipelines that share process groups.
        shares_groups: Whether other pipelines use the same process groups.
        options: Which values travel in both halves, and their compressor. None means gradients in
            the reduce half and parameters in the gather half, without a compressor.
        clock: Measures when the device reaches a point of the program. None means the clock of the
            parameters' device.
        or_else: Options to fall back to if the optimizers cannot be stepped with `options`. None
            means that such optimizers are refused.

    Attributes:
        training: What all optimizers of the module share.
        remark: Sentence for the user about how the optimizers are stepped. None means that there is
            nothing to say.
        parts: One `OptimizerPipeline` for each optimizer, in the order of the optimizers.
        is_stepping: Whether a `stepping_early` block is entered.
        before_change: Called by each rank before it makes a new plan because an optimizer's
            parameters have changed. May block, and raise if other ranks do not call it, too.

    Raises:
        ValueError: If an optimizer is not element-wise where it must be, or has parameters of
            another module, or if ranks have different models.
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
                "A compiled graph reads parameters where strategy='dear' cannot wait for each of"
                " them. Leave torch.compile out if communication costs more than compiling saves."
                " With it, forward waits for all parameters first; only reduce-scatters overlap.",
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
        """Makes an `OptimizerPipeline` for each of `optimizers`, which `_check` has accepted."""
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
        """Notes optimizers and parameters now: later, reading the module would wait for gathers."""
        training, ignored = self.training, ignored_names(self.training.module)
        named = training.module.named_parameters()
        own = {parameter for name, parameter in named if name not in ignored}
        training.optimizers = self.optimizers
        training.parameters = own.union(*(part.parameters for part in self.parts))

    @property
    def collectives(self) -> Collectives:
        """Launches all messages of this training."""
        return self.training.collectives

    @property
    def options(self) -> ExchangeOptions:
        """Which values travel in both halves, and their compressor."""
        return self.training.options

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this training, in the order of `parts`."""
        return [part.optimizer for part in self.parts]

    def _follow(self, changed: Sequence[OptimizerPipeline]) -> None:
        """Records and plans anew for optimizers whose parameters changed. Collective, blocks."""
        self.before_change()
        self.complete_parameters("re-plan")
        self._check(self.optimizers, [part.optimizer for part in changed])
        for part in changed:
            part.follow()
        self._note_trained()

    def hold_back(self) -> None:
        """Lets buckets be launched before the step instead of in backward, if order counts (NCCL).

        Needed if several optimizers, of one pipeline or of several, share process groups. In a
        backward that reaches them all, rank 0 may fill a bucket of one optimizer first, and rank 1
        a bucket of another. Collectives that are matched by their order must not be launched so.
        """
        if not self.collectives.matches_by_tag:
            for part in self.parts:
                part.sending = SendTime.BEFORE_STEP

    def _first_refusal(self) -> str | None:
        """Why no bucket may be stepped and gathered in backward. None means that it may."""
        if self.options.is_of_gradients:
            return "with gather='gradients' buckets are stepped in forward"
        if self.options.compressor is not None:
            return "with a compressor no bucket is stepped before all ranks have looked for inf"
        if not self.collectives.matches_by_tag:
            return "with this backend all ranks must launch collectives in one order"
        return None

    def of(self, optimizer: Optimizer) -> OptimizerPipeline:
        """The `OptimizerPipeline` of `optimizer`.

        Raises:
            ValueError: If the optimizer is not one of `optimizers`.
        """
        for part in self.parts:
            if part.optimizer is optimizer:
                return part
        raise ValueError(f"This {type(optimizer).__name__} is not trained here. Pass one that is.")

    def measure_next_step(self) -> None:
        """Lets the next step be timed for planners; `OptimizerPipeline.timer` has the times then.

        Blocks until all parameters are complete, so that the times include no wait for them.
        """
        for part in self.parts:
            part.measure_next_step()

    def use_compressor(self, compressor: Compressor) -> None:
        """Calls `OptimizerPipeline.use_compressor` of every optimizer."""
        for part in self.parts:
            part.use_compressor(compressor)

    # --- the phases ---------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context around a training forward, which it may start with waits.

        Blocks until the parameters that forward reads outside any module are complete. If an
        optimizer's parameters have changed since the last forward it is collective, too.
        """
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
        """A context around a backward.

        Args:
            synchronize: True means that this is the last backward of the step: buckets are launched
                while it runs. False means that more backwards of the step follow: gradients
                accumulate in `.grad`, and nothing is sent before the step. None means that it is
                not known whether more follow. It does what False does, and notes that DDP would
                have averaged here.
            optimizers: Optimizers for which `synchronize` holds; for the others True counts as
                None. None means all optimizers.
        """
        with ExitStack() as stack:
            for part in self.parts:
                is_meant = optimizers is None or part.optimizer in optimizers
                is_last = synchronize and (is_meant or None)
                stack.enter_context(part.backward(synchronize=is_last))
            stack.enter_context(self.training.instruments.span("backward"))
            yield

    def refuse_early(self, reason: str | None) -> None:
        """Forbids early buckets in all plans, if a rank gives a reason. Collective, blocks.

        Args:
            reason: Why this rank forbids them, in words for the user. None means that it does not.
        """
        own = self.training.early_refusal or reason
        reasons = self.collectives.all_gather_object(own)
        self.training.early_refusal = next((one for one in reasons if one is not None), None)

    @contextmanager
    def stepping_early(self) -> Iterator[None]:
        """A context in which backward steps and gathers the plan's early buckets.

        It belongs around `optimizer.step(closure)`. The closure must call `zero_grad` and then run
        one backward. Nothing but the step may use the gradients: no clipping, no loss scale, no
        hook that reads or changes them. Has no effect if early buckets are forbidden.
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

    # --- for strategies and callbacks -----------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step. Local, idempotent.

        Args:
            reason: What forces the wait, for the timeline.
        """
        self.collectives.check()
        for part in self.parts:
            part.plans.complete_parameters(reason)

    def detach(self) -> None:
        """Ends the training: removes hooks and flat buffers, keeps the new weights. Blocks.

        The optimizers' state stays in this object, sharded, for `optimizer_state_dict`. After
        `abandon`, an all-gather that fails gives a warning instead of an error, which would hide
        the first exception. Idempotent.
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
                "The module's weights are a mixture of two steps. Load the last checkpoint."
                f" After an error, not all parameters of the last step have arrived ({error}).",
                stacklevel=2,
            )
        for part in self.parts:
            part.detach()

    def abandon(self) -> None:
        """Restores the optimizers' parameter groups after an exception. Does not block."""
        self.collectives.discard()
        for part in self.parts:
            part.abandon()

    @property
    def statistics(self) -> StepStatistics | None:
        """Figures of the last finished step of any optimizer.

        None on a GPU until the first call, since waits are timed only from then on.
        """
        return self.training.instruments.statistics

    @property
    def timeline(self) -> Timeline | None:
        """Timeline that spans are recorded in. None means that nothing is recorded."""
        return self.training.instruments.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self.training.instruments.record_in(timeline)
