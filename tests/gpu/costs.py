"""What the engine costs on a GPU, counted where there is none: `python -m tests.gpu.costs`.

Parameters are on torch's meta device, which computes nothing and is not the CPU: so the branches of
all accelerators run. Eight ranks are pretended, and nothing is sent. What is counted are operations
that launch a kernel; an operation over a list of tensors is one kernel for as many as CUDA takes at
once. Nothing here says how long a kernel takes.

Prints the tables of docs/gpus.md.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.streams import CudaStreams, Streams
from lightning_dear.collectives.work import Work
from lightning_dear.collectives.world import World
from lightning_dear.compression import CODECS, Compressor, OkTopk, error_feedback
from lightning_dear.compression import resolve_compressor as resolve
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import ThresholdFusion
from lightning_dear.torch_modes import Onlooker

WORLD_SIZE = 8
META = torch.device("meta")

NUM_TENSORS, NUMEL = 64, 16_380
"""Tensors of a bucket, as many as CUDA copies at once, and elements of each. With padding between
them a bucket has a Mi elements, so that at eight ranks codecs find no short blocks."""

BUCKET_MB = 4.0

_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::set_")
_MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""How many tensors a kernel over lists takes, by the number of lists."""

_MOST_CHUNKS, _CHUNK_NUMEL = 320, 1 << 16


class NoStreams(Streams):
    """Of a device that holds no numbers."""

    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        nothing = [0] * numbers.numel()
        return (lambda: nothing) if numbers.device == META else super().read_later(numbers)


class Pretended(NativeCollectives):
    """Eight ranks on NCCL, of which this is the first and the others do nothing."""

    def __init__(self, device: torch.device = META) -> None:
        streams = CudaStreams(device) if device.type == "cuda" else NoStreams(device)
        super().__init__(None, None, None, World(0, WORLD_SIZE), streams=streams)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * WORLD_SIZE

    def start(self, call: str, group: Any, *arguments: Any, tag: int = 0) -> Any:
        return []

    def new_work(self, lane: str, name: str, waits: Any, finish: Any = None) -> Work:
        return Work(lambda: None, finish)

    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, bucket: int) -> Work:
        if rows.device != META:
            # What is decoded must have been encoded.
            incoming.copy_(rows)
        return super().launch_all_to_all(rows, incoming, bucket)

    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        if buffer.device != META and buffer.dtype == torch.uint8:
            rows = buffer.view(WORLD_SIZE, -1)
            rows[1:] = rows[0]
        return super().launch_all_gather(buffer, bucket)


def _kernels_of(name: str, arguments: tuple[Any, ...]) -> int:
    if name == "aten::index_fill_" and not arguments[2].numel():
        return 0
    lists = [one for one in arguments if isinstance(one, (list, tuple)) and len(one)]
    tensors = [one for one in lists if isinstance(one[0], Tensor)]
    if not name.startswith("aten::_foreach") or not tensors:
        return 1
    num_chunks = sum(math.ceil(one.numel() / _CHUNK_NUMEL) for one in tensors[0])
    at_once = _MOST_TENSORS[min(len(tensors), 5)]
    # Norms of parts are added up by one more.
    is_norm = name == "aten::_foreach_norm"
    return max(math.ceil(len(tensors[0]) / at_once), math.ceil(num_chunks / _MOST_CHUNKS)) + is_norm


_TOLD_APART = {"adopt_writes": "writes", "sum_in_source_order": "additions"}
"""Functions of the engine whose kernels have columns of their own."""


def _whose() -> str:
    """Who has called the operation that is looked at: the engine, the optimizer, or the model."""
    frame, found = sys._getframe(2), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}lightning_dear{os.sep}" in name:
            found = _TOLD_APART.get(frame.f_code.co_name, found or "engine")
        elif f"torch{os.sep}optim{os.sep}" in name and not found:
            return "optimizer"
        frame = frame.f_back
    return found or "model"


