"""Trains one model in three ways: our engine, torch's DDP, and a single-process reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.staged import StagedCollectives
from lightning_dear.collectives.world import World
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers import sharded
from lightning_dear.planning import FusionPlanner, ThresholdFusion
from tests.training.delays import DelayedCollectives, Delays
from tests.training.models import batch, build, loss_of, optimizer_for, weights

# The optimizer is called several times a step even for small models.
sharded.MAX_RUN_NUMEL = 1 << 11

SMALL_BUCKETS = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
"""Several buckets even for the small models, with tensors split between them."""

Trace = tuple[list[list[Tensor]], list[Tensor]]
"""Weights after every step, and the loss of every step."""


def new_pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fusion: FusionPlanner = SMALL_BUCKETS,
    delays: Delays | None = None,
    more: Sequence[torch.optim.Optimizer] = (),
    audit: bool = False,
    options: ExchangeOptions | None = None,
    weighs: bool = False,
) -> Pipeline:
    """A pipeline over the default process group's ranks, its collectives delayed if asked."""
    collectives = new_collectives(torch.device("cpu"))
    if delays is not None:
        if isinstance(collectives, StagedCollectives):
            host = DelayedCollectives(collectives._host, delays)
            collectives = StagedCollectives(host, collectives.streams)
        else:
            assert isinstance(collectives, PairwiseCollectives)
            collectives = DelayedCollectives(collectives, delays)
    how = {"audit": audit, "options": options, "weighs": weighs}
    return Pipeline(model, [optimizer, *more], collectives, fusion, **how)  # type: ignore[arg-type]


def new_native(*_: Any, **__: Any) -> NativeCollectives:
    """What is used on NCCL, over gloo's groups. To be patched in for `new_collectives`."""
    groups = [dist.new_group() for _ in range(3)]
    return NativeCollectives(*groups, World(dist.get_rank(), dist.get_world_size()))


def train_steps(
    pipeline: Pipeline,
    model: nn.Module,
    steps: Iterable[int],
    model_name: str = "mlp",
    between: Callable[[int], None] = lambda step: None,
) -> None:
    """With the first optimizer, on this rank's batches of these numbers; `between` is called
    after each backward and before its step.

    Nothing reads the weights. The last step's may still be under way at the end.
    """
    optimizer = pipeline.parts[0].optimizer
    dtype = optimizer.param_groups[0]["params"][0].dtype
    for step in steps:
        with pipeline.forward():
            loss = loss_of(model, *batch(model_name, step, dist.get_rank(), dtype))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        between(step)
        optimizer.step()


def train_dear(
    model_name: str,
    optimizer_name: str,
    num_steps: int,
    fusion: FusionPlanner = SMALL_BUCKETS,
    dtype: torch.dtype = torch.float32,
    delays: Delays | None = None,
    between_steps: Callable[[nn.Module, int], None] = lambda model, step: None,
    options: ExchangeOptions | None = None,
) -> Trace:
    """With our engine. Nothing reads the weights between a step and the next forward."""
    model = build(model_name, dtype=dtype)
    optimizer = optimizer_for(optimizer_name, model)
    pipeline = new_pipeline(model, optimizer, fusion, delays, options=options)
    if delays is not None:
        delays.slow_down(model, optimizer)
    rank = dist.get_rank()
    seen, losses = [], []
    for step in range(num_steps):
        with pipeline.forward():
            loss = loss_of(model, *batch(model_name, step, rank, dtype))
        # Whatever of step - 1 this forward waited for is complete now; what it read is in the loss.
        if step:
            seen.append(weights(model))
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        between_steps(model, step)
    pipeline.detach()
    seen.append(weights(model))
    return seen, losses


def train_ddp(
    model_name: str,
    optimizer_name: str,
    num_steps: int,
    dtype: torch.dtype = torch.float32,
    bucket_cap_mb: float = 25,
) -> Trace:
    """With torch's DistributedDataParallel."""
    model = build(model_name, dtype=dtype)
    optimizer = optimizer_for(optimizer_name, model)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    seen, losses = [], []
    for step in range(num_steps):
        loss = loss_of(wrapped, *batch(model_name, step, dist.get_rank(), dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seen.append(weights(model))
    return seen, losses


@lru_cache(maxsize=4)
def train_reference(
    model_name: str,
    optimizer_name: str,
    num_steps: int,
    world_size: int,
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """In one process: every rank's gradient in turn, each times 1/P, added in rank order.

    Each rank has BatchNorm statistics of its own only within a forward, so one copy will do.
    """
    model = build(model_name, dtype=dtype)
    optimizer = optimizer_for(optimizer_name, model)
    seen, losses = [], []
    for step in range(num_steps):
        total: list[Tensor | None] = [None for _ in model.parameters()]
        for rank in range(world_size):
            loss = loss_of(model, *batch(model_name, step, rank, dtype))
            optimizer.zero_grad()
            loss.backward()
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    scaled, before = parameter.grad * (1.0 / world_size), total[index]
                    total[index] = scaled if before is None else before + scaled
            if rank == 0:
                losses.append(loss.detach())
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        seen.append(weights(model))
    return seen, losses
