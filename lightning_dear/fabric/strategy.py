"""`Fabric(strategy="dear")`: Fabric's lifecycle around pipelines, one for each `fabric.setup`."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.overrides.distributed import _sync_module_states
from torch import Tensor, device
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.compression import Compressor, NoCompression, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.fabric.access import FabricAccess
from lightning_dear.fabric.checkpoints import FabricCheckpoints
from lightning_dear.fabric.checks import (
    check_apart,
    check_fabric_precision,
    check_have_optimizer,
    check_no_schedule,
    check_no_search,
    refuse_lone_optimizer,
)
from lightning_dear.fabric.module import DearModule, finish_at_exit, finishing, part_of
from lightning_dear.planning import FusionPlanner, resolve_fusion
from lightning_dear.registration import START_METHODS
from lightning_dear.strategy.checkpoint_io import AtomicCheckpointIO
from lightning_dear.strategy.dear import DEFAULT_TIMEOUT
from lightning_dear.strategy.module_states import check_module_states
from lightning_dear.strategy.precision import loss_scale
from lightning_dear.strategy.refusals import (
    check_optimizers,
    check_options,
    say_what_is_gathered,
    warn_of_lag,
)

# Since Lightning 2.6 schedulers are set up as well.
_SETS_UP_SCHEDULERS = (
    "scheduler" in inspect.signature(DDPStrategy.setup_module_and_optimizers).parameters
)


_MAX_OPTIMIZERS = 128
"""Numbers of optimizers whose messages are told apart."""


class DearFabricStrategy(FabricAccess, FabricCheckpoints):
    """`lightning_dear.DearStrategy` for Fabric: the same engine and the same weights.

    Every `fabric.setup(model, *optimizers)` makes a pipeline of its own. The model is trained for
    as long as what `fabric.setup` returned for it lives.

    Args:
        accelerator: As in `DDPStrategy`, and so are the other host options.
        parallel_devices: Devices of this node's ranks.
        cluster_environment: Who starts the processes.
        checkpoint_io: Reads and writes checkpoints.
        precision: 32, 16 or bf16 (mixed or true), or 64 bits. 16-bit parameters are stepped as fp32
            masters, which DDP does not do.
        compressor: "none", or what encodes gradients: a name ("bf16", "int8", "topk", ...) or an
            instance from `lightning_dear.compression`; see docs/compressors.md.
        fusion: "threshold", "none", "single", or a planner from `lightning_dear.planning` that
            needs no measurements.
        bucket_cap_mb: Cap of a bucket in MiB, with `fusion="threshold"`; None: the planner's own.
        gather: What travels back: "parameters", or "gradients", for optimizers that need to see
            whole tensors (Adafactor, Muon, LARS): every rank then steps all of them, each bucket
            when forward reads it, and has the whole optimizer state. None: parameters, unless the
            compressor can send gradients only.
        gather_depth: Most all-gathers in flight at once; None: all of a step. With gloo only.
        broadcast_buffers: Whether BatchNorm statistics follow rank 0, as under DDP.
        audit: Whether to look at every read of every forward, and raise where a parameter is read
            while it is still being gathered. Slow; for finding such a read.
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
        precision: Precision | None = None,
        *,
        compressor: str | Compressor | NoCompression = "none",
        fusion: str | FusionPlanner = "threshold",
        bucket_cap_mb: float | None = None,
        gather: Literal["parameters", "gradients"] | None = None,
        gather_depth: int | None = None,
        broadcast_buffers: bool = True,
        audit: bool = False,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_options: Any,
    ) -> None:
        check_options(ddp_options, inspect.signature(DearFabricStrategy).parameters)
        codec = resolve_compressor(compressor)
        self._gather = gather
        chosen = gather or default_gather(codec)
        self._options = ExchangeOptions(chosen, gather_depth, codec=codec)
        self._fusion = resolve_fusion(fusion, bucket_cap_mb)
        check_no_search(self._fusion)
        check_no_schedule(codec)
        self._broadcast_buffers = broadcast_buffers
        self._audit = audit
        self._setups: list[weakref.ref[DearModule]] = []
        self._num_optimizers = 0
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _DearBackwardSyncControl()

    # --- setting up -------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = _FinishingLauncher(self, start_method=self._start_method)
        elif self.num_processes * self.num_nodes == 1:
            self._launcher = None
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Registered after what ends the default process group, and so called before.
        atexit.register(finish_at_exit)

    @override
    def setup_module(self, module: Module) -> DearModule:  # type: ignore[override]
        """For inference: all ranks get rank 0's weights. Collective, blocks."""
        check_module_states(module)
        _sync(module, self.world_size)
        return self._remember(DearModule(module))

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuses: the optimizer must come together with its module."""
        refuse_lone_optimizer(optimizer)

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> Any:
        """Makes a pipeline. A training of the same module ends first. Collective, blocks."""
        check_fabric_precision(self.precision)
        check_optimizers(optimizers, self.precision)  # type: ignore[arg-type]
        check_module_states(module)
        say_what_is_gathered(self._gather, self._options)
        warn_of_lag(self._options)
        collectives = new_collectives(self.root_device, self._timeout)
        others = [one.pipeline for one in self._trained if one.module is not module]
        num_others = sum(len(other.parts) for other in others)
        self._options.check(collectives, len(optimizers) + num_others)
        states = self._end_training_of(module)
        check_apart(module, self._trained)
        pipeline = Pipeline(
            module,
            optimizers,
            collectives,
            self._fusion,
            broadcast_buffers=self._broadcast_buffers,
            audit=self._audit,
            options=self._options,
            # Keeps messages apart whose backwards mix in another order per rank.
            first_number=self._num_optimizers % _MAX_OPTIMIZERS,
        )
        for one in [*others, pipeline] if others else []:
            one.hold_back()
        pipeline.refuse_early("under Fabric nobody says which backward belongs to which step")
        self._num_optimizers += len(optimizers)
        _sync(module, self.world_size)
        wrapped = self._remember(DearModule(module, pipeline))
        for optimizer in optimizers:
            if optimizer in states:
                optimizer.load_state_dict(states[optimizer])
        self._connect_scaler(pipeline)
        return (wrapped, optimizers, scheduler) if _SETS_UP_SCHEDULERS else (wrapped, optimizers)

    def _end_training_of(self, module: Module) -> dict[Optimizer, dict[str, Any]]:
        """Ends it, if there is one; returns its optimizers' whole states."""
        states = {}
        for one in self._trained:
            if one.module is module:
                for part in one.pipeline.parts:
                    states[part.optimizer] = part.optimizer_state_dict()
                one.end()
        return states

    def _remember(self, module: DearModule) -> DearModule:
        self._setups = [ref for ref in self._setups if ref() is not None]
        self._setups.append(weakref.ref(module))
        return module

    def _connect_scaler(self, pipeline: Pipeline) -> None:
        scaler = getattr(self.precision, "scaler", None)
        if scaler is None:
            return
        if "unscale_" not in scaler.__dict__:
            scaler.unscale_ = partial(_unscale, scaler.unscale_)
        for part in pipeline.parts:
            part.plans.loss_scale = partial(loss_scale, scaler, self.root_device)

    # --- training ---------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Sends the gradients of `module`, or else of all modules whose forward has run."""
        trained = self._trained
        with ExitStack() as stack:
            for one in trained:
                takes_part = one is module if isinstance(module, DearModule) else one.has_run
                synchronize = takes_part and not one.is_sync_blocked
                stack.enter_context(one.pipeline.backward(synchronize=synchronize))
            super().backward(tensor, module, *args, **kwargs)
        for one in self._all:
            if one.pipeline is None:
                check_have_optimizer(one.module, trained)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for one in self._trained:
            if one.trains(optimizer):
                one.has_run = False
        return output

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scales the mean gradient to at most `max_norm`; returns its norm before. Blocks.

        Raises:
            RuntimeError: If the norm is not finite, before anything is scaled.
        """
        part = self._part(optimizer)
        self.precision.unscale_gradients(optimizer)
        if error_if_nonfinite:
            norm = part.grad_norm(float(norm_type))
            if not torch.isfinite(norm):
                raise RuntimeError(
                    f"The total norm of order {norm_type} of the gradients is {float(norm)}, so"
                    " they cannot be clipped. To scale them by it all the same, pass"
                    " `error_if_nonfinite=False`."
                )
        return part.clip_by_norm(float(max_norm), float(norm_type))

    @override
    def clip_gradients_value(
        self, module: Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        """Clips every element of the mean gradient to [-clip_val, clip_val]. Blocks."""
        part = self._part(optimizer)
        self.precision.unscale_gradients(optimizer)
        part.clip_by_value(float(clip_val))

    def __getstate__(self) -> dict[str, Any]:
        """For launchers that pickle the strategy: process groups and works stay behind."""
        return {**self.__dict__, "_setups": []}

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


class _DearBackwardSyncControl(_BackwardSyncControl):
    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DearModule):
            raise TypeError(
                f"no_backward_sync needs what fabric.setup returned, not {type(module).__name__}."
            )
        return module.no_sync()


class _FinishingLauncher(_MultiProcessingLauncher):
    """For processes that end without what Python does at exit."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(partial(finishing, function), *args, **kwargs)


def _sync(module: Module, world_size: int) -> None:
    if world_size > 1:
        _sync_module_states(module)


def _unscale(unscale: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    part = part_of(optimizer)
    if part is None:
        unscale(optimizer)
    else:
        part.unscale(unscale)


__all__ = ["DearFabricStrategy"]
