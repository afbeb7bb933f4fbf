"""Strategies to compare `strategy="dear"` with, for which Lightning has no name.

They combine parts of PyTorch, and need no change of the user's model.
"""

import inspect
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dear.planning import BucketPlan, MGWFBPFusion, PlanSearch
from lightning_dear.planning.predict import StepModel
from lightning_dear.planning.search import NoContest, described


class Bf16DDPStrategy(DDPStrategy):
    """DDP that sends and sums gradients as bfloat16, which is half the bytes.

    Registers PyTorch's hook on the wrapped module directly, because Lightning ignores
    `ddp_comm_hook` on a CPU. Takes `DDPStrategy`'s options.
    """

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, _as_bf16)


# DDP compares these annotations with classes, so this file must not make annotations strings.
def _as_bf16(
    group: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """PyTorch's hook under another name: DDP refuses the original name, except on NCCL and XCCL."""
    return bf16_compress_hook(group, bucket)


class ZeroDDPStrategy(DDPStrategy):
    """DDP with the user's optimizers rebuilt as `ZeroRedundancyOptimizer`.

    Gradients are all-reduced as under DDP. Every rank steps some whole parameters, about
    1/world_size of the model, and broadcasts them. Takes `DDPStrategy`'s options.
    """

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        # A schedule marks the `step` of its first optimizer, and would warn that the new optimizer
        # has no such mark.
        warnings.filterwarnings("ignore", "Seems like .optimizer.step... has been overridden")
        rebuilt = {id(optimizer): _sharded(optimizer) for optimizer in self.optimizers}
        for config in self.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            scheduler.optimizer = rebuilt[id(scheduler.optimizer)]
        self.optimizers = [rebuilt[id(optimizer)] for optimizer in self.optimizers]


def _sharded(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    groups = [dict(group) for group in optimizer.param_groups]
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return ZeroRedundancyOptimizer(groups, optimizer_class=type(optimizer), **options)


class Fsdp2Strategy(ModelParallelStrategy):
    """FSDP2 that keeps gathered parameters between forward and backward, as ZeRO-2 does.

    The model's `configure_model` must call `fully_shard`. This strategy then sets
    `reshard_after_forward=False` on every sharded module. Takes `ModelParallelStrategy`'s options;
    with `tensor_parallel_size=1` all ranks form one data-parallel axis.
    """

    @override
    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Raise ValueError if `configure_model` has sharded no module: ranks would not exchange."""
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            raise ValueError(
                f"{type(self.model).__name__}.configure_model has called fully_shard on no module."
                " Call it there, or use another strategy. Else gradients would not be exchanged."
            )
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
        super().setup(trainer)


def default_ddp_caps(scale: float) -> dict[str, Any]:
    """Return DDP options under which a scaled model has the same buckets as the whole one.

    By default DDP's first bucket has 1 MiB and the others 25 MiB. Before torch 2.13 the size of the
    first bucket cannot be set, so that it is as large as the others.

    Args:
        scale: The model has 1/`scale` of the whole model's bytes.
    """
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return {"bucket_cap_mb_list": [1 / scale, 25 / scale]}
    return {"bucket_cap_mb": 25 / scale}


def forget_mesh(strategy: Strategy) -> None:
    """Close the process groups that FSDP2 opened for one fit. Does nothing for other strategies.

    Otherwise the threads of these groups would add up over many fits. The trained module cannot
    communicate afterwards.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return
    for group in strategy.device_mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class AllReduceMGWFBP(MGWFBPFusion):
    """MG-WFBP's rule with the measured cost of an all-reduce, which sends twice a half's bytes.

    The plan is found under `strategy="dear"`, which measures the times that the rule needs, and
    then used by DDP; see `ddp_options`.
    """

    @override
    def search_for(self, model: StepModel) -> PlanSearch:
        cost = model.link.all_reduce or replace(model.link, alpha_s=2 * model.link.alpha_s)
        plan = self.best_plan(replace(model, link=replace(cost, beta_s=2 * cost.beta_s)))
        return NoContest(plan, f"mgwfbp, for all-reduces: {described(plan)}")


def ddp_options(plan: BucketPlan) -> dict[str, Any]:
    """Return the DDP options that make the buckets of `plan`, for fp32 models.

    Raises:
        ValueError: If DDP in this version of torch has no option `bucket_cap_mb_list`.
    """
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise ValueError(
            "MG-WFBP on DDP needs DistributedDataParallel(bucket_cap_mb_list=), which this torch"
            " lacks. Update to torch 2.13 or later, or leave the entry out."
        )
    # Elements of 4 bytes, as MiB: numel * 4 / 2**20.
    return {"bucket_cap_mb_list": [plan.buckets[one].numel / 2**18 for one in plan.reduce_order]}
