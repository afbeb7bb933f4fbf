"""What only a CUDA device can show: stream order, no host block, NCCL, and the stream clock."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.shards import shard_of
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.telemetry.clock import StreamClock
from tests.distributed.harness import run_ranks
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS

pytestmark = pytest.mark.gpu

LONG_CYCLES = 200_000_000
"""About a tenth of a second of a GPU's time."""

needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NOT RUN: NCCL between ranks needs two CUDA devices"
)


def _train_on_cuda(is_ours: bool) -> list[torch.Tensor]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        dist.init_process_group("nccl", device_id=device)
    model = build("mlp").to(device)
    optimizer = optimizer_for("adamw", model)
    if is_ours:
        pipeline = Pipeline(model, [optimizer], new_collectives(device), SMALL_BUCKETS)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    for step in range(6):
        inputs, targets = (one.to(device) for one in batch("mlp", step, dist.get_rank()))
        optimizer.zero_grad()
        if is_ours:
            with pipeline.forward():
                loss = loss_of(model, inputs, targets)
            torch.cuda._sleep(LONG_CYCLES // 10)
            loss.backward()
        else:
            loss_of(wrapped, inputs, targets).backward()
        optimizer.step()
    return [weight.cpu() for weight in weights(model)]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=needs_two)])
def test_weights_are_those_of_ddp_on_cuda(world_size: int) -> None:
    ours = run_ranks(_train_on_cuda, world_size, True, timeout_s=120)
    theirs = run_ranks(_train_on_cuda, world_size, False, timeout_s=120)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(a, b)


def _reduce_behind_a_long_kernel() -> tuple[float, float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.destroy_process_group()
    dist.init_process_group("nccl", device_id=device)
    collectives = new_collectives(device)
    assert isinstance(collectives, NativeCollectives)
    buffer = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    torch.cuda._sleep(LONG_CYCLES)
    buffer.fill_(1.0)
    own = shard_of(buffer, collectives.world.rank, collectives.world.size)
    work = collectives.launch_reduce_scatter(buffer, buffer[:0], own, 0)
    work.wait()
    launched_s = time.perf_counter() - start_s
    return float(own.sum() / own.numel()), launched_s


@needs_two
def test_reduce_scatter_waits_for_the_compute_stream_and_the_host_waits_for_neither() -> None:
    for mean, launched_s in run_ranks(_reduce_behind_a_long_kernel, 2, timeout_s=120):
        assert mean == 2.0
        assert launched_s < 0.03


def test_the_stream_clock_times_the_device_and_not_the_host() -> None:
    # The first kernel takes the host longer.
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    clock = StreamClock(torch.device("cuda", 0))
    start_s = time.perf_counter()
    start = clock.mark()
    torch.cuda._sleep(LONG_CYCLES)
    end = clock.mark()
    assert time.perf_counter() - start_s < 0.03
    assert clock.seconds(end) - clock.seconds(start) > 0.03
