"""Lists every private name of torch and Lightning that this package reads, replaces or imports.

A new version of torch or Lightning may rename a private name without notice. So each name stands
here once, with the reason for which it is needed. `PrivateName.of` and `replace_in` check a name
when it is used. A test looks up all names in the installed versions, and checks that Lightning
still calls what this package replaces.

Private operators such as `torch._foreach_copy_` are not listed, since a call of a missing operator
raises at once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class PrivateName:
    """Describes one private name.

    Attributes:
        owner: Module that has the name, or "module:Class" if objects of a class have it.
        name: The private name itself.
    """

    owner: str
    name: str

    def of(self, holder: Any) -> Any:
        """Returns the attribute of this name.

        Args:
            holder: Module, class or object that has it.

        Raises:
            RuntimeError: If `holder` has no such attribute.
        """
        if (found := getattr(holder, self.name, _MISSING)) is _MISSING:
            raise RuntimeError(self._complaint())
        return found

    def imported(self) -> Any:
        """Imports the owner, which must be a module, and returns its attribute of this name.

        Raises:
            RuntimeError: If the module has no such attribute.
        """
        return self.of(import_module(self.owner))

    def replace_in(self, holder: Any, value: Any) -> None:
        """Sets this attribute of one object to `value`, until `restore_in`.

        Warns if the object had no such attribute, since then nothing uses it.
        """
        if not hasattr(holder, self.name):
            warnings.warn(self._complaint(), stacklevel=3)
        vars(holder)[self.name] = value

    def restore_in(self, holder: Any) -> None:
        """Undoes `replace_in`: the object has the attribute of its class again."""
        vars(holder).pop(self.name, None)

    def _complaint(self) -> str:
        package = self.owner.partition(".")[0]
        return (
            f"lightning-dear needs '{self.name}' of {self.owner}, and the installed version of"
            f" {package} has no such name. Install a version of {package} that lightning-dear was"
            " tested with: see lightning_dear.versions.TESTED_RANGES."
        )


# --- torch ----------------------------------------------------------------------------------------

_MODULE, _OPTIMIZER = "torch.nn:Module", "torch.optim:Optimizer"
# Replaced while parameters are being gathered, so that a read of a parameter waits for its bucket.
PARAMETERS = PrivateName(_MODULE, "_parameters")
# Written to, so that a hook can wait before a module's forward.
FORWARD_PRE_HOOKS = PrivateName(_MODULE, "_forward_pre_hooks")
# Read, to notice replaced modules, and to broadcast buffers.
MODULES, BUFFERS = PrivateName(_MODULE, "_modules"), PrivateName(_MODULE, "_buffers")
# Read, to find compiled modules, in which reads of parameters cannot be noticed.
COMPILED_CALL = PrivateName(_MODULE, "_compiled_call_impl")
# Read, to refuse hooks that would get another gradient than under DDP.
POST_ACCUMULATE_GRAD_HOOKS = PrivateName("torch:Tensor", "_post_accumulate_grad_hooks")
# Called, to move a hook before or behind the hooks that other code has registered.
HOOKS_OF_HANDLE = PrivateName("torch.utils.hooks:RemovableHandle", "hooks_dict_ref")
# Left out, or replaced, while buckets are stepped one by one, so that hooks run once in a step.
PROFILED_STEP = PrivateName(_OPTIMIZER, "profile_hook_step")
STEP_PRE_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_pre_hooks")
STEP_POST_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_post_hooks")
# Read, to show waits in torch's profiler.
IS_PROFILING = PrivateName("torch.autograd.profiler", "_is_profiler_enabled")
# Entered, to update parameters that are read within contexts such as `torch.func` transforms.
CLEARED_TRANSFORMS = PrivateName(
    "torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack"
)
WITHOUT_MODES = PrivateName("torch.utils._python_dispatch", "_disable_current_modes")
WITHOUT_TORCH_FUNCTION = PrivateName("torch._C", "DisableTorchFunction")
# Called, to report failures to other ranks, and to find the backend of a device.
DEFAULT_STORE = PrivateName("torch.distributed.distributed_c10d", "_get_default_store")
GET_BACKEND = PrivateName("torch.distributed:ProcessGroup", "_get_backend")

# --- Lightning ------------------------------------------------------------------------------------

# Replaced: a broadcast before every batch, which would wait behind all-gathers.
STOP_QUESTION = PrivateName(
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop", "_broadcast_sigterm_tensor"
)
# Replaced: the handler of SIGTERM, so that all ranks stop after the same step.
_CONNECTOR = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
STOP_HANDLER = PrivateName(_CONNECTOR, "_sigterm_notifier_fn")
SIGNAL_CONNECTOR = PrivateName("lightning.pytorch:Trainer", "_signal_connector")
# Replaced: the function that makes the command line for further ranks of a Hydra job.
_FABRIC, _LAUNCHERS = "lightning.fabric.strategies", "lightning.pytorch.strategies.launchers"
SUBPROCESS_COMMAND = PrivateName(f"{_LAUNCHERS}.subprocess_script", "_hydra_subprocess_cmd")
# Read and replaced, to start ranks with launchers of this package.
_DDP, _FABRIC_DDP = "lightning.pytorch.strategies:DDPStrategy", f"{_FABRIC}:DDPStrategy"
LAUNCHER = PrivateName(_DDP, "_launcher")
LAUNCHED_STRATEGY = PrivateName(f"{_LAUNCHERS}:_MultiProcessingLauncher", "_strategy")
START_METHOD = PrivateName(f"{_LAUNCHERS}:_MultiProcessingLauncher", "_start_method")
FABRIC_LAUNCHER = PrivateName(_FABRIC_DDP, "_launcher")
# Replaced, so that checkpoints are written atomically, and that micro-batches of gradient
# accumulation are not exchanged.
CHECKPOINT_IO = PrivateName(_DDP, "_checkpoint_io")
FABRIC_CHECKPOINT_IO = PrivateName(_FABRIC_DDP, "_checkpoint_io")
FABRIC_BACKWARD_SYNC = PrivateName(_FABRIC_DDP, "_backward_sync_control")
# Read, to find out whether a Trainer runs.
MODULE_TRAINER = PrivateName("lightning.pytorch:LightningModule", "_trainer")
# Inherited by classes of this package and read from `self`; a missing one raises at once.
INHERITED = (
    *(PrivateName(strategy, "_timeout") for strategy in (_DDP, _FABRIC_DDP)),
    *(PrivateName(strategy, "_get_process_group_backend") for strategy in (_DDP, _FABRIC_DDP)),
    PrivateName(_DDP, "_lightning_optimizers"),
    PrivateName(_FABRIC_DDP, "_start_method"),
    PrivateName(f"{_LAUNCHERS}:_SubprocessScriptLauncher", "_check_can_spawn_children"),
)
# Overridden by the strategies of this package, to start ranks and to join restarts.
CONFIGURE_LAUNCHER = PrivateName(_DDP, "_configure_launcher")
FABRIC_CONFIGURE_LAUNCHER = PrivateName(_FABRIC_DDP, "_configure_launcher")
FABRIC_SETUP_DISTRIBUTED = PrivateName(_FABRIC_DDP, "_setup_distributed")
# Called, to give all ranks rank 0's weights, to join restarts, and to share cores.
_DISTRIBUTED = "lightning.fabric.utilities.distributed"
SYNC_MODULE_STATES = PrivateName("lightning.pytorch.overrides.distributed", "_sync_module_states")
INIT_DIST_CONNECTION = PrivateName(_DISTRIBUTED, "_init_dist_connection")
SET_NUM_THREADS = PrivateName(_DISTRIBUTED, "_set_num_threads_if_needed")
# Classes that are base classes of this package's classes, or that it recognises by isinstance.
TRAINER_LAUNCHER = PrivateName(_LAUNCHERS, "_MultiProcessingLauncher")
SCRIPT_LAUNCHER = PrivateName(_LAUNCHERS, "_SubprocessScriptLauncher")
FABRIC_PROCESS_LAUNCHER = PrivateName(
    f"{_FABRIC}.launchers.multiprocessing", "_MultiProcessingLauncher"
)
BACKWARD_SYNC_CONTROL = PrivateName(f"{_FABRIC}.strategy", "_BackwardSyncControl")
WRAPPING_IO = PrivateName("lightning.pytorch.plugins.io.wrapper", "_WrappingCheckpointIO")
FABRIC_OPTIMIZER = PrivateName("lightning.fabric.wrappers", "_FabricOptimizer")
MOCK_OPTIMIZER = PrivateName("lightning.pytorch.core.optimizer", "_MockOptimizer")
TUNER_EXIT = PrivateName("lightning.pytorch.utilities.exceptions", "_TunerExitException")

# --- attributes that only some objects have, so that only the test notices a rename ---------------

ORIGINAL_MODULE = PrivateName("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod")
COMPILER_CONTEXT = PrivateName("lightning.pytorch:LightningModule", "_compiler_ctx")
IGNORED_NAMES = PrivateName(_MODULE, "_ddp_params_and_buffers_to_ignore")
AMP_SCALING = PrivateName(_OPTIMIZER, "_step_supports_amp_scaling")
_NCCL = "torch.distributed:ProcessGroupNCCL"
NCCL_TIMEOUT = PrivateName(f"{_NCCL}.Options", "_timeout")
NCCL_GROUP_START = PrivateName(_NCCL, "_group_start")
NCCL_GROUP_END = PrivateName(_NCCL, "_group_end")
