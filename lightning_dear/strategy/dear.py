"""`DearStrategy`: calls the engine's pipeline from the methods that Lightning's Trainer calls.

The methods stand in the order of a fit. `engine/pipeline.py` describes what the pipeline does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import strategies
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides import distributed as overrides
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, device, optim
from typing_extensions import override

from lightning_dear import compression, planning, private_names
from lightning_dear.callbacks import guards
from lightning_dear.callbacks.compression_schedule import CompressionSchedule
from lightning_dear.checkpoint import files, folder
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.strategy import checkpoint_io as io
from lightning_dear.strategy import connections, failure_watch, failures, launchers, local, refusals
from lightning_dear.strategy.base import DEFAULT_TIMEOUT, NO_TIMEOUT, PipelineStrategy, meanwhile
from lightning_dear.strategy.loaders import Loaders


class DearStrategy(PipelineStrategy, strategies.DDPStrategy):
    """Trains data-parallel, with communication hidden behind backward *and* the next forward.

    Gradients are reduce-scattered during backward. The optimizer steps this rank's 1/world_size of
    every bucket. The new parameters are all-gathered during the next forward (DeAR, arXiv
    2302.12445, with parameters gathered instead of gradients). Except for rounding, the weights are
    those of `strategy="ddp"`, unless there is a compressor or parameters have 16 bits.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io: As in `DDPStrategy`.
        precision_plugin: Plug-in of `Trainer(precision=)`: 32, 16 or bf16 (mixed or true), or 64
            bits. 16-bit parameters are stepped as fp32 masters, unlike under DDP.
        compressor: Compressor of gradients: a name ("bf16", "int8", "topk", ...) or an instance
            from `lightning_dear.compression`, see docs/compressors.md. None means no compression. A
            mapping {"vectors": "none", "*": "int8"} chooses by the names of parameters.
        compression_schedule: Changes the compressor by step. None means no change.
        split: Shares of the ranks in each global batch, such as [3, 1]. "auto" finds them from what
            ranks need for a sample. Needs no padding, and implies `weights`. None means no split.
        fusion: Planner of buckets: "threshold", "none" (a bucket per tensor), "single" (one
            bucket); "mgwfbp", "bayesian", "mergecomp", "mergecomp_heuristic" or "auto", which plan
            from measurements; or an instance from `lightning_dear.planning`. With a compressor,
            "mgwfbp" and "auto" cannot be used.
        bucket_cap_mb: Largest bucket in MiB for "threshold". None: the world size decides.
        gather: What is all-gathered: "parameters", or "gradients" for optimizers that need whole
            tensors (Adafactor, Muon, LARS). With "gradients" every rank steps all parameters, each
            bucket when forward reads it, and has the whole optimizer state. None means parameters,
            unless an optimizer needs whole tensors or the compressor only sends gradients.
        hops: With several ranks on each of several hosts, 1 means that shards are sent directly to
            their owners. 2 means first within each host, then between hosts, which sends less
            between hosts. None means 2 on gloo if all hosts have equally many ranks, otherwise 1.
            On NCCL 2 is meant for compressors, and has not been run on GPUs.
        decouple: False, with `gather="gradients"`, means all-reduces during backward and no
            all-gathers, as in WFBP, MG-WFBP and DDP.
        weights: "samples" means that each batch counts by its number of samples, or by what `weigh`
            is given. None means that all ranks count alike, as under DDP.
        local_steps: Steps that ranks train alone before they exchange once, "auto", or a
            `lightning_dear.local_steps.LocalSteps`. None means that each step exchanges.
        reduce_dtype: "fp32": NCCL, too, sums 16-bit gradients in fp32. None: as the backend does.
        broadcast_buffers: Whether rank 0's buffers (BatchNorm) are broadcast, as under DDP.
        gradients_in_hooks: Whether `.grad` holds the mean gradient, as under DDP, in hooks that the
            user overrides: `on_after_backward`, `on_before_optimizer_step`,
            `configure_gradient_clipping`, and `optimizer_step` after its closure; and in pre-hooks
            of the optimizer's step after backward. Costs an all-gather. False means None there.
        audit: Whether to raise if forward reads a parameter that is still being gathered. Slow.
        save_distributed_checkpoint: Whether checkpoints are folders, into which every rank writes
            its own part, so that no rank needs memory for the whole optimizer state. Hosts must
            share the file system. Files and folders can be loaded either way, at any world size.
            `python -m lightning_dear.checkpoint.folder FOLDER FILE` converts a folder to a file.
        check_digests: Whether loaded local files must have the bytes that were written.
        elastic: Whether, after SIGTERM to some hosts, torchrun starts the others again: their ranks
            save and stop after the same step, and end with exit code 143. See docs/clusters.md.
        find_unused_parameters: Has no effect. Unused parameters always work.
        process_group_backend: "gloo" or "nccl". None means the usual one of the device.
        timeout: Longest wait in a collective, after which the rank raises. None means 30 minutes.
        start_method: How ranks are started: "popen" runs the script again, others as in torch.
        **ddp_options: Other options of `DDPStrategy`, all of which are refused by name.

    Raises:
        ValueError: If a name is unknown (the message lists the valid ones) or options conflict.
        TypeError: If a value has a wrong type.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        compressor: compression.Given = "none",
        compression_schedule: CompressionSchedule | None = None,
        split: str | Sequence[int] | None = None,
        fusion: str | planning.FusionPlanner = "threshold",
        bucket_cap_mb: float | None = None,
        gather: Literal["parameters", "gradients"] | None = None,
        hops: int | None = None,
        decouple: bool = True,
        weights: Literal["samples"] | None = None,
        local_steps: int | str | LocalSteps | None = None,
        reduce_dtype: Literal["fp32"] | None = None,
        broadcast_buffers: bool = True,
        gradients_in_hooks: bool = True,
        audit: bool = False,
        save_distributed_checkpoint: bool = False,
        check_digests: bool = True,
        elastic: bool = False,
        find_unused_parameters: bool = False,
        process_group_backend: Literal["gloo", "nccl"] | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_options: Any,
    ) -> None:
        given = refusals.checked_options(DearStrategy.__init__, locals())
        # Until the first run a watch of one rank, which does nothing.
        self._failures = failure_watch.FailureWatch(failures.FailureBoard(), timeout or NO_TIMEOUT)
        self._stop: connections.StopRequest | None = None
        self._is_sync_blocked = self._is_stepping = False
        # Optimizers of the `last_backward` block, or an empty list for all. None outside of it.
        self._last_of: list[optim.Optimizer] | None = None
        self._take_options(given)
        self._saves_folders = save_distributed_checkpoint
        self._loaders = Loaders(self, trains_alone=local_steps is not None)
        self._pipeline: Pipeline | None = None
        self._connected: Sequence[LightningOptimizer] = ()
        host = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        start = {name: given[name] for name in ("process_group_backend", "start_method")}
        super().__init__(*host, timeout=timeout or NO_TIMEOUT, **start)

    # --- before training ------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launchers.configure_launcher(self)

    @override
    def setup_distributed(self) -> None:
        with self._meeting():
            super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        """Does what Lightning does, and begins a run's `FailureBoard`. Collective. Blocks."""
        super().setup_environment()
        self._failures.close()
        attempt = self.broadcast(uuid4().hex)
        board = failures.FailureBoard(attempt, self.global_rank, self.world_size)
        self._failures = failure_watch.FailureWatch(board, self._timeout or NO_TIMEOUT)
        module = self.lightning_module
        if module is not None and private_names.MODULE_TRAINER.of(module) is not None:
            # Added before a checkpoint is loaded, which may have a plan for the `FusionTuner`.
            connections.append_callbacks(module.trainer, self._fusion, *self._own_callbacks)
            if self.world_size > 1:
                stop = module.trainer, board, self._stop, self._is_elastic
                self._stop = connections.StopRequest(*stop)
                self._failures.on_asked = self._stop.tell

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if is_fitting := trainer.state.fn == TrainerFn.FITTING:
            refusals.check_precision(self.precision_plugin)
            if self._saves_folders:
                refusals.check_writer_of_folders(self.checkpoint_io)
        super().setup(trainer)
        if is_fitting:
            self._start_pipeline(trainer)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        refusals.check_module_states(self.model)
        private_names.SYNC_MODULE_STATES.of(overrides)(self.model)

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _start_pipeline(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        refusals.check_optimizers(self.optimizers, self.precision_plugin)
        before = self._pipeline.parts if self._pipeline is not None else ()
        local.check_averaging(self._local.steps, trainer)
        collectives = self._new_collectives()
        pipeline, outer = self._new_halves(self.model, self.optimizers, collectives)
        for part in pipeline.parts:
            part.inherit(before)
        self._failures.follow(collectives)
        self._local.resumed = {}
        # Only now: if a line above raises, the next fit inherits the old pipeline's state.
        self._take(pipeline, outer)
        self._insert_guard(trainer)

    def _take(self, pipeline: Pipeline, outer: OuterHalf) -> None:
        """Trains with these halves from now on. Collective. Blocks."""
        self._pipeline, self._outer, self._connected = pipeline, outer, ()
        self._local.load(outer, self.precision_plugin)
        if not outer.is_on:
            pipeline.before_change = self._failures.agree_on_change
        self._connect()
        if self._stop is not None:
            self._stop.ask_through(pipeline.training, outer.signal)

    def _connect(self) -> None:
        """Connects the trainer's precision plug-in and optimizer wrappers, if they are new. Local.

        Raises if the trainer has other optimizers than at first.
        """
        # Assigning `trainer.optimizers` makes new wrappers, as the learning rate finder does.
        if self._lightning_optimizers is not self._connected:
            pipeline, wrappers = self.pipeline_of(), self._lightning_optimizers
            connections.connect_wrappers(wrappers, pipeline)
            connections.connect_precision(self.precision_plugin, pipeline)
            self._connected = wrappers

    def _insert_guard(self, trainer: pl.Trainer, *, at_end: bool = False) -> None:
        """Gives the trainer a new `CompletionGuard`, see `CompletionGuard.insert`."""
        readers = guards.gradient_readers(guards.owners_of_hooks(trainer))
        if readers := readers if self.shows_gradients else {}:
            refusals.warn_about_readers(readers)
        refusals.warn_about_backward(self.pipeline_of().training, trainer.lightning_module)
        called = self._before_hook, self.report_failure, readers, self._expose_gradients
        end_batch = lambda: local.before_hook(self._outer, trainer, "on_train_batch_end")  # noqa: E731
        guard = guards.CompletionGuard(*called, self._end_backward, end_batch)
        guard.insert(trainer, at_end=at_end)

    def _before_hook(self, hook: str) -> None:
        self.complete_parameters(hook)
        local.before_hook(self._outer, self._trainer, hook)

    @property
    def shows_gradients(self) -> bool:
        """Whether means are gathered for hooks: if the user wants it, and buckets are used."""
        return self.pipeline_of().training.uses_buckets and self._gradients_in_hooks

    def _expose_gradients(self, optimizer: optim.Optimizer | None) -> None:
        every = [] if self._is_sync_blocked else self.pipeline_of().parts
        for part in every if optimizer is None else [self._part(optimizer)]:
            with part.timer.leaving_out():
                part.mean.expose()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = dataloader if self._split is None else self._split.loader(dataloader, self)
        return self._loaders.shared(loader) if self._of_engine["weighs"] else loader

    # --- a step ---------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # The learning rate finder trains with callbacks of its own, and looks for its first.
        if guards.CompletionGuard not in map(type, guards.owners_of_hooks(self._trainer)):
            self._insert_guard(self._trainer, at_end=True)
        local.say_how_local(self._outer, self._local.steps, self._trainer)
        if self._stop is not None:
            self._stop.take_ctrl_c()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._loaders.begin_batch()
        # Not in `training_step`, which runs within the optimizer's step.
        if halves := self._end_of_dense_steps(self.pipeline_of(), self._trainer.global_step):
            self._take(*halves)
            local.say_how_local(self._outer, self._local.steps, self._trainer)
        if batch_idx == 0:
            self.pipeline_of().training.buffers.asks = True

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._connect()
        self._outer.show_replica()
        with self.pipeline_of().forward(synchronize=not self._is_sync_blocked):
            output = super().training_step(*args, **kwargs)
        connections.weigh_batch(self.pipeline_of(), self.lightning_module, args[0], output)
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        # In manual optimization it is not known whether this is the last backward of the step.
        is_automatic = self.lightning_module.automatic_optimization
        is_last = is_automatic or self._last_of is not None or None
        synchronize = not self._is_sync_blocked and is_last
        pipeline = self.pipeline_of()
        factor = pipeline.training.weights.loss_factor()
        args = args if factor == 1.0 else (args[0] * factor, *args[1:])
        with pipeline.backward(synchronize=synchronize, optimizers=self._last_of or None):
            loss = super().backward(*args, **kwargs)
        # True if the module's `optimizer_step` calls the closure itself, before the optimizer.
        is_between = synchronize and is_automatic and not self._is_stepping
        if is_between and self.shows_gradients:
            refusals.warn_about_readers({"optimizer_step": [type(self.lightning_module).__name__]})
            self._expose_gradients(None)
        return loss

    @override
    def optimizer_step(self, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._connect()
        self._outer.show_replica()
        with meanwhile(self, _is_stepping=True):
            output = super().optimizer_step(optimizer, *args, **kwargs)
        self._outer.after_step(connections.unwrapped(optimizer))
        guards.complete_behind_step(self._trainer, self.complete_parameters)
        return output

    @override
    def block_backward_sync(self) -> Any:
        """A context whose backwards accumulate gradients locally and send nothing."""
        return meanwhile(self, _is_sync_blocked=True)

    @override
    def on_validation_start(self) -> None:
        for pipeline in self._pipelines:
            pipeline.training.buffers.prepare(synchronize=False, asks=True)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self.complete_parameters("validation_step")
        with meanwhile(self, _is_validating=True):
            return super().validation_step(*args, **kwargs)

    # --- checkpoints: ordinary files, or folders with `save_distributed_checkpoint` --------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._failures.completing():
            self.complete_parameters("state_dict")
        self._outer.show_anchor()
        return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.complete_parameters("load_state_dict")
        self._outer.settle()
        super().load_model_state_dict(checkpoint, strict)
        self._outer.restart()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._local.resumed = checkpoint.get(files.CHECKPOINT_KEY, {})
        self._local.load(self._outer, self.precision_plugin)

    @override
    def optimizer_state(
        self, optimizer: optim.Optimizer, *, on_all_ranks: bool = False
    ) -> dict[str, Any]:
        """Returns the state in torch's format, for a file or a folder. Collective. Blocks.

        Args:
            optimizer: One of the trainer's optimizers.
            on_all_ranks: Whether every rank gets whole tensors, and not only rank 0, which writes
                files. With `save_distributed_checkpoint` no rank does. Others get stand-ins.
        """
        optimizer = connections.unwrapped(optimizer)
        if self._pipeline is None or optimizer not in self._pipeline.optimizers:
            return super().optimizer_state(optimizer)
        if self._failures.board.has_failed:
            self._pipeline.collectives.check()
            # After a failure some ranks may not come. Then this raises instead of waiting.
            step = f"step {self._trainer.global_step}"
            self._failures.board.agree("collect the whole optimizer state", step)
        if self._saves_folders:
            return self._pipeline.of(optimizer).sharded_state_dict()
        return self._pipeline.of(optimizer).optimizer_state_dict(on_rank_0=not on_all_ranks)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes `checkpoint` with the format number: a file on rank 0, or a folder on all ranks.

        Collective. Blocks. Raises what `save_folder` raises.
        """
        files.stamp(checkpoint)
        if "optimizer_states" in checkpoint:
            precision = self.precision_plugin if self._saves_folders else None
            self._local.save(self._outer, checkpoint, precision)
        if self._saves_folders:
            # Rank 0's name is used, as a name may hold a time of day, which differs by rank.
            io.save_folder(checkpoint, self.broadcast(filepath), storage_options)
        else:
            with folder.making_way(filepath if self.is_global_zero else None):
                super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._trainer.training:
            self._outer.show_replica()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the dict of a file or a folder, whole on every rank. Collective. Blocks.

        Raises a ValueError on all ranks if it is damaged, of an unknown format, or no Trainer's.
        """
        read = partial(super().load_checkpoint, checkpoint_path, *args, **kwargs)
        # Lightning 2.5 does not pass `weights_only`.
        weights = kwargs.get("weights_only", *args[:1])
        own = None if self._local.steps is None else (self.global_rank, self.world_size)
        checks = {"check_digests": self._checks_digests, "is_trainers": True, "reader": own}
        return io.checked(read, checkpoint_path, weights_only=weights, **checks)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint file or folder, on rank 0."""
        if not folder.is_folder(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            folder.remove(filepath)

    # --- failures and the end -------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Reports the failure, unless `CompletionGuard` has. Restores the optimizers' groups."""
        self.report_failure(exception)
        if self._pipeline is not None:
            self._pipeline.abandon()
            self._outer.abandon()

    def report_failure(self, exception: BaseException) -> None:
        """Reports `exception` to other ranks, or logs its cause. Once a run. Blocks a little."""
        if isinstance(self.launcher, launchers.JobLauncher):
            self.launcher.has_heard_signal.set()
        if failures.is_consequence(exception):
            self._failures.on_consequence()
        asked = "" if self._stop is None else self._stop.end_by(exception)
        self._failures.handle(exception, asked)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks. After a failure at most some seconds; then it logs a warning."""
        if self._failures.board.has_failed:
            self._failures.meet(name or "a barrier")
        else:
            super().barrier(name)

    @override
    def teardown(self) -> None:
        try:
            if self._pipeline is not None:
                self._outer.detach()
                self._pipeline.detach()
        finally:
            connections.disconnect_precision(self.precision_plugin)
            if self._stop is not None:
                self._stop.disconnect()
            self._failures.close()
            super().teardown()

    @override
    def __repr__(self) -> str:
        # Lightning quotes this if `pytorch_lightning.Trainer` gets `lightning`'s strategy.
        return f"<{type(self).__module__}.{type(self).__name__} for a Trainer of {pl.__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out process groups and works, since launchers pickle the strategy."""
        return {**self.__dict__, "_pipeline": None, "_stop": None, "_outer": OuterHalf()}

    # --- for users, besides the methods of `PipelineStrategy` -----------------------------------

    @property
    @override
    def _pipelines(self) -> Sequence[Pipeline]:
        return () if self._pipeline is None else (self._pipeline,)

    @override
    def pipeline_of(self, optimizer: optim.Optimizer | None = None) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("Nothing is being trained. Call the strategy's methods in a fit.")
        return self._pipeline

    def last_backward(self, *optimizers: optim.Optimizer) -> AbstractContextManager[None]:
        """A context for the last backward before `step()`. For manual optimization only.

        Its gradients are sent while it runs, and otherwise in `step()`: more might follow. It is
        the last one of `optimizers`, which step next. None given means all.
        """
        return meanwhile(self, _last_of=[connections.unwrapped(one) for one in optimizers])
