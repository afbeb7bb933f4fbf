"""Several ranks on one GPU, over real NCCL or gloo. NOT RUN so far: there was no GPU.

    torchrun --nproc-per-node 2 -m tests.gpu.two_on_one
    torchrun --nproc-per-node 2 -m tests.gpu.two_on_one gloo

With gloo all that travels is copied to the host, and sent through the loopback device. That prints
how many gigabytes a second pass, and how many buckets were on their way before backward ended.

NCCL refuses two ranks with one device on one host. Here each rank says that it is a host of its
own, so that they talk through sockets on the loopback device and take turns on the GPU: right or
wrong can be seen, but nothing about speed. Four ranks are two hosts of two, and exchange in two
hops. Exits with 1 if anything is wrong.

Each step begins behind a long kernel, so that the host is ahead of the device, as in training. From
the third step on, whatever makes the host wait for the device raises.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.staged import StagedCollectives
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import OkTopk, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import ThresholdFusion
from lightning_dear.telemetry.timeline import Timeline
from tests.distributed.rank import on_hosts
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS

SETTINGS = {
    # Since NCCL 2.30 several ranks may share a device; before, they must seem to be on two hosts.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_MAX_CTAS": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}

NUM_RANKS_OF_HOSTS = 4
"""Which are two hosts of two."""

DEADLINE_S = 140
"""After which all threads' stacks are printed, and the rank ends."""

NUM_STEPS = 6
SLEEP_CYCLES = 50_000_000
"""Some 25 ms of a GPU's time."""

SPEED_ELEMENTS = 1 << 24
LANES = "backward", "reduce_scatter"

Case = dict[str, Any]


def cases() -> dict[str, Case]:
    """What is trained: arguments of `train`."""
    found: dict[str, Case] = {
        "dense": {},
        "dense, convolutions": {"name": "conv", "optimizer": "sgd"},
        "dense, transformer": {"name": "gpt"},
        "gradients gathered": {"options": ExchangeOptions("gradients")},
        "16 bits": {"dtype": torch.bfloat16},
    }
    for name in ("bf16", "int8", "topk", "efsignsgd", "randomk", "powersgd"):
        codec = resolve_compressor(name)
        options = ExchangeOptions(default_gather(codec), compressor=codec)
        found[name] = {"optimizer": "sgd", "options": options}
    codec = OkTopk(mode="static", density=0.05)
    static: Case = {"optimizer": "sgd", "options": ExchangeOptions("gradients", compressor=codec)}
    # A recording marks every wait, which may make the host wait.
    recorded = {**static, "has_timeline": True, "may_wait": True}
    return {**found, "oktopk": static, "oktopk, timeline": recorded}


@contextmanager
def watched(*, is_on: bool) -> Iterator[None]:
    """What makes the host wait for the device raises, as far as torch notices."""
    torch.cuda.set_sync_debug_mode("error" if is_on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(
    collectives: Collectives | None,
    device: torch.device,
    name: str = "mlp",
    optimizer: str = "adamw",
    options: ExchangeOptions | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    has_timeline: bool = False,
    may_wait: bool = False,
) -> list[Tensor]:
    """Weights after some steps; with DDP where there are no collectives of ours."""
    model = build(name, dtype=dtype).to(device)
    steps = optimizer_for(optimizer, model)
    wrapped, pipeline = model, None
    if collectives is None:
        wrapped = DistributedDataParallel(model, device_ids=[device.index])
    else:
        pipeline = Pipeline(model, [steps], collectives, SMALL_BUCKETS, options=options)
    for step in range(NUM_STEPS):
        x, y = (one.to(device) for one in batch(name, step, dist.get_rank(), dtype))
        if pipeline is not None and has_timeline and step == NUM_STEPS // 2:
            pipeline.training.instruments.record_in(Timeline())
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        with watched(is_on=pipeline is not None and step > 1 and not may_wait):
            steps.zero_grad()
            if pipeline is None:
                loss_of(wrapped, x, y).backward()
            else:
                with pipeline.forward():
                    loss = loss_of(model, x, y)
                with pipeline.backward():
                    loss.backward()
            steps.step()
    if pipeline is not None:
        pipeline.detach()
    torch.cuda.synchronize()
    return [one.detach().clone() for one in weights(model)]


def are_equal_everywhere(own: list[Tensor]) -> bool:
    """Whether all ranks have the same bits. Collective."""
    flat = torch.cat([one.float().flatten() for one in own])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(rows[0], row) for row in rows)