class Kernels(Onlooker, TorchDispatchMode):
    """Counts kernels, by who launches them.

    Attributes:
        counts: (who, phase) -> kernels.
        phase: What is counted at present; to be assigned to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.phase = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if kwargs.get("generator") is not None:
            # There is none on this device.
            kwargs["generator"] = None
        result = func(*args, **kwargs)
        if not func.is_view and not name.startswith(_NO_KERNEL) and self.phase:
            made = result if isinstance(result, Tensor) else None
            if made is None or (made.numel() and made.device == META):
                arguments = (*args, *kwargs.values())
                self.counts[_whose(), self.phase] += _kernels_of(name, arguments)
        return result


class ManyTensors(nn.Module):
    """Whose forward does next to nothing with each of its parameters."""

    def __init__(self, shapes: list[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        new = torch.zeros if device.type == "cpu" else torch.empty
        self.parts = nn.ParameterList(new(one, dtype=dtype, device=device) for one in shapes)

    def forward(self) -> Tensor:
        return torch.stack([one.sum() for one in self.parts]).sum()


@dataclass(frozen=True)
class Case:
    """What is trained how.

    Attributes:
        codec: What encodes gradients.
        gather: None: what it is by default.
        dtype: Of parameters.
        clips: Whether gradients are clipped by norm.
    """

    codec: Compressor | None = None
    gather: str | None = None
    dtype: torch.dtype = torch.float32
    clips: bool = False


def new_training(
    case: Case,
    num_buckets: int,
    device: torch.device = META,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> tuple[nn.Module, torch.optim.Optimizer, Pipeline]:
    """A model of so many buckets, its optimizer, and what trains it."""
    is_matrix = case.codec is not None and case.codec.name == "powersgd"
    sizes: list[Any] = [NUMEL] * NUM_TENSORS * num_buckets
    if is_matrix:
        sizes = [(1024, 1024)] * num_buckets
    model = ManyTensors(sizes, case.dtype, device)
    made = optimizer(model.parameters(), lr=0.1, foreach=True)  # type: ignore[call-arg]
    gather = case.gather or default_gather(case.codec)
    options = ExchangeOptions(gather, compressor=case.codec)
    megabytes = BUCKET_MB * case.dtype.itemsize / 4
    fusion = ThresholdFusion(bucket_cap_mb=megabytes, first_bucket_cap_mb=megabytes)
    pipeline = Pipeline(
        model, [made], Pretended(device), fusion, broadcast_buffers=False, options=options
    )
    return model, made, pipeline


def count(case: Case, num_buckets: int) -> tuple[Kernels, int]:
    """Kernels of one steady step, and how often the optimizer was called in it."""
    model, optimizer, pipeline = new_training(case, num_buckets)
    kernels, calls = Kernels(), 0

    def step(phase: str) -> None:
        def enter(name: str) -> None:
            kernels.phase = phase and name

        with kernels:
            enter("forward")
            with pipeline.forward():
                loss = model()
            enter("backward")
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            enter("clipping")
            if case.clips:
                pipeline.parts[0].mean.clip_by_norm(1.0)
            enter("step")
            optimizer.step()
            enter("forward")
            pipeline.complete_parameters()
            enter("")

    step("")
    step("")
    plan = pipeline.parts[0].plan
    assert plan is not None
    assert len(plan.buckets) == num_buckets
    functional: Any = import_module("torch.optim.sgd")
    update = functional.sgd

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        update(*args, **kwargs)

    functional.sgd = counted
    try:
        step("counted")
    finally:
        functional.sgd = update
    # Nobody reads weights without numbers.
    pipeline.collectives.was_discarded = True
    pipeline.detach()
    return kernels, calls


@contextmanager
def on_meta() -> Iterator[None]:
    """Generators and autocast are the CPU's, and lists of tensors are taken as on CUDA."""
    drawing, modes, autocast = vars(error_feedback), vars(torch), torch.autocast
    lists, name = vars(_foreach_utils), "_get_foreach_kernels_supported_devices"
    generator, devices = drawing["Generator"], lists[name]
    drawing["Generator"] = lambda device: torch.Generator()
    modes["autocast"] = lambda kind, **options: autocast("cpu", **options)
    lists[name] = lambda: ["meta"]
    try:
        yield
    finally:
        drawing["Generator"], modes["autocast"], lists[name] = generator, autocast, devices


