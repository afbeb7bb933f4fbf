"""What the strategies of a Trainer and of Fabric share: options, pipelines, what users ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import distributed
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dear import private_names
from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.store import attempt_store
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import BucketPlan, resolve_fusion, save_plan
from lightning_dear.registration import register
from lightning_dear.strategy import refusals
from lightning_dear.strategy.connections import unwrapped
from lightning_dear.telemetry.statistics import StepStatistics
from lightning_dear.telemetry.timeline import Timeline

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Of a collective. Lightning's own is 30 minutes, which all ranks wait for one that hangs."""

NO_TIMEOUT = timedelta(minutes=30)
"""torch's own, which `timeout=None` stands for."""


class PipelineStrategy(ABC):
    """Trains modules through pipelines of the engine. Stands in front of Lightning's own base.

    Attributes:
        compression_schedule: The given one.
    """

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers "dear", "dear_spawn", "dear_fork" and "dear_notebook"."""
        register(strategy_registry, cls)

    def _take_options(self, given: Mapping[str, Any]) -> None:
        """Checks and keeps what says how gradients travel; see `DearStrategy` for the meaning.

        Args:
            given: The strategy's options by name, as `checked_options` returns them.

        Raises:
            ValueError: For unknown names, and options that exclude each other.
            TypeError: For objects of another kind.
        """
        codec = resolve_compressor(given["compressor"])
        schedule: CompressionSchedule | None = given.get("compression_schedule")
        if schedule is not None:
            schedule.check(codec)
        groups = () if schedule is None else schedule.groups
        self._gather: str | None = given["gather"]
        self._broadcast_buffers, self._audit = given["broadcast_buffers"], given["audit"]
        self._gradients_in_hooks = given.get("gradients_in_hooks", True)
        self._checks_digests = given["check_digests"]
        self._hops: int | None = given["hops"]
        if self._hops not in (None, 1, 2):
            raise ValueError(f"hops must be 1, 2 or None, got {self._hops!r}.")
        how = given.get("decouple", True), codec, groups
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

    def _begin_attempt(self) -> None:
        """Under torchrun, makes the default process group on keys that no restart has used.

        To be called before Lightning would make it, which then finds it. Collective, blocks.
        """
        host: Any = self
        environment, device = host.cluster_environment, host.root_device
        if not isinstance(environment, TorchElasticEnvironment):
            return
        if (store := attempt_store(host._timeout or NO_TIMEOUT)) is not None:
            options = {"timeout": host._timeout, "store": store}
            options["device_id"] = device if device.type != "cpu" else None
            join = private_names.INIT_DIST_CONNECTION.of(distributed)
            join(environment, host._get_process_group_backend(), **options)

    def _new_collectives(self) -> Collectives:
        """What moves bytes, as the options want it. Collective, blocks."""
        host: Any = self
        # In two hops rows travel to a few others alone.
        has_two = self._hops == 2 and self._options.encodes_row_by_row
        sends_rows = self._options.compressor is not None and not has_two
        node = host.node_rank, host.local_rank
        return new_collectives(
            host.root_device, host._timeout, sends_rows=sends_rows, hops=self._hops, node=node
        )

    def _new_pipeline(
        self,
        module: Module,
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        first_number: int = 0,
        shares_groups: bool = False,
    ) -> Pipeline:
        """A pipeline with these options, see its class; people are told what they may not expect.

        Collective, blocks.
        """
        refusals.say_what_is_gathered(self._gather, self._options)
        pipeline = Pipeline(
            module,
            optimizers,
            collectives,
            self._fusion,
            broadcast_buffers=self._broadcast_buffers,
            audit=self._audit,
            first_number=first_number,
            shares_groups=shares_groups,
            options=self._options,
            or_else=self._or_else,
        )
        for part in pipeline.parts:
            part.warns_of_hooks = self._gradients_in_hooks and collectives.world.rank == 0
        if pipeline.remark is not None:
            rank_zero_info(pipeline.remark)
        refusals.say_what_hosts_cost(pipeline)
        return pipeline

    # --- for users: parameters --------------------------------------------------------------------

    @property
    @abstractmethod
    def _pipelines(self) -> Sequence[Pipeline]:
        """What trains at present, a pipeline for each module."""

    def complete_parameters(self, reason: str = "read") -> None:
        """Blocks until all parameters have the values of the last step; local and idempotent.

        Only needed before reading parameters through references that were taken before, such as a
        list kept since construction; reads through modules wait by themselves.
        """
        for pipeline in self._pipelines:
            pipeline.complete_parameters(reason)

    def sync_replicas(self) -> None:
        """Gives all ranks the parameters that their owners step. All ranks call; blocks.

        Where a compressor encodes differences of parameters, these are a little behind; elsewhere
        nothing changes. What was written to weights since the last step counts. Between an
        optimizer step and the next forward.

        Raises:
            RuntimeError: See `OptimizerPipeline.prepare_state`.
        """
        for pipeline in self._pipelines:
            for part in pipeline.parts:
                part.sync_replicas()

    # --- for users: the plan, what a step cost ----------------------------------------------------

    @property
    def _present(self) -> Pipeline | None:
        """The only pipeline; None where nothing is being trained."""
        return next(iter(self._pipelines), None)

    @property
    def plan(self) -> BucketPlan | None:
        """Returns the first optimizer's buckets; None before its first step of a fit."""
        return None if self._present is None else self._present.parts[0].plan

    def save_plan(self, path: str | Path) -> None:
        """Writes the first optimizer's plan to a JSON file, for `planning.FixedPlan(path)`.

        All ranks have the same plan; call on one of each host, as every caller writes the file.

        Raises:
            RuntimeError: If there is no plan yet.
        """
        if self._present is None or self._present.parts[0].plan is None:
            raise RuntimeError("There is a plan from the first step of a fit on.")
        save_plan(path, self._present.parts[0].plan, self._present.parts[0].tensors)

    def encoding_figures(self) -> dict[str, Tensor | float]:
        """Returns what the compressor saves and leaves over, for the first optimizer.

        Local, no wait. See `OptimizerPipeline.encoding_figures`.
        """
        return {} if self._present is None else self._present.parts[0].encoding_figures()

    @property
    def statistics(self) -> StepStatistics | None:
        """Returns what the last step cost; None outside a fit. See `Pipeline.statistics`."""
        return None if self._present is None else self._present.statistics

    @property
    def timeline(self) -> Timeline | None:
        """Returns where spans are recorded. Assign a `Timeline` to record, None to stop."""
        return None if self._present is None else self._present.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if self._present is None:
            raise RuntimeError("A timeline can be recorded only during fit.")
        self._present.timeline = timeline

    # --- for users: each rank has its shard of the mean gradient ----------------------------------

    @abstractmethod
    def pipeline_of(self, optimizer: Optimizer | None = None) -> Pipeline:
        """Returns what trains `optimizer`'s parameters; it has `statistics` and `timeline`.

        Args:
            optimizer: One that is being trained; not needed where one module is.

        Raises:
            RuntimeError: If nothing is being trained.
            ValueError: If it is not clear which pipeline is meant.
        """

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of the mean gradient as it came, from the shards of all ranks.

        For `on_before_optimizer_step`, or between a backward and `step()` where you call both. With
        a GradScaler under Fabric it is that of the scaled gradient until `fabric.clip_gradients`.
        All ranks call; blocks until the gradients are reduced.

        Args:
            optimizer: Of which parameters; not needed where there is one.
            norm_type: p of the p-norm; `inf` for the largest absolute value.
        """
        return self._part(optimizer).mean.norm(norm_type)

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer | None = None) -> Generator[None, None, None]:
        """Lets `.grad` hold the mean gradient in the `with` block; what is done to it counts.

        For code between backward and step that reads or changes gradients itself. Costs one
        all-gather. All ranks call; blocks.

        Args:
            optimizer: Of which parameters; not needed where there is one.
        """
        mean = self._part(optimizer).mean
        mean.expose()
        yield
        mean.reduce()

    def _part(self, optimizer: Optimizer | None) -> OptimizerPipeline:
        pipeline = self.pipeline_of(optimizer)
        if optimizer is not None:
            return pipeline.of(unwrapped(optimizer))
        if len(pipeline.parts) > 1:
            raise ValueError("There are several optimizers; say of which one.")
        return pipeline.parts[0]
