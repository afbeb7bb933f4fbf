"""`DearStrategy`: Lightning's lifecycle around the pipeline, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, device
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.callbacks.compression_schedule import CompressionSchedule, schedule_of
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import Compressor, NoCompression, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import FusionPlanner, resolve_fusion
from lightning_dear.registration import START_METHODS
from lightning_dear.strategy.checkpoint_io import AtomicCheckpointIO
from lightning_dear.strategy.checkpoints import CheckpointAccess
from lightning_dear.strategy.failures.handling import FailureHandling
from lightning_dear.strategy.gradient_access import GradientAccess
from lightning_dear.strategy.launchers import configure_launcher
from lightning_dear.strategy.module_states import check_module_states
from lightning_dear.strategy.own_callbacks import OwnCallbacks
from lightning_dear.strategy.pipeline_access import PipelineAccess
from lightning_dear.strategy.precision import connect_precision, disconnect_precision, unwrapped
from lightning_dear.strategy.refusals import (
    check_optimizers,
    check_options,
    check_planner,
    check_precision,
    say_what_is_gathered,
    warn_of_lag,
)
from lightning_dear.strategy.sigterm import answer_sigterm, ask_sigterm_again

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Of a collective. Lightning's own is 30 minutes, which all ranks wait for one that hangs."""


