"""Every private name of torch and Lightning that this package reads, replaces or imports.

A new version of theirs may rename any of these, and nobody would say so. So each of them stands
here once, with what needs it. `PrivateName.of` and `replace_in` check it where it is used. A test
takes each from the installed versions, and sees that Lightning still calls what is replaced.

Not here: operators such as `torch._foreach_copy_`, which raise at once if they are gone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class PrivateName:
    """One private name.

    Attributes:
        owner: Where it is found: a module, or "module:Class" for an attribute of its objects.
        name: As its owner spells it.
    """

    owner: str
    name: str

    def of(self, holder: Any) -> Any:
        """Returns what stands under this name in `holder`: a module, a class or an object.

        Raises:
            RuntimeError: If nothing does.
        """
        if (found := getattr(holder, self.name, _MISSING)) is _MISSING:
            raise RuntimeError(self._complaint())
        return found

    def imported(self) -> Any:
        """Returns what stands under this name in its owner, a module, which is imported.

        Raises:
            RuntimeError: If nothing does.
        """
        return self.of(import_module(self.owner))

    def replace_in(self, holder: Any, value: Any) -> None:
        """Puts `value` under this name into one object, until `restore_in`.

        Warns if the object had nothing there, since then nobody calls what is put there.
        """
        if not hasattr(holder, self.name):
            warnings.warn(self._complaint(), stacklevel=3)
        vars(holder)[self.name] = value

    def restore_in(self, holder: Any) -> None:
        """Undoes `replace_in`, so that what the object's class has under the name counts again."""
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
# Replaced while parameters are being gathered, to wait where they are read.
PARAMETERS = PrivateName(_MODULE, "_parameters")
# Written to, to wait in front of a module's forward.
FORWARD_PRE_HOOKS = PrivateName(_MODULE, "_forward_pre_hooks")
# Read, to see exchanged modules, and to broadcast buffers.
MODULES, BUFFERS = PrivateName(_MODULE, "_modules"), PrivateName(_MODULE, "_buffers")
# Read, to see compiled modules, whose reads of parameters nothing sees.
COMPILED_CALL = PrivateName(_MODULE, "_compiled_call_impl")
# Read, to refuse hooks that would find another gradient than under DDP.
POST_ACCUMULATE_GRAD_HOOKS = PrivateName("torch:Tensor", "_post_accumulate_grad_hooks")
# Called, to stand before or behind hooks that others have registered.
HOOKS_OF_HANDLE = PrivateName("torch.utils.hooks:RemovableHandle", "hooks_dict_ref")
# Left out, or replaced, while parts of a model are stepped one by one.
PROFILED_STEP = PrivateName(_OPTIMIZER, "profile_hook_step")
STEP_PRE_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_pre_hooks")
STEP_POST_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_post_hooks")
# Read, to show waits in torch's profiler.
IS_PROFILING = PrivateName("torch.autograd.profiler", "_is_profiler_enabled")
# Entered, to update parameters that are read within contexts of others.
CLEARED_TRANSFORMS = PrivateName(
    "torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack"
)
WITHOUT_MODES = PrivateName("torch.utils._python_dispatch", "_disable_current_modes")
WITHOUT_TORCH_FUNCTION = PrivateName("torch._C", "DisableTorchFunction")
# Called, to report failures to other ranks, and to find the backend of a device.
DEFAULT_STORE = PrivateName("torch.distributed.distributed_c10d", "_get_default_store")
GET_BACKEND = PrivateName("torch.distributed:ProcessGroup", "_get_backend")

# --- Lightning ------------------------------------------------------------------------------------

