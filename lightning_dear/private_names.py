"""Lists every private name of torch and Lightning that this package reads, replaces or imports.

A new version of torch or Lightning may rename a private name without notice. So each name stands
here once, with the reason for which it is needed. `PrivateName.of` raises, and `replace_in` warns,
if the name is missing when it is used. A test looks up all names in the installed versions, and
checks that Lightning still calls what this package replaces.

Private operators such as `torch._foreach_copy_` are not listed, since a call of a missing operator
raises at once.
"""

import warnings
from importlib import import_module
from typing import Any, NamedTuple

_MISSING = object()


class PrivateName(NamedTuple):
    """Describes one private name.

    Attributes:
        owner: Module that has an attribute of this name, or "module:Class" if the class or its
            objects have it.
        name: The private name itself.
    """

    owner: str
    name: str

    def of(self, holder: Any) -> Any:
        """Returns the attribute of this name of `holder`.

        Args:
            holder: Module, class or object that has the attribute.

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
        """Sets the attribute of this name of one object to `value`, until `restore_in`.

        Other objects of the class keep their attribute. If the object had no such attribute, warns:
        then the name has changed, and the replacement has no effect.

        Args:
            holder: Object whose attribute is set; mutated.
            value: New value of the attribute.
        """
        if not hasattr(holder, self.name):
            warnings.warn(self._complaint(), stacklevel=3)
        vars(holder)[self.name] = value

    def restore_in(self, holder: Any) -> None:
        """Undoes `replace_in`, so that `holder` has the attribute of its class again.

        Does nothing if the attribute of the object was not replaced.
        """
        vars(holder).pop(self.name, None)

    def _complaint(self) -> str:
        """Returns the message about a missing name."""
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
# Read, to find compiled modules. If there is one, all parameters are waited for before forward,
# since reads of parameters in compiled code cannot be noticed.
COMPILED_CALL = PrivateName(_MODULE, "_compiled_call_impl")
# Read, to refuse a second backward of a step if a parameter has such a hook: the hook would get
# another sum of gradients than under DDP.
POST_ACCUMULATE_GRAD_HOOKS = PrivateName("torch:Tensor", "_post_accumulate_grad_hooks")
# Called, to move a hook before or behind the hooks that other code has registered.
HOOKS_OF_HANDLE = PrivateName("torch.utils.hooks:RemovableHandle", "hooks_dict_ref")
# Bypassed, or replaced, while buckets are stepped one by one: one optimizer step then consists of
# several calls of the optimizer's `step`, and its hooks must run only once.
PROFILED_STEP = PrivateName(_OPTIMIZER, "profile_hook_step")
STEP_PRE_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_pre_hooks")
STEP_POST_HOOKS = PrivateName(_OPTIMIZER, "_optimizer_step_post_hooks")
# Read, to show waits in torch's profiler.
IS_PROFILING = PrivateName("torch.autograd.profiler", "_is_profiler_enabled")
# Entered, to update parameters while user code is inside contexts such as `torch.func` transforms,
# which would change the result of the update.
_FUNCTORCH = "torch._functorch.pyfunctorch"
CLEARED_TRANSFORMS = PrivateName(_FUNCTORCH, "temporarily_clear_interpreter_stack")
WITHOUT_MODES = PrivateName("torch.utils._python_dispatch", "_disable_current_modes")
WITHOUT_TORCH_FUNCTION = PrivateName("torch._C", "DisableTorchFunction")
# Read, to find tensors outside of the model that hold a parameter's memory.
STORAGE_ADDRESS = PrivateName("torch:UntypedStorage", "_cdata")
STORAGE_USE_COUNT = PrivateName("torch._C", "_storage_Use_Count")
# Read, to find buffers that were written since the last step.
VERSION = PrivateName("torch:Tensor", "_version")
# Called, to launch several NCCL collectives as one kernel. Versions without it launch several.
COALESCING = PrivateName("torch.distributed", "_coalescing_manager")
# Called, to note when a backward has ended with all that DDP waits for.
QUEUE_CALLBACK = PrivateName("torch.autograd:Variable", "_execution_engine")
# Called after a timeout, for torch's record of the last collectives.
FLIGHT_RECORD = PrivateName("torch._C._distributed_c10d", "_dump_fr_trace")
# Called, to report failures to other ranks, and to find the backend of a device.
DEFAULT_STORE = PrivateName("torch.distributed.distributed_c10d", "_get_default_store")
GET_BACKEND = PrivateName("torch.distributed:ProcessGroup", "_get_backend")

# Cleared in a copy of a loader, whose workers otherwise might be those of the original.
LOADER_ITERATOR = PrivateName("torch.utils.data:DataLoader", "_iterator")

# --- Lightning ------------------------------------------------------------------------------------

# Replaced: with it Lightning asks before every batch, by a broadcast, whether a rank got SIGTERM.
# The broadcast would wait behind the all-gathers that are under way.
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop"
STOP_QUESTION = PrivateName(f"{_EPOCH_LOOP}:_TrainingEpochLoop", "_broadcast_sigterm_tensor")
# Read, to tell which hook of DDP runs.
DDP_HOOK = PrivateName("lightning.pytorch.strategies:DDPStrategy", "_ddp_comm_hook")
# Replaced: handlers of SIGTERM and of SLURM's signal. All ranks stop after the same step.
_CONNECTOR = "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector"
STOP_HANDLER = PrivateName(_CONNECTOR, "_sigterm_notifier_fn")
REQUEUE_HANDLER = PrivateName(_CONNECTOR, "_slurm_sigusr_handler_fn")
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
# Replaced, so that checkpoints are written atomically, and that gradients are sent only after the
# last micro-batch of gradient accumulation.
CHECKPOINT_IO = PrivateName(_DDP, "_checkpoint_io")
FABRIC_BACKWARD_SYNC = PrivateName(_FABRIC_DDP, "_backward_sync_control")
# Read, to find out whether the training loop takes the batches of a loader.
COMBINED_LOADER = PrivateName("lightning.pytorch.loops:_FitLoop", "_combined_loader")
COMBINED_ITERATOR = PrivateName("lightning.pytorch.utilities:CombinedLoader", "_iterator")
# Read; its method replaced, so that the means of an epoch leave out repeated batches.
EPOCH_RESULTS = PrivateName("lightning.pytorch.loops:_TrainingEpochLoop", "_results")
LOGGED_SIZE = PrivateName(f"{_EPOCH_LOOP}:_ResultCollection", "_extract_batch_size")
# Read, to refuse samplers whose order may differ between ranks.
_DISTRIBUTED = "lightning.fabric.utilities.distributed"
WRAPPED_SAMPLER = PrivateName(f"{_DISTRIBUTED}:_DatasetSamplerWrapper", "_sampler")
# Called, to find a batch's number of samples, and whether its tensors have different lengths.
BATCH_SIZES = PrivateName("lightning.pytorch.utilities.data", "_extract_batch_size")
# Read, to find out whether a Trainer runs.
MODULE_TRAINER = PrivateName("lightning.pytorch:LightningModule", "_trainer")
# Attributes and methods that classes of this package inherit and read from `self`. If one is
# missing, that raises an AttributeError at once.
INHERITED = (
    *(PrivateName(strategy, "_timeout") for strategy in (_DDP, _FABRIC_DDP)),
    *(PrivateName(strategy, "_get_process_group_backend") for strategy in (_DDP, _FABRIC_DDP)),
    PrivateName(_FABRIC_DDP, "_checkpoint_io"),
    PrivateName(_DDP, "_lightning_optimizers"),
    PrivateName(_FABRIC_DDP, "_start_method"),
    PrivateName(f"{_LAUNCHERS}:_SubprocessScriptLauncher", "_check_can_spawn_children"),
)
# Overridden by the strategies of this package, to start ranks, and to let a restarted rank join the
# other ranks.
CONFIGURE_LAUNCHER = PrivateName(_DDP, "_configure_launcher")
FABRIC_CONFIGURE_LAUNCHER = PrivateName(_FABRIC_DDP, "_configure_launcher")
FABRIC_SETUP_DISTRIBUTED = PrivateName(_FABRIC_DDP, "_setup_distributed")
# Called, in this order: to give all ranks rank 0's weights, to let restarted ranks join, and to
# divide the cores of a host among its ranks.
SYNC_MODULE_STATES = PrivateName("lightning.pytorch.overrides.distributed", "_sync_module_states")
INIT_DIST_CONNECTION = PrivateName(_DISTRIBUTED, "_init_dist_connection")
SET_NUM_THREADS = PrivateName(_DISTRIBUTED, "_set_num_threads_if_needed")
# Classes that are base classes of this package's classes, or that it recognises by isinstance.
TRAINER_LAUNCHER = PrivateName(_LAUNCHERS, "_MultiProcessingLauncher")
SCRIPT_LAUNCHER = PrivateName(_LAUNCHERS, "_SubprocessScriptLauncher")
FABRIC_PROCESS_LAUNCHER = PrivateName(f"{_FABRIC}.launchers", "_MultiProcessingLauncher")
BACKWARD_SYNC_CONTROL = PrivateName(f"{_FABRIC}.strategy", "_BackwardSyncControl")
FABRIC_OPTIMIZER = PrivateName("lightning.fabric.wrappers", "_FabricOptimizer")
MOCK_OPTIMIZER = PrivateName("lightning.pytorch.core.optimizer", "_MockOptimizer")
TUNER_EXIT = PrivateName("lightning.pytorch.utilities.exceptions", "_TunerExitException")

# --- attributes that only some objects have ------------------------------------------------------

# They are looked up with a default. So if one is renamed, only the test notices that.

ORIGINAL_MODULE = PrivateName("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod")
COMPILER_CONTEXT = PrivateName("lightning.pytorch:LightningModule", "_compiler_ctx")
IGNORED_NAMES = PrivateName(_MODULE, "_ddp_params_and_buffers_to_ignore")
AMP_SCALING = PrivateName(_OPTIMIZER, "_step_supports_amp_scaling")
_NCCL = "torch.distributed:ProcessGroupNCCL"
NCCL_TIMEOUT = PrivateName(f"{_NCCL}.Options", "_timeout")
NCCL_GROUP_START = PrivateName(_NCCL, "_group_start")
NCCL_GROUP_END = PrivateName(_NCCL, "_group_end")