class DearStrategy(FailureHandling, PipelineAccess, GradientAccess, CheckpointAccess, OwnCallbacks):
    """Data parallel training whose communication overlaps backward *and* the next forward.

    Gradients are reduce-scattered during backward, the optimizer steps this rank's 1/world_size of
    every bucket, and the new parameters are all-gathered during the next forward (DeAR, arXiv
    2302.12445, with parameters gathered instead of gradients). The weights are those of
    `strategy="ddp"`.

    Args:
        accelerator: As in `DDPStrategy`, and so are the other host options.
        parallel_devices: Devices of this node's ranks.
        cluster_environment: Who starts the processes.
        checkpoint_io: Reads and writes checkpoints.
        precision_plugin: Of `Trainer(precision=)`: 32, 16 or bf16 (mixed or true), or 64 bits.
            16-bit parameters are stepped as fp32 masters, which DDP does not do.
        compressor: "none", or what encodes gradients: a name ("bf16", "int8", "topk", ...) or an
            instance from `lightning_dear.compression`; see docs/compressors.md.
        compression_schedule: Dense steps first, densities by step, and other compressors for some
            parameters.
        fusion: "threshold", "none", "single", or one that plans from measurements: "mgwfbp",
            "bayesian", "mergecomp", "mergecomp_heuristic", "auto"; or a planner from
            `lightning_dear.planning`. With a compressor, of these, "bayesian" and the mergecomps.
        bucket_cap_mb: Cap of a bucket in MiB, with `fusion="threshold"`; None: the planner's own.
        gather: What travels back: "parameters", or "gradients", for optimizers that need to see
            whole tensors (Adafactor, Muon, LARS): every rank then steps all of them, each bucket
            when forward reads it, and has the whole optimizer state. None: parameters, unless the
            compressor can send gradients only.
        gather_depth: Most all-gathers in flight at once; None: all of a step. With gloo only.
        decouple: With `gather="gradients"`, False: all-reduces during backward and gathers nothing,
            as WFBP, MG-WFBP and DDP do.
        broadcast_buffers: Whether BatchNorm statistics follow rank 0, as under DDP.
        gradients_in_hooks: Whether hooks between backward and step that the user overrides
            (`on_after_backward`, `on_before_optimizer_step`, `configure_gradient_clipping`) find
            the mean gradient in `.grad`, as under DDP. Costs one more all-gather in steps with
            such a hook; without, `.grad` is None there.
        audit: Whether to look at every read of every forward, and raise where a parameter is read
            while it is still being gathered. Slow; for finding such a read.
        save_distributed_checkpoint: Whether checkpoints are folders into which every rank writes
            its own part, so that none needs memory for the whole optimizer state. All hosts must
            share the file system. Files and folders are read either way, at any world size;
            `python -m lightning_dear.checkpoint.folder FOLDER FILE` makes a file of a folder.
        find_unused_parameters: Accepted and unnecessary: unused parameters always work.
        process_group_backend: "gloo" or "nccl"; None: by device.
        timeout: Of a collective; a rank that waits longer raises.
        start_method: "popen", "spawn", "fork" or "forkserver".
        **ddp_options: None of `DDPStrategy`'s other options applies; each is refused by name.

    Raises:
        ValueError: For unknown names (the message lists the valid ones) and impossible options.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        compressor: str | Compressor | NoCompression = "none",
        compression_schedule: CompressionSchedule | None = None,
        fusion: str | FusionPlanner = "threshold",
        bucket_cap_mb: float | None = None,
        gather: Literal["parameters", "gradients"] | None = None,
        gather_depth: int | None = None,
        decouple: bool = True,
        broadcast_buffers: bool = True,
        gradients_in_hooks: bool = True,
        audit: bool = False,
        save_distributed_checkpoint: bool = False,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_options: Any,
    ) -> None:
        check_options(ddp_options, signature(DearStrategy).parameters)
        codec = resolve_compressor(compressor)
        self._gather = gather
        self._schedule = schedule_of(codec, compression_schedule)
        groups = () if self._schedule is None else self._schedule.groups
        chosen = gather or default_gather(codec, groups)
        self._options = ExchangeOptions(chosen, gather_depth, decouple, codec, groups)
        self._fusion = resolve_fusion(fusion, bucket_cap_mb)
        check_planner(self._fusion, self._options)
        if self._schedule is not None:
            self._schedule.check_planner(self._fusion, codec)
            self._schedule.check_exchange(self._options)
        self._broadcast_buffers = broadcast_buffers
        self._gradients_in_hooks = gradients_in_hooks
        self._audit = audit
        self._saves_folders = save_distributed_checkpoint
        self._pipeline: Pipeline | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    # --- Lightning's lifecycle ----------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        configure_launcher(self)
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            # Before checkpoints are loaded: one may bring the plan that was found.
            self._append_callbacks(module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            check_precision(self.precision_plugin)
            self._check_checkpoint_io()
        super().setup(trainer)
        if is_fitting:
            self._start_pipeline(trainer)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        check_module_states(self.model)
        _sync_module_states(self.model)

    def _start_pipeline(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        assert self.lightning_module is not None
        check_optimizers(self.optimizers, self.precision_plugin)
        say_what_is_gathered(self._gather, self._options)
        warn_of_lag(self._options)
        before = self._pipeline.parts if self._pipeline is not None else ()
        parts = [part for part in before if part.optimizer in self.optimizers]
        states = [part.optimizer_state_dict() for part in parts]
        self._pipeline = Pipeline(
            self.model,
            self.optimizers,
            new_collectives(self.root_device, self._timeout),
            self._fusion,
            broadcast_buffers=self._broadcast_buffers,
            audit=self._audit,
            options=self._options,
        )
        for part, state in zip(parts, states, strict=True):
            part.optimizer.load_state_dict(state)
        for wrapper in self._lightning_optimizers:
            # Its class has torch's own, which would pass the pipeline by.
            wrapper.zero_grad = wrapper.optimizer.zero_grad  # type: ignore[attr-defined]
        connect_precision(self.precision_plugin, self._pipeline)
        if self._pipeline.collectives.reads_flags_freely:
            answer_sigterm(trainer, self._pipeline.collectives.signal)
        self._insert_guards(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._pipeline is None:
            return super().training_step(*args, **kwargs)
        with self._pipeline.forward():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self._pipeline is not None
        assert self.lightning_module is not None
        # Under manual optimisation any number of backwards may come before a step.
        is_last = self.lightning_module.automatic_optimization or self._is_last_backward
        synchronize = is_last and not self._is_sync_blocked
        with self._pipeline.backward(synchronize=synchronize, optimizers=self._last_of):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._pipeline is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._pipeline.stepping_early():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    _is_sync_blocked = False

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradients accumulate locally in backwards run within; nothing is sent."""
        before, self._is_sync_blocked = self._is_sync_blocked, True
        try:
            yield
        finally:
            self._is_sync_blocked = before

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self.complete_parameters("validation_step")
        return super().validation_step(*args, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._explaining():
            self.complete_parameters("state_dict")
        return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.complete_parameters("load_state_dict")
        super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state in torch's format: whole on every rank, or for a folder. Collective, blocks."""
        optimizer = unwrapped(optimizer)
        if self._pipeline is None or optimizer not in self.optimizers:
            return super().optimizer_state(optimizer)
        self._agree_after_failure("collect the whole optimizer state")
        if self._saves_folders:
            return self._pipeline.sharded_state_dict(optimizer)
        return self._pipeline.of(optimizer).optimizer_state_dict()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._pipeline is not None:
            self._pipeline.abandon()

    @override
    def teardown(self) -> None:
        try:
            if self._pipeline is not None:
                self._pipeline.detach()
        finally:
            disconnect_precision(self.precision_plugin)
            if self._schedule is not None:
                # Another strategy's fit is to notice that nobody drives it.
                self._schedule.connect(None)
            if self.lightning_module is not None and self.lightning_module._trainer is not None:
                ask_sigterm_again(self.lightning_module.trainer)
            super().teardown()

    @override
    def __repr__(self) -> str:
        # Lightning quotes it when the strategy is given to the other package's Trainer.
        return f"<{type(self).__module__}.{type(self).__name__} for a Trainer of {pl.__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle the strategy: process groups and works stay behind."""
        return {**self.__dict__, "_pipeline": None}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers "dear", "dear_spawn", "dear_fork" and "dear_notebook"."""
        for name, start_method in START_METHODS.items():
            strategy_registry.register(
                name,
                cls,
                description=f"DeAR data parallel with `start_method` '{start_method}'",
                override=True,
                start_method=start_method,
            )


__all__ = ["DearStrategy"]
