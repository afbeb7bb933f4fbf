"""Strategies to compare `strategy="dear"` with, for which Lightning has no name.

They combine parts of PyTorch, and need no change of the user's model.
"""

import inspect
import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, futures, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dear.local_steps import LocalSteps, num_modules, schedule
from lightning_dear.optimizers.pieces import parameters_of
from lightning_dear.planning import BucketPlan, MGWFBPFusion, PlanSearch, search
from lightning_dear.planning.predict import StepModel


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
def _as_bf16(group: Any, bucket: dist.GradBucket) -> futures.Future[Tensor]:  # type: ignore[name-defined]
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


def _sharded(optimizer: optim.Optimizer) -> optim.Optimizer:
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


class TorchftStrategy(DDPStrategy):
    """Local steps by torchft (Streaming DiLoCo): each rank is a replica of one process.

    Schedule, fragments, mixing and outer optimizer are those of `DearStrategy(local_steps=)`, each
    fragment in one all-reduce. Takes `DDPStrategy`'s options, which wrap nothing here. All ranks
    must build the same weights, from one seed. Validation and saved weights are each rank's own.

    Args:
        local_steps: Number of steps of a round, or all options. `delay` must be less than a round's
            steps over its fragments, and there may be no `dense_steps`.

    Attributes:
        statistics: Seconds of the last step that torchft took for its exchanges, quorums included.

    Raises:
        ValueError: If torchft is not installed.
    """

    statistics: Any = None

    def __init__(self, local_steps: int | LocalSteps = 32, **options: Any) -> None:
        if find_spec("torchft") is None:
            raise ValueError(
                "strategy=torchft needs torchft, which nothing else here needs. Install it: pip"
                " install torchft==0.2.0"
            )
        super().__init__(**options)
        self._steps = LocalSteps(every=local_steps) if isinstance(local_steps, int) else local_steps
        self._ends: list[Callable[[], Any]] = []

    @property
    @override
    def world_size(self) -> int:
        """1: each rank trains alone. With more Lightning would ask rank 0 before each batch."""
        return 1

    @override
    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Raise ValueError if the module has several optimizers."""
        super().setup(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"strategy=torchft trains with one optimizer, not {len(self.optimizers)}. Return"
                " one from configure_optimizers, or leave strategy=torchft out."
            )
        inner: Any = self.optimizers[0]
        began: list[float] = []
        inner.register_step_post_hook(lambda *_: began.append(perf_counter()))
        self._start(inner)
        inner.register_step_post_hook(lambda *_: self._note(perf_counter() - began.pop()))

    def _note(self, seconds: float) -> None:
        waits = {"exposed_reduce_scatter_s": seconds, "exposed_all_gather_s": 0.0}
        self.statistics = SimpleNamespace(**waits)

    def _start(self, optimizer: optim.Optimizer) -> None:
        """Start torchft's servers, and let it exchange after steps of `optimizer`. Collective."""
        names = "coordination", "local_sgd", "manager", "process_group"
        servers, local_sgd, managers, groups = (import_module(f"torchft.{one}") for one in names)
        long, host, world_size = timedelta(minutes=10), self._own_address(), dist.get_world_size()
        store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        house = None
        if self.is_global_zero:
            times = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 60_000}
            house = servers.LighthouseServer("[::]:0", world_size, quorum_tick_ms=10, **times)
        port = self.broadcast(house.address().rpartition(":")[2] if house else "")
        manager = managers.Manager(
            pg=groups.ProcessGroupGloo(timeout=long),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=world_size,
            use_async_quorum=False,
            **dict.fromkeys(("timeout", "quorum_timeout", "connect_timeout"), long),
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=store.port,
            lighthouse_addr=f"http://{self.broadcast(host)}:{port}",
            replica_id=f"replica{self.global_rank}",
            hostname=host,
            init_sync=False,
        )
        module, held = self.lightning_module, parameters_of(optimizer)
        assert module is not None
        every, number, delay, mix = self._steps.schedule(num_modules(module, held))
        fragments = schedule.cut(module, held, self._steps.fragments or number)
        diloco = local_sgd.DiLoCo(
            manager,
            [nn.ParameterList(named.values()) for named in fragments],
            optimizer,
            # One for all fragments would step all of them in each merge.
            [self._steps.new_outer([*named.values()]) for named in fragments],
            every,
            use_bucketization=True,
            fragment_sync_delay=delay,
            fragment_update_alpha=mix,
        )
        diloco.__enter__()
        # What is under way at the end must arrive before a rank goes.
        self._ends += [partial(_wait_for_all, diloco), self.barrier, manager.shutdown]
        self._ends += [partial(diloco.__exit__, None, None, None)]
        self._servers = store, house  # they live as long as they are held

    def _own_address(self) -> str:
        """Return the address of this host on its way to rank 0. Sends nothing."""
        assert self.cluster_environment is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.cluster_environment.main_address, 1))
            return str(probe.getsockname()[0])

    @override
    def teardown(self) -> None:
        for end in self._ends:
            end()
        self._ends.clear()
        super().teardown()


def _wait_for_all(diloco: Any) -> None:
    # torchft has no public names for them. Its version is fixed, and another one raises KeyError.
    for fragment in vars(diloco)["_fragments"]:
        for work in vars(fragment)["_allreduce_work"]:
            work.wait()


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
    if isinstance(strategy, ModelParallelStrategy):
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
        return search.NoContest(plan, f"mgwfbp, for all-reduces: {search.described(plan)}")


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
