"""Runs ranks as threads, each with a simulated device, and says what was found."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear import torch_modes
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.staged import StagedCollectives
from lightning_dear.collectives.streams import CudaStreams, Streams
from lightning_dear.collectives.two_hops import NativeTwoHopCollectives, TwoHopCollectives
from lightning_dear.collectives.world import World
from tests.distributed.strict import Strict
from tests.streams.checker import Checker, host_reads_seen
from tests.streams.communicators import Calls, Communicator, Hang, Network
from tests.streams.device import DEVICE, Cuda, Device, Thread, memory_of, use
from tests.streams.messages import HostCalls, Mail
from tests.streams.threads import threads_simulated

T = TypeVar("T")


class SimulatedStreams(CudaStreams):
    """Of the simulated device, whose memory torch takes for the host's."""

    def __init__(self) -> None:
        super().__init__(DEVICE, Cuda())

    @override
    def holds(self, tensor: Tensor) -> bool:
        return memory_of(tensor).is_on_device

    @override
    def host_memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        pinned = torch.empty(elements, dtype=dtype)
        memory_of(pinned).is_pinned = True
        return pinned


@dataclass(frozen=True)
class Rank:
    """What a body is given.

    Attributes:
        number: From 0.
        size: How many there are.
        device: Its own.
        network: Shared by all.
        mail: Likewise.
    """

    number: int
    size: int
    device: Device
    network: Network
    mail: Mail

    def collectives(
        self, kind: type[NativeCollectives] = NativeCollectives, **options: Any
    ) -> NativeCollectives:
        """What the engine uses on NCCL, over simulated communicators; on hosts in two hops."""
        groups: list[Any] = [
            Communicator(self.network, name, self.device)
            for name in ("reduce", "gather", "objects")
        ]
        streams, own = CudaStreams(DEVICE, Cuda()), self.network.ranks_a_host
        common = {"calls": Strict(Calls()), "streams": streams, **options}
        if own == 1:
            return kind(*groups, World(self.number, self.size), **common)
        first = self.number - self.number % own
        members = {"within": range(first, first + own)}
        members["across"] = range(self.number % own, self.size, own)
        subgroups = [
            Communicator(self.network, f"{how} to {half}", self.device, ranks)
            for half in ("reduce", "gather")
            for how, ranks in members.items()
        ]
        world = World(self.number, self.size, tuple(rank - rank % own for rank in range(self.size)))
        return NativeTwoHopCollectives(*subgroups, *groups, world, **common)

    def host_collectives(self) -> PairwiseCollectives:
        """What the engine uses on gloo, over simulated messages; on hosts in two hops."""
        groups: list[Any] = [
            Communicator(self.network, name, self.device)
            for name in ("reduce", "gather", "objects")
        ]
        own, calls = self.network.ranks_a_host, Strict(HostCalls(self.network, self.mail))
        if own == 1:
            return PairwiseCollectives(*groups, World(self.number, self.size), calls)
        world = World(self.number, self.size, tuple(rank - rank % own for rank in range(self.size)))
        return TwoHopCollectives(*groups, world, calls)

    def staged(
        self,
        kind: type[StagedCollectives] = StagedCollectives,
        streams: Streams | None = None,
    ) -> StagedCollectives:
        """What the engine uses on gloo for a device."""
        return kind(self.host_collectives(), streams or SimulatedStreams())


@dataclass(frozen=True)
class Found(Generic[T]):
    """What ranks returned, and what was found on their devices.

    Attributes:
        results: In the order of the ranks.
        devices: In the same order.
    """

    results: list[T]
    devices: list[Device]

    def _all(self, name: str) -> Counter[str]:
        return sum((getattr(one, name) for one in self.devices), start=Counter())

    @property
    def races(self) -> Counter[str]:
        """Of all ranks."""
        return self._all("races")

    @property
    def frees(self) -> Counter[str]:
        """Of all ranks."""
        return self._all("frees")

    @property
    def held_up(self) -> Counter[str]:
        """Of all ranks."""
        return self._all("held_up")

    @property
    def syncs(self) -> Counter[str]:
        """Of all ranks, since each called `forget`."""
        return self._all("syncs")

    @property
    def other_order(self) -> str | None:
        """The first launch that is another one on some rank; None: all have one order."""
        launches = zip_longest(*(one.launches for one in self.devices), fillvalue="nothing")
        for number, several in enumerate(launches):
            if len(set(several)) > 1:
                told = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(several))
                return f"Launch {number} is: {told}."
        return None

    def check(self) -> None:
        """Fails if anything is in no order, or is free too early, or ranks launch differently.

        Or if another thread than the one that trains holds up the compute stream.
        """
        assert not self.races, _listed(self.races)
        assert not self.frees, _listed(self.frees)
        assert not self.held_up, _listed(self.held_up)
        assert self.other_order is None, self.other_order


def _listed(found: Counter[str]) -> str:
    first = "\n".join(f"{count} times: {what}" for what, count in found.most_common(10))
    return f"{len(found)} kinds\n{first}"


@contextmanager
def _as_on_an_accelerator() -> Iterator[None]:
    """Where there is a choice; and each kernel on one thread."""
    num_threads, host_devices = torch.get_num_threads(), torch_modes.HOST_DEVICES
    torch.set_num_threads(1)
    torch_modes.HOST_DEVICES = ()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch_modes.HOST_DEVICES = host_devices


def on_simulated_cuda(
    body: Callable[[Rank], T],
    size: int,
    *,
    is_checked: bool = True,
    is_late: bool = True,
    ranks_a_host: int = 1,
    has_threads: bool = False,
) -> Found[T]:
    """Runs `body` on every rank.

    Args:
        body: Told its rank. Its tensors are the host's until they are put on `rank.device`.
        size: Number of ranks.
        is_checked: Whether kernels are looked at; else nothing is found but a hang.
        is_late: See `Network`.
        ranks_a_host: See there.
        has_threads: Whether the engine's threads take turns, too, and operations on none of the
            device's memory are the host's.

    Raises:
        Hang: If all wait for each other.
        Exception: What a rank has raised.
    """
    network = Network(size, is_late=is_late, ranks_a_host=ranks_a_host)
    devices, mail = [Device(number) for number in range(size)], Mail()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(number: int) -> None:
        device = devices[number]
        use(Thread(device, "the training thread", number))
        # Of each thread, whatever the others have.
        torch.set_num_threads(1)
        network.turns.begin(number)
        try:
            with ExitStack() as stack:
                if is_checked:
                    stack.enter_context(Checker(device, has_host=has_threads))
                results[number] = body(Rank(number, size, device, network, mail))
        except BaseException as error:
            errors.append(error)
        finally:
            device.is_over = True
            network.turns.end(number)

    # Where one never ends, the process may.
    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in range(size)]
    with ExitStack() as stack:
        stack.enter_context(_as_on_an_accelerator())
        if is_checked:
            stack.enter_context(host_reads_seen())
        if has_threads:
            how = {"is_checked": is_checked, "is_eager": not is_late}
            stack.enter_context(threads_simulated(network, **how))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Who waits for a rank that has failed hangs because of it.
    for error in sorted(errors, key=lambda one: isinstance(one, Hang)):
        raise error
    return Found(results, devices)
