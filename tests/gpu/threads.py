"""Threads as ranks on one GPU's real streams: `python -m tests.gpu.threads`. NOT RUN so far.

The engine's own NCCL code, with torch's streams, allocator and autograd; in the place of NCCL,
kernels on streams of the communicators' own, each behind a long sleep. Who does not wait reads old
numbers. The same training where the host waits for the device at every collective has the bits to
compare with, and one that leaves all waits out must have others. Exits with 1 if anything is wrong.

Unlike NCCL, a wait blocks the host until all ranks have launched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.streams import CudaStreams
from lightning_dear.collectives.world import World
from lightning_dear.compression import OkTopk, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from tests.distributed.strict import Strict
from tests.streams.communicators import RESULTS, Calls
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS

SLEEP_CYCLES = 20_000_000
"""Some 10 ms of a GPU's time."""

NUM_STEPS = 5
DEADLINE_S = 60.0


class Network:
    """What ranks have launched.

    Attributes:
        size: Number of ranks.
        waits: "late": as NCCL does; "host": the host does, too; "never": nobody does.
        calls: (communicator, number of the launch) -> rank -> what it has launched.
    """

    def __init__(self, size: int, waits: str) -> None:
        self.size, self.waits = size, waits
        self.calls: dict[Any, dict[int, Any]] = {}
        self.error: BaseException | None = None
        self.changed = threading.Condition(threading.RLock())

    def put(self, key: Any, rank: int, what: Any) -> None:
        """Tells the others."""
        with self.changed:
            self.calls.setdefault(key, {})[rank] = what
            self.changed.notify_all()

    def from_all(self, key: Any, what: str) -> dict[int, Any]:
        """Blocks until all ranks are there."""
        with self.changed:
            is_there = self.changed.wait_for(
                lambda: self.error is not None or len(self.calls.get(key, ())) == self.size,
                DEADLINE_S,
            )
            if self.error is not None or not is_there:
                raise RuntimeError(f"{what}: {self.error or 'some ranks have not come'}")
            return self.calls[key]


class Group:
    """A communicator as one rank has it."""

    def __init__(self, network: Network, name: str, rank: int) -> None:
        self.network, self.name, self.num_launched = network, name, 0
        self.device, self.ranks, self.place = SimpleNamespace(rank=rank), range(network.size), rank
        self.stream = torch.cuda.Stream(priority=-1)


@dataclass
class Launched:
    """A collective that one rank has launched; see torch's `Work`."""

    key: Any
    op: str
    source: Any
    target: Any
    group: Group
    sizes: Sequence[int] | None
    ready: torch.cuda.Event
    done: torch.cuda.Event | None = None
    has_waited: bool = False

    def wait(self, timeout: Any = None) -> bool:
        network = self.group.network
        if not self.has_waited:
            everybody = network.from_all(self.key, self.op)
            with network.changed:
                if self.done is None:
                    _carry_out([everybody[rank] for rank in range(network.size)])
                self.has_waited = True
                if all(one.has_waited for one in everybody.values()):
                    del network.calls[self.key]
        assert self.done is not None
        if network.waits == "host":
            self.done.synchronize()
        if network.waits != "never":
            torch.cuda.current_stream().wait_event(self.done)
        # As torch's works do: who frees memory too early is to be seen.
        self.source = self.target = None
        return True


@torch.no_grad()
def _carry_out(everybody: list[Launched]) -> None:
    stream = everybody[0].group.stream
    with torch.cuda.stream(stream):
        for one in everybody:
            stream.wait_event(one.ready)
        torch.cuda._sleep(SLEEP_CYCLES)
        sources = [one.source.detach() for one in everybody]
        parts: list[Any] = sources
        if everybody[0].sizes:
            parts = [part.split(one.sizes) for part, one in zip(sources, everybody, strict=True)]
        results = RESULTS[everybody[0].op](parts)
        # Before anybody writes where another one has yet to read.
        are_read = torch.cuda.Event()
        are_read.record()
    for one, result in zip(everybody, results, strict=True):
        with torch.cuda.stream(one.group.stream):
            one.group.stream.wait_event(are_read)
            if result is not None:
                one.target.detach().copy_(result.view_as(one.target))
                result.record_stream(one.group.stream)
            one.done = torch.cuda.Event()
            one.done.record()


