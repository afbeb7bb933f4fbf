"""Base of the strategies for Trainer and Fabric: options, pipelines, methods for the user."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import distributed
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear import compression, private_names, registration
from lightning_dear.callbacks.batch_split import BatchSplit
from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.collectives.factory import alone, new_collectives
from lightning_dear.collectives.store import attempt_store
from lightning_dear.collectives.work import Collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.local_steps import OuterHalf
from lightning_dear.planning import BucketPlan, resolve_fusion, save_plan
from lightning_dear.strategy import checkpoint_io, connections, local, refusals, starting
from lightning_dear.telemetry.statistics import StepStatistics
from lightning_dear.telemetry.timeline import Timeline

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Default of `timeout`. If a rank hangs, the others wait this long in a collective and then raise.
Lightning's default is 30 minutes."""

NO_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives if `timeout` is None: torch's default on gloo. On NCCL torch's is 10."""


@contextmanager
def meanwhile(owner: object, **values: Any) -> Generator[None, None, None]:
    """A context in which attributes of `owner` have other values. Former ones are put back."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class PipelineStrategy(ABC):
    """Trains modules through pipelines of the engine.

    Subclasses name this class before Lightning's `DDPStrategy` among their bases.

    Attributes:
        compression_schedule: Schedule that the user has passed. None means no schedule.
    """

    _is_validating = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the names "dear", "dear_spawn", "dear_fork" and "dear_notebook"."""
        registration.register(strategy_registry, cls)

    def _take_options(self, given: Mapping[str, Any]) -> None:
        """Checks the options of the exchange and keeps them. `DearStrategy` describes them.

        Args:
            given: The strategy's options by name, as `checked_options` returns them.

        Raises:
            ValueError: If a name is unknown, or options exclude each other.
            TypeError: If an object has a wrong type.
        """
        codec, groups = compression.resolve_compressors(given["compressor"])
        schedule: CompressionSchedule | None = given.get("compression_schedule")
        if schedule is not None:
            schedule.check(codec)
        self._gather: str | None = given["gather"]
        self._of_engine = {name: given[name] for name in ("broadcast_buffers", "audit")}
        split = given.get("split")
        # Parts of a global batch differ in size, and their samples count alike.
        weights = given["weights"] or ("samples" if split is not None else None)
        self._of_engine["weighs"] = weights is not None
        refusals.check_weights(weights, codec, groups)
        self._gradients_in_hooks = given.get("gradients_in_hooks", True)
        self._checks_digests = given["check_digests"]
        self._hops: int | None = given["hops"]
        if self._hops not in (None, 1, 2):
            raise ValueError(f"hops must be 1, 2 or None, got {self._hops!r}. Pass one of these.")
        how = given.get("decouple", True), codec, groups, given["reduce_dtype"]
        self._options = ExchangeOptions(self._gather or default_gather(codec, groups), *how)
        self._or_else: ExchangeOptions | None = None
        if self._gather is None:
            with suppress(ValueError):
                self._or_else = replace(self._options, gather="gradients")
        self._fusion = resolve_fusion(given["fusion"], given["bucket_cap_mb"])
        refusals.check_planner(self._fusion, self._options)
        if schedule is not None:
            schedule.check_use(self._fusion)
        self.compression_schedule = schedule
        self._split = None if split is None else BatchSplit(split, self._fusion)
        self._outer, self._local = OuterHalf(), local.LocalStepsOption(given["local_steps"])
        if self._local.steps is not None:
            local.check_local_steps(self._options, self._fusion, given)
        self._own_callbacks = schedule, self._split
        self._is_elastic = given.get("elastic", False)

    def _configure_launcher(self) -> None:
        """Checks how ranks were started, and does what Lightning does. Local.

        Unless the user has passed a `CheckpointIO`, checkpoints are written atomically.

        Raises:
            ValueError: See `starting.check_start` and `starting.check_elastic`.
        """
        self._check_start(self)
        if self._is_elastic:
            starting.check_elastic(cast(Any, self).cluster_environment)
        super()._configure_launcher()  # type: ignore[misc]
        if private_names.CHECKPOINT_IO.of(self) is None:
            private_names.CHECKPOINT_IO.replace_in(self, checkpoint_io.AtomicCheckpointIO())

    def _check_start(self, host: Any) -> None:
        starting.check_start(host.cluster_environment, host.parallel_devices, host.num_nodes)

    @contextmanager
    def _meeting(self) -> Generator[None, None, None]:
        """Around Lightning's setup of the default process group. Collective. Blocks.

        Says which nodes do not come. Under torchrun creates the group before the block, with store
        keys that are new; Lightning uses a group that is there. Earlier restarts have left keys in
        torchrun's store, with addresses of dead ranks, which would be found under the usual keys.
        """
        host: Any = self
        environment, device = host.cluster_environment, host.root_device
        with starting.late_nodes_named(environment, host.num_processes, host.num_nodes):
            is_elastic = isinstance(environment, TorchElasticEnvironment)
            if is_elastic and (store := attempt_store(host._timeout or NO_TIMEOUT)) is not None:
                device_id = device if device.type != "cpu" else None
                options = {"timeout": host._timeout, "store": store, "device_id": device_id}
                join = private_names.INIT_DIST_CONNECTION.of(distributed)
                join(environment, host._get_process_group_backend(), **options)
            yield

    def _new_collectives(self) -> Collectives:
        """Returns collectives that fit the options. Collective. Blocks."""
        host: Any = self
        # With two hops a rank sends rows to few other ranks, so it need not open connections to all
        # ranks now.
        has_two = self._hops == 2 and self._options.encodes_row_by_row
        is_split = self._options.compressor is not None or self._options.reduce_dtype is not None
        sends_rows = is_split and not has_two
        node = host.node_rank, host.local_rank
        return new_collectives(
            host.root_device, host._timeout, sends_rows=sends_rows, hops=self._hops, node=node
        )

    def _new_halves(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        num_steps: float = 0,
        **own: Any,
    ) -> tuple[Pipeline, OuterHalf]:
        """Returns a pipeline with this strategy's options, and its outer half. Collective. Blocks.

        With local steps the pipeline has this rank alone, once `dense_steps` steps were made.
        Otherwise the outer half does nothing. The arguments are those of `_new_pipeline`.
        """
        steps, is_one = self._local.steps, collectives.world.size == 1
        if steps is not None and is_one:
            rank_zero_info("local_steps has no effect with one rank. It trains as plain torch.")
        elif steps is not None:
            for optimizer in optimizers:
                steps.check(module, optimizer)
        if steps is None or is_one or num_steps < steps.dense_steps:
            return self._new_pipeline(module, optimizers, collectives, **own), OuterHalf()
        with meanwhile(self, _options=ExchangeOptions(), _or_else=ExchangeOptions("gradients")):
            pipeline = self._new_pipeline(module, optimizers, alone(collectives), **own)
        how = steps, collectives, self._options, self._fusion
        averages = self._of_engine["broadcast_buffers"]
        return pipeline, OuterHalf.of(pipeline, *how, averages_buffers=averages)

    def _end_of_dense_steps(
        self, dense: Pipeline, num_steps: float
    ) -> tuple[Pipeline, OuterHalf] | None:
        """Goes over to local steps once `dense_steps` steps were made. Then collective, and blocks.

        Optimizer state becomes whole on every rank. To be called between two steps.

        Args:
            dense: Pipeline over all ranks, which is detached.
            num_steps: Number of steps so far.

        Returns:
            The new halves. None means that nothing is to be done.
        """
        if not self._local.is_due(dense, num_steps):
            return None
        for part in dense.parts:
            part.sync_replicas()
        states = [part.optimizer_state_dict() for part in dense.parts]
        first, timeline = dense.parts[0].plans.number, dense.training.instruments.timeline
        dense.detach()
        how = dense.training.module, dense.optimizers, dense.collectives, num_steps
        pipeline, outer = self._new_halves(*how, first_number=first)
        for optimizer, state in zip(dense.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        pipeline.training.instruments.record_in(timeline)
        return pipeline, outer

    def _new_pipeline(
        self, module: Module, optimizers: Sequence[Optimizer], collectives: Collectives, **own: Any
    ) -> Pipeline:
        """Returns a pipeline with this strategy's options. Collective. Blocks.

        Rank 0 tells the user if the choice of what is gathered costs memory, if numbers wait long,
        how much is sent between hosts with several ranks, and what the way through a host takes.
        The arguments are `Pipeline`'s, with `own` for those that differ from one pipeline of a
        strategy to the next.
        """
        refusals.say_what_is_gathered(self._gather, self._options)
        refusals.say_what_waits(self._options, optimizers, collectives.world.size)
        own |= {**self._of_engine, "options": self._options, "or_else": self._or_else}
        pipeline = Pipeline(module, optimizers, collectives, self._fusion, **own)
        for part in pipeline.parts:
            part.shows_in_hooks = self._gradients_in_hooks
        if pipeline.remark is not None:
            rank_zero_info(pipeline.remark)
        refusals.say_what_staging_costs(pipeline)
        refusals.say_what_hosts_cost(pipeline)
        return pipeline

    # --- for users: parameters --------------------------------------------------------------------

    @property
    @abstractmethod
    def _pipelines(self) -> Sequence[Pipeline]:
        """One pipeline for each module. A Trainer's strategy keeps the last fit's after the fit."""

    @property
    def _outer_halves(self) -> Sequence[OuterHalf]:
        """The outer half of each pipeline. Without local steps these do nothing."""
        return (self._outer,)

    def finish_local_steps(self) -> None:
        """Ends local steps: ranks exchange what is left, and modules hold the anchor. Collective.

        Blocks. For the end of a training under Fabric. A Trainer does so at the end of a fit.
        Without local steps it does nothing.
        """
        for outer in self._outer_halves:
            outer.finish()

    def weigh(self, n: float) -> None:
        """Says how many samples, or tokens, this rank's loss is a mean over. Local.

        With `weights="samples"` the present batch counts by `n` in the mean gradient. Call it
        before the batch's backward, for each batch. In automatic optimization a call in
        `training_step` replaces the batch size that Lightning finds. A loss that is a sum must not
        be weighed: its gradient is in proportion to `n` already.

        Args:
            n: From 0 to 2^53. 0 means that the batch does not count: its gradients are dropped.
                A tensor is read, so that the host waits for the device. Ignored in
                `validation_step`, whose code training may share.

        Raises:
            RuntimeError: Without `weights="samples"`. A number that is not valid raises a
                ValueError later, on all ranks.
        """
        weight = float(n)
        for pipeline in self._pipelines:
            weights = pipeline.training.weights
            if not weights.is_on:
                raise RuntimeError("weigh() needs weights='samples'. Pass it to the strategy.")
            if not self._is_validating:
                weights.weigh(weight)
                weights.was_given |= weight != 0

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step. Local. Idempotent.

        Reads of a parameter through its module wait by themselves. Call this before reading
        parameters through references that you keep, such as a list of parameters.

        Args:
            reason: Name of the wait in timelines.
        """
        for pipeline in self._pipelines:
            pipeline.complete_parameters(reason)

    def _end_backward(self) -> None:
        for pipeline in self._pipelines:
            pipeline.end_backward()

    def sync_replicas(self) -> None:
        """Makes the parameters of all ranks equal to their owners' values. Collective. Blocks.

        Only needed with a compressor that encodes differences of parameters: replicas lag behind
        the owners' values by what encoding has left out. Otherwise no value changes. Values that
        the user has written to weights since the last step are kept. Call it between an optimizer
        step and the next forward.

        Raises:
            RuntimeError: If an earlier error has left the optimizer's state half stepped, or half
                moved to another plan.
        """
        for pipeline in self._pipelines:
            for part in pipeline.parts:
                part.sync_replicas()

    # --- for users: the plan, what a step cost ----------------------------------------------------

    @property
    def _present(self) -> Pipeline | None:
        """The first pipeline. None means that there is none yet."""
        return next(iter(self._pipelines), None)

    @property
    def plan(self) -> BucketPlan | None:
        """The first optimizer's plan. None until the first step of a fit has begun.

        After a fit it is the plan of that fit. Under Fabric it raises if nothing is being trained.
        """
        return None if self._present is None else self._present.parts[0].plan

    def save_plan(self, path: str | Path) -> None:
        """Writes the first optimizer's plan to a JSON file, for `planning.FixedPlan(path)`.

        Local. All ranks have the same plan, and every rank that calls this writes the file. Call it
        on one rank of each host, since two ranks would write the same file at once.

        Raises:
            RuntimeError: If there is no plan yet. The first step of a fit makes it.
        """
        if self._present is None or self._present.parts[0].plan is None:
            raise RuntimeError("There is no plan yet. Call save_plan after a fit's first step.")
        save_plan(path, self._present.parts[0].plan, self._present.parts[0].tensors)

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """Returns the compressor's figures for the first optimizer, such as "compression_ratio".

        Local. Does not block. `OptimizerPipeline.encoding_figures` describes the figures. Empty
        without a compressor and outside a fit.
        """
        return {} if self._present is None else self._present.parts[0].encoding_figures()

    def exchange_figures(self, **asks: bool) -> dict[str, float]:
        """Returns figures of local steps' last exchange, such as "agreement", of the first model.

        Local. `OuterHalf.figures` describes them, and the arguments `on_all_ranks` and
        `with_drift`. Empty without local steps and outside a fit.
        """
        return next((one.figures(**asks) for one in self._outer_halves), {})

    @property
    def statistics(self) -> StepStatistics | None:
        """Times and bytes of any optimizer's last step. None before the first step.

        With local steps they include those of exchanges that are sent or merged after the step.
        On a GPU waits are timed only after the first read, so that it is None for two more steps.
        """
        return None if self._present is None else self._present.training.instruments.statistics

    @property
    def timeline(self) -> Timeline | None:
        """The `Timeline` that is being recorded. Assign one to record into it, or None to stop."""
        return None if self._present is None else self._present.training.instruments.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if self._present is None:
            raise RuntimeError("Nothing is being trained. Assign timeline once a fit has begun.")
        self._present.training.instruments.record_in(timeline)

    # --- for users: each rank has its shard of the mean gradient ----------------------------------

    @abstractmethod
    def pipeline_of(self, optimizer: Optimizer | None = None) -> Pipeline:
        """Returns the pipeline that trains `optimizer`'s parameters.

        Args:
            optimizer: An optimizer that is being trained. None means the only pipeline. Under a
                Trainer there is one pipeline, whatever `optimizer` is.

        Raises:
            RuntimeError: If there is no pipeline.
            ValueError: Under Fabric, if `optimizer` is not being trained, or is None with several
                pipelines.
        """

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of the whole mean gradient, from the shards of all ranks.

        Collective. Blocks until the gradients are reduced. Call it in `on_before_optimizer_step`,
        in which gradients are not clipped yet, or between the last backward and `step()` if your
        code calls both. With a GradScaler under Fabric the gradient is still multiplied by the loss
        scale, until `fabric.clip_gradients` has unscaled it.

        Args:
            optimizer: Optimizer of the parameters. None means the only optimizer.
            norm_type: p of the p-norm. `inf` means the largest absolute value.
        """
        return self._part(optimizer).mean.norm(norm_type)

    def whole_gradients(self, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context in which `.grad` holds the whole mean gradient of each used parameter.

        Collective. Blocks at its beginning and end. For code between backward and step that reads
        or changes gradients itself. The step uses `.grad` as it is at the end of the block. Costs
        one all-gather of every bucket.

        Args:
            optimizer: Optimizer of the parameters. None means the only optimizer.
        """
        return self._part(optimizer).mean.exposed()

    def on_shards(self, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """A context for code that reads or writes the optimizer's state between steps.

        In the block the optimizer's parameter groups hold this rank's pieces of the parameters, as
        1-D tensors, `state` is the state of the pieces, and `.grad` of a piece is its part of the
        mean gradient. So a method of the optimizer may be called that treats each element on its
        own, such as one that updates a second moment. It may write to weights, gradients and state
        in place. With `gather="gradients"` the groups hold the whole parameters instead, and state
        and mean gradients are whole.

        Collective. Blocks at its beginning, and at its end until all ranks have all weights, which
        costs one all-gather. Code in the block may not call collectives, since ranks have
        different pieces.

        Args:
            optimizer: Optimizer of the parameters. None means the only optimizer.
        """
        return self._part(optimizer).on_shards()

    def _part(self, optimizer: Optimizer | None) -> OptimizerPipeline:
        pipeline = self.pipeline_of(optimizer)
        if optimizer is not None:
            return pipeline.of(connections.unwrapped(optimizer))
        if len(pipeline.parts) > 1:
            raise ValueError("There are several optimizers. Pass one of them as optimizer=...")
        return pipeline.parts[0]