PHASES = ("backward", "step", "forward")
COLUMNS = (*PHASES, "**a bucket**", "writes", "sums", "a step", "clipping", "calls", "bytes")


def row(title: str, case: Case) -> str:
    """A line of the table."""
    few, _ = count(case, 2)
    many, calls = count(case, 6)

    def a_bucket(who: str, phase: str) -> float:
        return (many.counts[who, phase] - few.counts[who, phase]) / 4

    own = [a_bucket("engine", one) for one in PHASES]
    once = sum(many.counts["engine", one] for one in PHASES) - 6 * sum(own)
    others = [sum(a_bucket(who, one) for one in PHASES) for who in ("writes", "additions")]
    clipping = many.counts["engine", "clipping"]
    gc.collect()
    # It has momentum of its own.
    held = held_bytes(case) if title != "`dgc`" else math.nan
    figures = *own, sum(own), *others, once, clipping, calls
    cells = [*(f"{one:.3g}" for one in figures), f"{held:.1f}"]
    return "| " + " | ".join([title, *cells]) + " |"


def cases() -> dict[str, Case]:
    """All lines of the table."""
    dense = {
        "dense": Case(),
        'dense, `gather="gradients"`': Case(gather="gradients"),
        "dense, bf16 parameters": Case(dtype=torch.bfloat16),
        "dense, clipped by norm": Case(clips=True),
    }
    # The host reads what ranks say of votes, which is nowhere here.
    named = [name for name in CODECS if not resolve(name).votes]
    codecs: dict[str, Case] = {f"`{name}`": Case(resolve(name)) for name in named}
    last = {"`powersgd`": Case(resolve("powersgd")), "`oktopk`": Case(OkTopk(mode="static"))}
    return {**dense, **codecs, **last}


# --- memory -------------------------------------------------------------------------------------


def held_bytes(case: Case) -> float:
    """Bytes a parameter that a rank has after a backward with AdamW, communicators apart."""
    model, _, pipeline = new_training(case, 2, optimizer=torch.optim.AdamW)
    (part,) = pipeline.parts
    for step in range(3):
        with pipeline.forward():
            loss = model()
        part.optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        if step < 2:
            part.optimizer.step()
    del loss
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, Tensor) and one.device == META:
            for tensor in (one, one.grad if one.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
    num_parameters = sum(one.numel() for one in model.parameters())
    pipeline.abandon()
    return sum(found.values()) / num_parameters


# --- the host -----------------------------------------------------------------------------------


def hook_us(num_tensors: int = 400, numel: int = 64, num_steps: int = 30) -> float:
    """What hooks, copies of gradients and launches add to a backward, microseconds a parameter."""
    device = torch.device("cpu")
    model = ManyTensors([numel] * num_tensors, torch.float32, device)
    plain = ManyTensors([numel] * num_tensors, torch.float32, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    fusion = ThresholdFusion(bucket_cap_mb=64 * numel * 4 / 2**20)
    pipeline = Pipeline(model, [optimizer], Pretended(), fusion, broadcast_buffers=False)
    ours, theirs = [], []
    for _ in range(num_steps):
        with pipeline.forward():
            loss = model()
        optimizer.zero_grad()
        with pipeline.backward():
            ours.append(_seconds(loss.backward))
        optimizer.step()
        plain.zero_grad()
        theirs.append(_seconds(plain().backward))
    pipeline.detach()
    return (median(ours[3:]) - median(theirs[3:])) / num_tensors * 1e6


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> None:
    """Prints both tables, and on what they were made."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| |", " | ".join(COLUMNS), "|")
    print("|---" * (len(COLUMNS) + 1) + "|")
    with on_meta():
        for title, case in cases().items():
            print(row(title, case), flush=True)
    print(f"\nHooks: {hook_us():.1f} us a parameter of 400 with 64 elements each.")
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, 1 thread.")


if __name__ == "__main__":
    main()