class StreamCalls(Calls):
    """What stands in for torch.distributed, behind `Strict`."""

    def all_gather_object(self, object_list: list[Any], obj: Any, *, group: Any) -> None:
        key = "objects", group.name, group.num_launched
        group.num_launched += 1
        group.network.put(key, group.device.rank, obj)
        everybody = group.network.from_all(key, "all_gather_object")
        object_list[:] = [everybody[rank] for rank in range(group.network.size)]

    def _launch(
        self,
        op: str,
        source: Tensor,
        target: Tensor,
        group: Any,
        is_async: bool,
        poisoned: Sequence[Tensor] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        assert is_async
        key = group.name, group.num_launched
        group.num_launched += 1
        ready = torch.cuda.Event()
        ready.record()
        one = Launched(key, op, source, target, group, sizes, ready)
        group.network.put(key, group.device.rank, one)
        return one


Case = dict[str, Any]


def train(network: Network, rank: int, case: Case, initial: nn.Module) -> list[Tensor]:
    """Weights after some steps from a copy of `initial`."""
    device = torch.device("cuda", 0)
    groups = (Group(network, name, rank) for name in ("reduce", "gather", "objects"))
    collectives = NativeCollectives(
        *groups, World(rank, network.size), Strict(StreamCalls()), streams=CudaStreams(device)
    )
    name = case.get("name", "mlp")
    model = deepcopy(initial).to(device)
    optimizer = optimizer_for(case.get("optimizer", "sgd"), model)
    options = case.get("options")
    pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=options)
    for step in range(NUM_STEPS):
        x, y = (one.to(device) for one in batch(name, step, rank))
        with pipeline.forward():
            loss = loss_of(model, x, y)
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
    pipeline.detach()
    torch.cuda.current_stream().synchronize()
    return [one.detach().clone() for one in weights(model)]


def run(size: int, case: Case, waits: str) -> list[list[Tensor]]:
    """What every rank has in the end."""
    network = Network(size, waits)
    # Not by the threads: all draw from one generator.
    initial = build(case.get("name", "mlp"))
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        torch.cuda.set_device(0)
        try:
            # Each rank computes on a stream of its own, as it would on a device of its own.
            with torch.cuda.stream(torch.cuda.Stream()):
                results[rank] = train(network, rank, case, initial)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            network.error = network.error or error
            with network.changed:
                network.changed.notify_all()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if network.error is not None:
        raise network.error
    return results


def cases() -> dict[str, Case]:
    """What is trained."""
    found: dict[str, Case] = {
        "dense": {"optimizer": "adamw"},
        "convolutions": {"name": "conv"},
        "gradients gathered": {"options": ExchangeOptions("gradients")},
    }
    for name in ("bf16", "int8", "topk", "powersgd"):
        codec = resolve_compressor(name)
        found[name] = {"options": ExchangeOptions(default_gather(codec), compressor=codec)}
    codec = OkTopk(mode="static", density=0.05)
    found["oktopk"] = {"options": ExchangeOptions("gradients", compressor=codec)}
    return found


def are_equal(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Whether all ranks have the same bits in both."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def main() -> int:
    """Runs all cases; how many are wrong."""
    # Bits are compared.
    torch.backends.cudnn.deterministic = True
    num_wrong = 0
    for title, case in cases().items():
        for size in (2, 3):
            expected, found = run(size, case, "host"), run(size, case, "late")
            is_right = are_equal(expected, found) and are_equal(found, [found[0]] * size)
            num_wrong += not is_right
            print(f"{title}, {size} ranks: {'right' if is_right else 'WRONG'}", flush=True)
    case = cases()["dense"]
    is_seen = not are_equal(run(2, case, "host"), run(2, case, "never"))
    print(f"without any wait: {'seen' if is_seen else 'NOT SEEN'}", flush=True)
    return num_wrong + (not is_seen)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