# Replaced: a question before every batch, which would wait behind all-gathers.
STOP_QUESTION = PrivateName(
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop", "_broadcast_sigterm_tensor"
)
# Replaced: the handler of SIGTERM, to stop all ranks after the same step.
_CONNECTOR = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
STOP_HANDLER = PrivateName(_CONNECTOR, "_sigterm_notifier_fn")
SIGNAL_CONNECTOR = PrivateName("lightning.pytorch:Trainer", "_signal_connector")
# Replaced: what the children of a Hydra job are started with.
_FABRIC, _LAUNCHERS = "lightning.fabric.strategies", "lightning.pytorch.strategies.launchers"
SUBPROCESS_COMMAND = PrivateName(f"{_LAUNCHERS}.subprocess_script", "_hydra_subprocess_cmd")
# Read and replaced, to start ranks in our way.
_DDP, _FABRIC_DDP = "lightning.pytorch.strategies:DDPStrategy", f"{_FABRIC}:DDPStrategy"
LAUNCHER = PrivateName(_DDP, "_launcher")
LAUNCHED_STRATEGY = PrivateName(f"{_LAUNCHERS}:_MultiProcessingLauncher", "_strategy")
START_METHOD = PrivateName(f"{_LAUNCHERS}:_MultiProcessingLauncher", "_start_method")
FABRIC_LAUNCHER = PrivateName(_FABRIC_DDP, "_launcher")
# Replaced, so that checkpoints are written atomically, and micro-batches are not exchanged.
CHECKPOINT_IO = PrivateName(_DDP, "_checkpoint_io")
FABRIC_CHECKPOINT_IO = PrivateName(_FABRIC_DDP, "_checkpoint_io")
FABRIC_BACKWARD_SYNC = PrivateName(_FABRIC_DDP, "_backward_sync_control")
# Read, to see whether a Trainer runs.
MODULE_TRAINER = PrivateName("lightning.pytorch:LightningModule", "_trainer")
# Inherited, and read as attributes of our own objects, which raises at once where one is gone.
INHERITED = (
    *(PrivateName(one, "_timeout") for one in (_DDP, _FABRIC_DDP)),
    *(PrivateName(one, "_get_process_group_backend") for one in (_DDP, _FABRIC_DDP)),
    PrivateName(_DDP, "_lightning_optimizers"),
    PrivateName(_FABRIC_DDP, "_start_method"),
    PrivateName(f"{_LAUNCHERS}:_SubprocessScriptLauncher", "_check_can_spawn_children"),
)
# Overridden by our strategies, to start ranks and to join restarts.
CONFIGURE_LAUNCHER = PrivateName(_DDP, "_configure_launcher")
FABRIC_CONFIGURE_LAUNCHER = PrivateName(_FABRIC_DDP, "_configure_launcher")
FABRIC_SETUP_DISTRIBUTED = PrivateName(_FABRIC_DDP, "_setup_distributed")
# Called, to give all ranks rank 0's weights, to join restarts, and to share cores.
_DISTRIBUTED = "lightning.fabric.utilities.distributed"
SYNC_MODULE_STATES = PrivateName("lightning.pytorch.overrides.distributed", "_sync_module_states")
INIT_DIST_CONNECTION = PrivateName(_DISTRIBUTED, "_init_dist_connection")
SET_NUM_THREADS = PrivateName(_DISTRIBUTED, "_set_num_threads_if_needed")
# Classes that ours derive from, or that ours tell apart.
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

# --- what only some objects have: a rename is seen by the test alone ------------------------------

ORIGINAL_MODULE = PrivateName("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod")
COMPILER_CONTEXT = PrivateName("lightning.pytorch:LightningModule", "_compiler_ctx")
IGNORED_NAMES = PrivateName(_MODULE, "_ddp_params_and_buffers_to_ignore")
AMP_SCALING = PrivateName(_OPTIMIZER, "_step_supports_amp_scaling")
_NCCL = "torch.distributed:ProcessGroupNCCL"
NCCL_TIMEOUT = PrivateName(f"{_NCCL}.Options", "_timeout")
NCCL_GROUP_START = PrivateName(_NCCL, "_group_start")
NCCL_GROUP_END = PrivateName(_NCCL, "_group_end")
