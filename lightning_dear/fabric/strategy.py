"""`DearFabricStrategy`: calls the engine's pipelines, one for each `fabric.setup`, from Fabric."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from inspect import signature
from itertools import chain
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies import launchers, strategy
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.overrides import distributed as overrides
from torch import Tensor, device
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear import compression, planning, private_names
from lightning_dear.checkpoint.files import CHECKPOINT_KEY, stamp
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step import OptimizerPipeline
from lightning_dear.fabric import module as modules
from lightning_dear.fabric.module import DearModule
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.strategy import base, connections, refusals
from lightning_dear.strategy.checkpoint_io import checked

_MultiProcessingLauncher: Any = private_names.FABRIC_PROCESS_LAUNCHER.of(launchers)
_BackwardSyncControl: Any = private_names.BACKWARD_SYNC_CONTROL.of(strategy)

# Since Lightning 2.6 `setup_module_and_optimizers` also takes and returns a scheduler.
_SETS_UP_SCHEDULERS = "scheduler" in signature(DDPStrategy.setup_module_and_optimizers).parameters

_MAX_OPTIMIZERS = 128
"""Number of optimizers that can have message tags of their own."""


class DearFabricStrategy(base.PipelineStrategy, DDPStrategy):
    """Trains under Fabric as `lightning_dear.DearStrategy` does under a Trainer.

    Every `fabric.setup(model, *optimizers)` makes a pipeline. The model is trained until the object
    that `fabric.setup` returned for it is deleted, or the model is set up again.

    Args:
        precision: Same as `precision_plugin` of `lightning_dear.DearStrategy`, which also describes
            the options that are not listed here.
        fusion: Same as there, but planners that measure steps are refused.
        gradients_in_hooks: Whether pre-hooks of an optimizer's step find the mean gradient in
            `.grad`. Costs one more all-gather where there are any. False means that they find None.
        **ddp_options: Options that need a Trainer, and other options of `DDPStrategy`. All of them
            are refused by name.

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
        precision: Precision | None = None,
        *,
        compressor: compression.Given = "none",
        fusion: str | planning.FusionPlanner = "threshold",
        bucket_cap_mb: float | None = None,
        gather: Literal["parameters", "gradients"] | None = None,
        hops: int | None = None,
        weights: Literal["samples"] | None = None,
        local_steps: int | str | LocalSteps | None = None,
        reduce_dtype: Literal["fp32"] | None = None,
        broadcast_buffers: bool = True,
        gradients_in_hooks: bool = True,
        audit: bool = False,
        check_digests: bool = True,
        find_unused_parameters: bool = False,
        process_group_backend: Literal["gloo", "nccl"] | None = None,
        timeout: timedelta | None = base.DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_options: Any,
    ) -> None:
        given = refusals.checked_options(DearFabricStrategy.__init__, locals())
        # Checked first, because the messages of `_take_options` give advice for a Trainer.
        modules.check_without_trainer(planning.resolve_fusion(fusion, bucket_cap_mb))
        self._take_options(given)
        self._setups: list[weakref.ref[DearModule]] = []
        self._num_optimizers, self._is_saving = 0, False
        host = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision
        start = {name: given[name] for name in ("process_group_backend", "start_method")}
        super().__init__(*host, timeout=timeout or base.NO_TIMEOUT, **start)
        private_names.FABRIC_BACKWARD_SYNC.replace_in(self, _DearBackwardSyncControl())

    # --- setting up -------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            launcher = _FinishingLauncher(self, start_method=self._start_method)
            private_names.FABRIC_LAUNCHER.replace_in(self, launcher)
        elif self.num_processes * self.num_nodes == 1:
            private_names.FABRIC_LAUNCHER.replace_in(self, None)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Exit handlers run in reverse order. This one is registered after Lightning's handler that
        # destroys the default process group, and so runs before it.
        atexit.register(modules.finish_at_exit)

    @override
    def _setup_distributed(self) -> None:
        with self._meeting():
            super()._setup_distributed()

    @override
    def setup_module(self, module: Module) -> DearModule:  # type: ignore[override]
        """Wraps `module` for inference, with rank 0's weights on all ranks. Collective. Blocks.

        A `backward` raises if a parameter of this module has a gradient then, unless a trained
        module has the parameter, too.
        """
        refusals.check_module_states(module)
        _sync(module, self.world_size)
        return self._remember(DearModule(module))

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raises, because an optimizer must be set up together with its module.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"strategy='dear' must know the model and its {type(optimizer).__name__} together."
            " Call model, optimizer = fabric.setup(model, optimizer) in place of setup_module and"
            " setup_optimizers. The optimizer steps shards of the model's parameters."
        )

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> Any:
        """Makes a pipeline, and ends an earlier training of the same module. Collective. Blocks.

        All ranks get rank 0's weights. The new pipeline takes over the state of optimizers that the
        earlier training had, too. With several trained modules, and a backend that matches messages
        by order (NCCL), no gradient is sent in backward.

        Returns:
            The wrapped module and the optimizers, and in Lightning 2.6 and later also `scheduler`.

        Raises:
            ValueError: If the precision, the optimizers, the module or the number of optimizers
                are not supported, or if the module shares parameters with another trained module.
        """
        refusals.check_precision(self.precision)
        refusals.check_optimizers(optimizers, self.precision)
        refusals.check_module_states(module)
        collectives = self._new_collectives()
        others = [one.pipeline for one in self._trained if one.module is not module]
        here = [part.plans.number for other in others for part in other.parts]
        # Numbers of all ranks, because another rank may still have a model that this rank has
        # deleted.
        taken = set(chain(*collectives.all_gather_object(here)))
        self._options.check(collectives, len(optimizers) + len(taken))
        number = self._next_number(len(optimizers), taken)
        before = self._end_training_of(module)
        modules.check_apart(module, self._trained)
        # Before the anchor of local steps is made of them.
        _sync(module, self.world_size)
        own = {"first_number": number, "shares_groups": bool(taken)}
        pipeline, outer = self._new_halves(module, optimizers, collectives, **own)
        for one in [*others, pipeline] if taken else []:
            one.hold_back()
        wrapped = self._remember(DearModule(module, pipeline, outer))
        for part in pipeline.parts:
            part.inherit(before)
        connections.connect_scaler(self.precision, pipeline, modules.part_of)
        return (wrapped, optimizers, scheduler) if _SETS_UP_SCHEDULERS else (wrapped, optimizers)

    def _next_number(self, count: int, taken: Set[int]) -> int:
        """Returns the first of `count` successive optimizer numbers that are not in use.

        Optimizer numbers are part of message tags, which tell apart the messages of optimizers
        whose backwards run in another order on another rank. The search begins after the numbers
        that were given out last.

        Args:
            count: How many numbers are needed.
            taken: Numbers that are in use on any rank.

        Raises:
            ValueError: If there are not enough numbers left.
        """
        starts = range(_MAX_OPTIMIZERS - count + 1)
        for start in chain(starts[self._num_optimizers :], starts):
            if taken.isdisjoint(range(start, start + count)):
                self._num_optimizers = start + count
                return start
        raise ValueError(
            f"At most {_MAX_OPTIMIZERS} optimizers can be trained at once. Delete what"
            " fabric.setup returned for models that are not trained any more."
        )

    def _end_training_of(self, module: Module) -> list[OptimizerPipeline]:
        """Ends the training of `module`. Returns its parts, which still hold the optimizers' state.

        Empty if `module` is not being trained. Otherwise blocks, see `DearModule.end`.
        """
        ended = [one for one in self._trained if one.module is module]
        parts = [part for one in ended for part in one.pipeline.parts]
        for part in parts:
            part.prepare_state()
        for one in ended:
            one.end()
        return parts

    def _remember(self, module: DearModule) -> DearModule:
        self._setups = [ref for ref in self._setups if ref() is not None]
        self._setups.append(weakref.ref(module))
        return module

    # --- training ---------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Runs backward, and launches messages with the gradients of `module` meanwhile.

        If `module` is no `DearModule`, gradients are sent of all modules that have run a training
        forward since their last step. In a `no_sync` block nothing is sent of that module.
        Collective if gradients are sent. Blocks for other ranks only in the first step of a module,
        which makes the plan.

        Raises:
            RuntimeError: If a module that was set up without an optimizer has a gradient.
        """
        trained, factor = self._trained, 1.0
        with ExitStack() as stack:
            for one in trained:
                one.outer.show_replica()
                takes_part = one is module if isinstance(module, DearModule) else one.has_run
                if takes_part:
                    # With several models it is 1 for each, since none may accumulate.
                    factor = one.pipeline.training.weights.loss_factor()
                synchronize = takes_part and not one.is_sync_blocked
                stack.enter_context(one.pipeline.backward(synchronize=synchronize))
            tensor = tensor if factor == 1.0 else tensor * factor
            super().backward(tensor, module, *args, **kwargs)
        for one in self._all:
            if one.pipeline is None:
                modules.check_have_optimizer(one.module, trained)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        stepped = [one for one in self._trained if one.trains(optimizer)]
        for one in stepped:
            one.outer.show_replica()
        output = super().optimizer_step(optimizer, **kwargs)
        for one in stepped:
            one.has_run = False
            one.outer.after_step(optimizer)
            self._go_over(one, min(part.num_steps for part in one.pipeline.parts))
        return output

    def _go_over(self, module: Any, num_steps: float) -> None:
        """Goes over to local steps once `dense_steps` steps were made; see `PipelineStrategy`."""
        if halves := self._end_of_dense_steps(module.pipeline, num_steps):
            module.take(*halves)
            connections.connect_scaler(self.precision, module.pipeline, modules.part_of)

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scales the mean gradient to a norm of at most `max_norm`; returns its norm before.

        Collective. Blocks. If there is a GradScaler, the gradient is unscaled first.

        Raises:
            RuntimeError: If the norm is not finite and `error_if_nonfinite`. No gradient is scaled
                then.
        """
        mean = self._part(optimizer).mean
        self.precision.unscale_gradients(optimizer)
        if error_if_nonfinite and not torch.isfinite(norm := mean.norm(float(norm_type))):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(norm)}, so"
                " they cannot be clipped. To scale them by it all the same, pass"
                " `error_if_nonfinite=False`."
            )
        return mean.clip_by_norm(float(max_norm), float(norm_type))

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clips each element of the mean gradient to [-clip_val, clip_val]. Collective. Blocks.

        If there is a GradScaler, the gradient is unscaled first.
        """
        mean = self._part(optimizer).mean
        self.precision.unscale_gradients(optimizer)
        mean.clip_by_value(float(clip_val))

    # --- checkpoints: ordinary files, which "ddp" can load, at any world size -------------------

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        self.complete_parameters("state_dict")
        _outer_of(module).show_anchor()
        return super().get_module_state_dict(_plain(module))

    @override
    def load_module_state_dict(
        self, module: Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        self.complete_parameters("load_state_dict")
        _outer_of(module).settle()
        super().load_module_state_dict(_plain(module), dict(state_dict), strict=strict)
        _outer_of(module).restart()

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state in torch's format, on every rank's CPU. Collective. Blocks.

        While `save_checkpoint` runs, only rank 0 gets whole tensors, since only rank 0 writes the
        file. Other ranks get stand-ins without data. The state of an optimizer that was never set
        up with a model is returned as plain Fabric returns it.
        """
        if (part := modules.part_of(connections.unwrapped(optimizer))) is None:
            return super().get_optimizer_state(optimizer)
        return part.optimizer_state_dict(on_rank_0=self._is_saving)

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Writes an ordinary checkpoint file on rank 0. Collective. Blocks.

        If `state` holds a `DearModule` or an optimizer, the format number is written into the file.
        """
        if any(isinstance(one, (DearModule, Optimizer)) for one in state.values()):
            state = dict(state)
            stamp(state)
        for name, one in state.items():
            if isinstance(one, DearModule):
                one.outer.show_anchor()
                self._local.save(one.outer, state, None, name)
        with base.meanwhile(self, _is_saving=True):
            super().save_checkpoint(path, state, *args, **kwargs)

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Reads the file on every rank, and loads its entries into `state`. Collective. Blocks.

        Returns:
            The entries of the file that are not in `state`. All entries if `state` is None or
            empty.

        Raises:
            ValueError: If the file is damaged or has an unknown format number. Nothing is loaded
                then. Also if an optimizer's state belongs to another optimizer class. Other entries
                may have been loaded by then.
        """
        load = self.checkpoint_io.load_checkpoint

        def load_checked(path: str | Path, **given: Any) -> dict[str, Any]:
            read, weights = partial(load, path, **given), given.get("weights_only")
            return checked(read, path, check_digests=self._checks_digests, weights_only=weights)

        with base.meanwhile(self, checkpoint_io=SimpleNamespace(load_checkpoint=load_checked)):
            rest = super().load_checkpoint(path, state, *args, **kwargs)
        if state:
            for name, one in state.items() if isinstance(state, dict) else ():
                if isinstance(one, DearModule) and one.pipeline is not None:
                    self._local.resumed = own = rest.get(CHECKPOINT_KEY, {})
                    if OuterHalf.is_in(own, name):
                        self._go_over(one, inf)
                    self._local.load(one.outer, self.precision, name)
            self._local.resumed = {}
            rest.pop(CHECKPOINT_KEY, None)
        return rest

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out modules that were set up, since their process groups cannot be pickled."""
        return {**self.__dict__, "_setups": []}

    # --- for users, besides the methods of `PipelineStrategy` -----------------------------------

    @override
    def pipeline_of(self, optimizer: Optimizer | None = None) -> Pipeline:
        if not (trained := self._trained):
            raise RuntimeError("Nothing is being trained. Call fabric.setup(model, optimizer).")
        if optimizer is not None:
            own = connections.unwrapped(optimizer)
            if not (trained := [one for one in trained if one.trains(own)]):
                raise ValueError(
                    f"{type(own).__name__} was not set up, or has ended. Call fabric.setup with it."
                )
        if len(trained) > 1:
            raise ValueError("Several models were set up. Pass optimizer=... of one of them.")
        pipeline: Pipeline = trained[0].pipeline
        return pipeline

    @property
    @override
    def _present(self) -> Pipeline:
        return self.pipeline_of()

    @override
    def encoding_figures(self, optimizer: Optimizer | None = None) -> dict[str, Tensor | float]:
        """Returns the compressor's figures for an optimizer. Local. Does not block.

        Args:
            optimizer: The optimizer. None means the only one that is being trained.
        """
        return self._part(optimizer).encoding_figures()

    @property
    @override
    def _pipelines(self) -> Sequence[Pipeline]:
        return [one.pipeline for one in self._trained]

    @property
    @override
    def _outer_halves(self) -> Sequence[OuterHalf]:
        return [one.outer for one in self._trained]

    @property
    def _trained(self) -> list[Any]:
        return [module for module in self._all if module.pipeline is not None]

    @property
    def _all(self) -> list[DearModule]:
        return [module for ref in self._setups if (module := ref()) is not None]


class _DearBackwardSyncControl(_BackwardSyncControl):  # type: ignore[misc]
    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DearModule):
            raise TypeError(
                f"no_backward_sync got a {type(module).__name__}. Pass what fabric.setup returned."
            )
        return module.no_sync()


class _FinishingLauncher(_MultiProcessingLauncher):  # type: ignore[misc]
    """Calls `finish_at_exit` in spawned and forked ranks, which run no exit handlers."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return super().launch(partial(modules.finishing, function), *args, **kwargs)


def _outer_of(module: object) -> OuterHalf:
    return module.outer if isinstance(module, DearModule) else OuterHalf()


def _plain(module: Module) -> Module:
    return module.module if isinstance(module, DearModule) else module


def _sync(module: Module, world_size: int) -> None:
    if world_size > 1:
        private_names.SYNC_MODULE_STATES.of(overrides)(module)