def check(title: str, case: Case, collectives: Collectives, device: torch.device) -> str:
    """What is wrong; empty if nothing is. Collective."""
    try:
        own = train(collectives, device, **case)
    except RuntimeError as error:
        ours = [
            f for f in traceback.extract_tb(error.__traceback__) if "lightning_dear" in f.filename
        ]
        where = f" at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""
        return f"{str(error).splitlines()[0]}{where}"
    if not are_equal_everywhere(own):
        return "ranks have different weights"
    if title.startswith("dense") and dist.get_world_size() == 2:
        # Sums of two numbers have one order.
        theirs = train(None, device, **case)
        if not all(map(torch.equal, own, theirs)):
            return "weights are not those of DDP"
    return ""


def free_bytes(on_host: dist.ProcessGroup) -> int:
    """Of the device, while no rank does anything. Collective."""
    torch.cuda.synchronize()
    dist.barrier(on_host)
    free: int = torch.cuda.mem_get_info()[0]
    dist.barrier(on_host)
    return free


def show_memory(device: torch.device, sends: Callable[[], Collectives]) -> Collectives:
    """Makes collectives of ours, and prints what NCCL's groups take of the device. Collective."""
    # Its context is no communicator's.
    one = torch.ones(1, device=device)
    on_host = dist.new_group(backend="gloo")
    free = [free_bytes(on_host)]
    dist.all_reduce(one)
    free.append(free_bytes(on_host))
    collectives = sends()
    free.append(free_bytes(on_host))
    first, ours = ((a - b) >> 20 for a, b in zip(free, free[1:], strict=False))
    if dist.get_rank() == 0:
        print(f"NCCL {torch.cuda.nccl.version()}: {first} MiB for its group", end=" ")
        print(f"and {ours} more for ours, all ranks together")
    return collectives


def show_speed(collectives: Collectives, device: torch.device) -> None:
    """Prints gigabytes a second of both halves, and what is sent in backward. Collective."""
    size, rank = dist.get_world_size(), dist.get_rank()
    buffer = torch.ones(SPEED_ELEMENTS, device=device)
    own = buffer.view(size, -1)[rank]
    spent: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        collectives.launch_reduce_scatter(buffer, buffer[:0], own, 0).wait()
        collectives.launch_all_gather(buffer, 0).wait()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - begin_s)
    sent = 2 * buffer.nbytes * (size - 1) / size
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fusion = ThresholdFusion(bucket_cap_mb=16, first_bucket_cap_mb=16)
    pipeline = Pipeline(model, [optimizer], collectives, fusion)
    timeline = Timeline()
    for step in range(3):
        if step == 2:
            pipeline.training.instruments.record_in(timeline)
        optimizer.zero_grad()
        with pipeline.forward():
            loss = model(torch.ones(4096, 2048, device=device)).square().mean()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.training.instruments.record_in(None)
    pipeline.detach()
    lanes = {lane: [one for one in timeline.spans if one.lane == lane] for lane in LANES}
    end_s = max((one.end_s for one in lanes["backward"]), default=0.0)
    early = [one for one in lanes["reduce_scatter"] if one.start_s < end_s]
    if rank == 0:
        print(f"{sent / min(spent[1:]) / 1e9:.2f} GB/s sent by a rank, both halves of", end=" ")
        print(f"{buffer.nbytes >> 20} MiB; {len(early)} of {len(lanes['reduce_scatter'])}", end=" ")
        print("buckets launched before backward ended", flush=True)


def main(backend: str = "nccl") -> int:
    """Runs all cases; how many are wrong."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.backends.cudnn.deterministic = True
    rank, device = int(os.environ["RANK"]), torch.device("cuda", 0)
    os.environ.update(SETTINGS, NCCL_HOSTID=f"host{rank}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    has_hosts = dist.get_world_size() == NUM_RANKS_OF_HOSTS

    def made() -> Collectives:
        with on_hosts(2) if has_hosts else nullcontext():
            return new_collectives(device, sends_rows=True, hops=2 if has_hosts else None)

    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {backend}")
    collectives = show_memory(device, made) if backend == "nccl" else made()
    assert isinstance(collectives, NativeCollectives if backend == "nccl" else StagedCollectives)
    num_wrong = 0
    for title, case in cases().items():
        begin_s = time.perf_counter()
        # On gloo the host has to know of inf, once a step.
        waits = {"may_wait": True} if backend == "gloo" and "options" in case else {}
        wrong = check(title, {**case, **waits}, collectives, device)
        num_wrong += bool(wrong)
        if rank == 0:
            spent_s = time.perf_counter() - begin_s
            print(f"{title:26} {wrong or 'right'} ({spent_s:.1f} s)", flush=True)
    if backend == "gloo":
        show_speed(collectives, device)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return num_wrong


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
