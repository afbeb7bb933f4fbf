"""READ FIRST. When a training step launches which collectives, and what forward waits for.

    gradient -> bucket -> reduce-scatter -> shard -> optimizer step -> all-gather -> parameter
       |______ during backward ______|      |__ once a step __|     |_ during the next forward _|

1. Backward: each gradient is copied into its bucket (`gradient_collector.py`). All ranks launch
   reduce-scatters in the plan's reduce order, each once its bucket and all buckets before it are
   full (`bucket_round.py`). Several optimizers on NCCL launch them only before the step.
2. Step: when the last reduce-scatter has arrived, the user's optimizer steps this rank's shards in
   the order in which forward needs them. Small buckets are stepped together, in one run. After each
   run the all-gathers of its buckets are launched (`optimizers/sharded.py`).
3. Next forward: a module that reads a parameter of its own waits for the all-gathers of the buckets
   that hold the module's parameters, not for other buckets (`parameter_gatherer.py`, `gate.py`).

A plan may treat some buckets in another way. *All-reduced* buckets are all-reduced in backward.
Then every rank steps all of the bucket, and no all-gather follows.

The exchange decides what a bucket's messages hold (`exchange/`): plain values, or what a compressor
makes of them (`compression/`). With `gather="gradients"` mean gradients are gathered instead of
parameters. In the next forward every rank steps the whole tensors of a bucket, once the bucket's
means have arrived (`optimizers/replicated.py`).

The first backward overlaps nothing: there is no plan yet. The first forward and backward are
recorded, and the plan is made from the order in which they read parameters and produced gradients
(`read_order.py`). Each optimizer has a plan and these three phases of its own (`step.py`). This
file holds what the optimizers of one module share. The engine imports torch, but not Lightning.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear import compression, planning
from lightning_dear.collectives import shards, work
from lightning_dear.engine import hooks, module_tree, read_order, step, step_state
from lightning_dear.engine.trained_parameters import check_layout
from lightning_dear.engine.training import Training
from lightning_dear.exchange.options import ExchangeOptions, why_not_all_reduce
from lightning_dear.telemetry.clock import Clock, clock_of
from lightning_dear.telemetry.statistics import Instruments


class Pipeline:
    """Runs the three phases at the head of this file, for one module and all its optimizers.

    The caller enters `forward()` around the training forward and `backward()` around
    `loss.backward()`, and then calls an optimizer's own `step`, with or without a closure. Each
    optimizer has an `OptimizerPipeline`. What all of them need is in one `Training`.

    The constructor is collective and blocks: it compares models and options between ranks.

    Args:
        module: The module. Mutated: its parameters get gradient hooks. From the first step on they
            are views of flat buffers, and its modules get gates and forward pre-hooks. At world
            size 1 without a compressor there are only flat buffers.
        optimizers: Optimizers of parameters of `module`; no parameter may be in two of them. Where
            shards are stepped they must be element-wise. With `gather="gradients"` it is enough
            that they treat each tensor on its own. Mutated: they get step hooks, and another
            `zero_grad`. The parameters in their groups may change only between a step and the next
            forward, on all ranks alike.
        collectives: Launches all messages. At world size 1 nothing is sent.
        fusion: Planner that makes each optimizer's plan from its recorded first step.
        broadcast_buffers: Whether rank 0's module buffers overwrite those of other ranks in each
            step, if a forward has run since the last broadcast. False means that each rank keeps
            its own.
        audit: Whether forwards check every read of a parameter, see `active_plan.audit`. Slow.
            Recorded and timed forwards are not checked.
        weighs: Whether batches have weights, see `BatchWeights`. False: all ranks count alike.
        first_number: Optimizer number of the first optimizer; the others have the numbers after it.
            Message tags depend on these numbers. Pipelines that share process groups must have
            different ones.
        shares_groups: Whether other pipelines use the same process groups. If so, no bucket is
            all-reduced because a plan says so. The caller must call `hold_back` of all of them.
        options: Which values travel in the reduce half and in the gather half, and their
            compressor. None means gradients, then parameters, without a compressor.
        clock: Measures when the device reaches a point of the program. None means the clock of the
            parameters' device.
        or_else: Options to fall back to if the optimizers cannot be stepped with `options`. None
            means that such optimizers are refused.

    Attributes:
        training: What all optimizers of the module share.
        remark: Sentences for the user about how the optimizers are stepped, and about parameters
            that none of them holds. None means that there is nothing to say.
        parts: One `OptimizerPipeline` for each optimizer, in the order of the optimizers.
        before_change: Function that each rank calls before it drops a plan because an optimizer's
            parameters have changed; to be assigned to. At first it does nothing. `DearStrategy`
            assigns a barrier, which raises if another rank has seen no such change.

    Raises:
        ValueError: What `check_layout` and `ExchangeOptions.check` raise. For example, an optimizer
            is not element-wise where it must be, or ranks have different models.
    """

    def __init__(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        collectives: work.Collectives,
        fusion: planning.FusionPlanner,
        *,
        broadcast_buffers: bool = True,
        audit: bool = False,
        weighs: bool = False,
        first_number: int = 0,
        shares_groups: bool = False,
        options: ExchangeOptions | None = None,
        clock: Clock | None = None,
        or_else: ExchangeOptions | None = None,
    ) -> None:
        device, blocks = next(module.parameters()).device, collectives.wait_blocks_host
        instruments = Instruments(clock or clock_of(device, in_threads=blocks), collectives)
        what = options or ExchangeOptions(), instruments, module_tree.ModuleTree(module)
        training = self.training = Training(module, collectives, fusion, *what)
        # It launches all messages of this training.
        self.collectives = collectives
        self.remark: str | None = None
        # `int()` does nothing, and returns 0.
        self.before_change: Callable[[], object] = int
        self._first_number, self._shares_groups = first_number, shares_groups
        self._check(optimizers, optimizers, or_else)
        groups = [group for one in optimizers for group in one.param_groups]
        collectives.check_memory([one for group in groups for one in group["params"]])
        collectives.sums_in_fp32 = training.options.reduce_dtype is not None
        is_narrow = any(one.dtype in shards.SUMMED_IN_FP32 for one in module.parameters())
        if collectives.sums_in_fp32 and not is_narrow and training.world.rank == 0:
            warnings.warn(
                "reduce_dtype has no effect on fp32 gradients. Leave it out.", stacklevel=2
            )
        training.buffers.is_on &= broadcast_buffers
        training.weights.is_on = weighs
        self._version = 0
        self._look()
        self._audit = audit
        self.parts: list[step.OptimizerPipeline] = []
        self._start(optimizers)
        self._strangers = hooks.before_every_step(training.refuse_stranger)

    def _look(self) -> None:
        """Looks for replaced modules, parameters and forwards, and for compiled modules. Local."""
        training, tree = self.training, self.training.tree
        tree.look()
        if tree.version == self._version:
            return
        self._version, was_compiled = tree.version, training.has_compiled_region
        training.has_compiled_region = read_order.has_compiled_region(training.module)
        is_new = training.has_compiled_region and not was_compiled
        if is_new and training.world.size > 1 and training.world.rank == 0:
            warnings.warn(
                "A compiled module, a CUDA graph or a forward that was replaced reads parameters"
                " where strategy='dear' cannot wait for each of them. Leave torch.compile or the"
                " graph out if communication costs more than it saves. With it, forward waits for"
                " all parameters first; only reduce-scatters overlap.",
                stacklevel=3,
            )

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
        """Makes `parts`, one for each of `optimizers`, and decides which buckets plans may have.

        To be called after `_check`. Local.
        """
        training = self.training
        training.follow_optimizers(optimizers)
        self.remark = " ".join(filter(None, (self.remark, training.unheld.remark))) or None
        self.parts[:] = [
            step.OptimizerPipeline(training, optimizer, number)
            for number, optimizer in enumerate(optimizers, start=self._first_number)
        ]
        is_one = len(optimizers) == 1 and not self._shares_groups
        training.all_reduce_refusal = why_not_all_reduce(training.options, is_one_optimizer=is_one)
        if len(optimizers) > 1:
            self.hold_back()
        idle = step_state.StepState.EMPTY, step_state.StepState.ENDED
        training.weights.holds_gradients = lambda: any(
            part.progress.state not in idle for part in self.parts
        )

    @property
    def options(self) -> ExchangeOptions:
        """Which values travel in the reduce half and in the gather half, and their compressor."""
        return self.training.options

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this training, in the order of `parts`."""
        return [part.optimizer for part in self.parts]

    def _follow(self, changed: Sequence[step.OptimizerPipeline]) -> None:
        """Drops the plans of `changed`, optimizers whose parameters have changed.

        Their next step is recorded and makes new plans. Collective, blocks.
        """
        self.before_change()
        self.complete_parameters("re-plan")
        self._check(self.optimizers, [part.optimizer for part in changed])
        for part in changed:
            part.follow()
        self.training.follow_optimizers(self.optimizers)

    def hold_back(self) -> None:
        """On NCCL, lets buckets be launched before the step instead of in backward.

        Not on gloo, which matches messages by tag. NCCL matches them by order. It is needed if
        several optimizers, of one pipeline or of several, share process groups: in a backward that
        reaches two of them, rank 0 may first fill a bucket of optimizer 0, and rank 1 a bucket of
        optimizer 1. Launched in that order, the two buckets would be summed together.

        On any backend, a step may have only one weighed batch from then on (`BatchWeights`).
        """
        self.training.weights.may_accumulate = False
        if not self.collectives.matches_by_tag:
            for part in self.parts:
                part.is_held_back = True

    def of(self, optimizer: Optimizer) -> step.OptimizerPipeline:
        """The `OptimizerPipeline` of `optimizer`.

        Raises:
            ValueError: If the optimizer is not one of `optimizers`.
        """
        for part in self.parts:
            if part.optimizer is optimizer:
                return part
        raise ValueError(
            f"This {type(optimizer).__name__} is not an optimizer of this fit. Pass one of"
            " trainer.optimizers. strategy='dear' has gradients only for optimizers that"
            " configure_optimizers returned, or under Fabric fabric.setup."
        )

    def measure_next_step(self) -> None:
        """Lets the next step be timed for planners; `OptimizerPipeline.timer` has the times then.

        Before the first plan nothing is timed. Blocks until all parameters are complete, so that
        the times include no wait for them. Local.
        """
        for part in self.parts:
            part.measure_next_step()

    def use_compressor(self, compressor: compression.Compressor) -> None:
        """Calls `OptimizerPipeline.use_compressor` of every optimizer; see there."""
        for part in self.parts:
            part.use_compressor(compressor)

    # --- the phases ---------------------------------------------------------------------------

    @contextmanager
    def forward(self, *, synchronize: bool = True) -> Iterator[None]:
        """A context around a training forward. To enter it may block.

        It waits for the parameters that forward reads outside any module. If part of the module is
        compiled, or other modules own the parameters than before, it waits for all of them. If an
        optimizer's parameters have changed since its plan was made, the plan is dropped, which is
        collective.

        Module buffers are broadcast first if a rank writes them between steps, which is collective,
        too; see `BufferBroadcast`.

        Args:
            synchronize: Whether a last backward follows. False in a block in which gradients are
                only accumulated.
        """
        training = self.training
        training.buffers.finish()
        self._look()
        training.buffers.prepare(synchronize=synchronize)
        if training.aliased is None and training.world.rank == 0:
            training.aliased = module_tree.aliased_names(training.module)
        with ExitStack() as stack:
            if changed := [part for part in self.parts if part.prepare_forward()]:
                self._follow(changed)
            for part in self.parts:
                part.complete_entry()
                stack.enter_context(part.watching(audits=self._audit))
            stack.enter_context(training.instruments.span("forward"))
            training.is_in_forward = True
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
                while it runs, or before the step (see `hold_back`). False means that more backwards
                of the step follow: gradients accumulate in `.grad`, and this backward launches
                nothing. None means that it is not known whether more follow. It does what False
                does, and remembers that DDP would have averaged here: if another backward of the
                step follows, `GradientHooks.refuse_another_sum` is called.
            optimizers: Optimizers for which `synchronize` holds. For the others True counts as
                None. None means all optimizers.

        With any value of `synchronize` but False it ends with `end_backward`.
        """
        unheld, weights = self.training.unheld, self.training.weights
        if synchronize:
            weights.launch()
        unheld.is_due = synchronize is not False and unheld.patience > 0
        with ExitStack() as stack:
            for part in self.parts:
                is_meant = optimizers is None or part.optimizer in optimizers
                is_last = synchronize and (is_meant or None)
                stack.enter_context(part.backward(synchronize=is_last))
            stack.enter_context(weights.dropping(self.training.module.parameters()))
            stack.enter_context(self.training.instruments.span("backward"))
            yield
        self.end_backward()

    @torch.no_grad()
    def end_backward(self) -> None:
        """Averages gradients that no optimizer holds, before hooks that may read them.

        To be called within `backward`, after the user's backward, if hooks follow there. Does
        nothing if there are no such gradients, or if they have been averaged since. Otherwise
        collective, and blocks. It first reduces the optimizers' gradients: a rank without one of
        them has buckets left to launch, and all ranks must launch in one order.
        """
        training = self.training
        if not training.unheld.is_due:
            return
        for part in self.parts:
            if part.progress.state is step_state.StepState.SENDING:
                part.mean.reduce()
        with training.instruments.waiting("reduce_scatter", "gradients that no optimizer holds"):
            training.unheld.average()

    # --- for strategies and callbacks -----------------------------------------------------------

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step. Local, idempotent.

        Args:
            reason: What forces the wait, for the timeline.

        Raises:
            RuntimeError: If another rank has failed, or the timeout has passed.
        """
        self.collectives.check()
        for part in self.parts:
            part.plans.complete_parameters(reason)

    def detach(self) -> None:
        """Ends the training: removes hooks and flat buffers. Parameters keep their new values.

        Blocks until all all-gathers have arrived. Collective if buckets were launched and not yet
        waited for, since that round is finished first. After `abandon` it finishes no round, and
        is local. An all-gather that fails then gives a warning: an error would hide the exception
        because of which `abandon` was called.

        State of shards stays in `parts`, for `OptimizerPipeline.optimizer_state_dict`. With
        `gather="gradients"` the whole state is in `optimizer.state`, on every rank. Idempotent.
        """
        self._strangers.remove()
        if all(part.progress.state is step_state.StepState.ENDED for part in self.parts):
            return
        if not self.collectives.was_discarded:
            self.collectives.streams.synchronize()
            for part in self.parts:
                part.drop_gradients()
        try:
            self.complete_parameters("teardown")
            self.training.buffers.finish()
        except RuntimeError as error:
            if not self.collectives.was_discarded:
                raise
            warnings.warn(
                "The module's weights are a mixture of two steps. Load the last checkpoint."
                f" After an error, not all parameters of the last step have arrived ({error}).",
                stacklevel=2,
            )
        # Validations after the training do not ask other ranks.
        self.training.buffers.is_on = False
        for part in self.parts:
            part.detach()
        self.collectives.end_training()

    def abandon(self) -> None:
        """After an exception: restores the optimizers' parameter groups if a step has raised.

        The process groups may not be used again. Does not block. `detach` should follow: until
        then hooks and flat buffers stay in place.
        """
        self.collectives.discard()
        for part in self.parts:
            part.abandon()
