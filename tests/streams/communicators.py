"""Simulated NCCL: collectives are kernels on streams of their communicators' own.

A communicator's stream waits for the stream that launches, and `wait` makes the current stream wait
for the communicator's. What travels is read at the first wait, the latest moment at which a GPU
might read it. Until then what is gathered, broadcast or sent from each to each is nan: who does not
wait computes with it. Where a sum arrives, the rank's own numbers stand until then.

Threads are ranks, of which one runs at a time, until it needs what another one has to send.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.streams.device import Clock, Device, extent_of, here, place, this_thread, told

KNOWN = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Types of numbers that NCCL sends."""


class Hang(Exception):  # noqa: N818
    """Every rank waits for another one, or for one that has ended."""


@contextmanager
def unseen() -> Iterator[None]:
    """What the simulation itself does to tensors: no kernel, and nothing that autograd sees."""
    without_modes = torch._C.DisableTorchFunction(), _disable_current_modes()
    with torch.inference_mode(False), torch.no_grad(), without_modes[0], without_modes[1]:
        yield


class Turns:
    """Lets one of several threads run, and another one once that has to wait for it.

    So a run is the same each time, and nobody waits for long: where nobody can go on, all raise.

    Args:
        size: How many threads.
    """

    def __init__(self, size: int) -> None:
        self._changed = Condition()
        self._whose = 0
        # Thread -> what it waits for, and how to see that it is there.
        self._waits: list[tuple[str, Callable[[], bool]]] = [("its turn", lambda: True)] * size
        self._has_ended = [False] * size
        self._names = [f"rank {number}" for number in range(size)]
        self._hang: str | None = None

    def add(self, name: str, what: str, is_there: Callable[[], bool]) -> int:
        """Another thread begins, which waits for `what`. Returns its number."""
        with self._changed:
            self._waits.append((what, is_there))
            self._has_ended.append(False)
            self._names.append(name)
            return len(self._waits) - 1

    def begin(self, number: int) -> None:
        """Blocks until it is the calling thread's first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._whose == number)

    def wait_until(self, number: int, what: str, is_there: Callable[[], bool]) -> None:
        """Blocks thread `number`, whose turn it is, until others have made `is_there` true.

        Raises:
            Hang: If nobody can go on.
        """
        if is_there():
            return
        with self._changed:
            self._waits[number] = (what, is_there)
            self._pass_on(number)
            self._changed.wait_for(lambda: self._whose == number)
            if self._hang is not None:
                self._has_ended[number] = True
                raise Hang(self._hang)

    def offer(self, number: int) -> None:
        """Lets all others run that can, and goes on once it is thread `number`'s turn again."""
        with self._changed:
            self._waits[number] = ("its turn", lambda: True)
            self._pass_on(number)
            self._changed.wait_for(lambda: self._whose == number)

    def end(self, number: int) -> None:
        """Thread `number` needs no more turns."""
        with self._changed:
            self._has_ended[number] = True
            self._waits[number] = ("nothing: it has ended", lambda: False)
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        size = len(self._waits)
        others = [(number + hop) % size for hop in range(1, size + 1)]
        alive = [one for one in others if not self._has_ended[one]]
        able = [one for one in alive if self._waits[one][1]()]
        if alive and not able and self._hang is None:
            told = zip(self._names, self._waits, strict=True)
            self._hang = "; ".join(f"{name} waits for {what}" for name, (what, _) in told)
        if alive:
            self._whose = (able or alive)[0]
        self._changed.notify_all()


class Network:
    """What all ranks send, and have not all received yet.

    Args:
        size: Number of ranks.
        is_late: Whether data arrives when it is waited for, and not when all have launched.
        ranks_a_host: How many ranks a host has; where it is more than 1, there are two hops.

    Attributes:
        size: See above.
        is_late: See above.
        ranks_a_host: See above.
        turns: Whose it is.
        calls: (communicator, number of the collective in it) -> rank -> what it has launched.
    """

    def __init__(self, size: int, *, is_late: bool = True, ranks_a_host: int = 1) -> None:
        self.size, self.is_late, self.ranks_a_host = size, is_late, ranks_a_host
        self.turns = Turns(size)
        self.calls: dict[tuple[str, int], dict[int, Any]] = {}

    def from_all(self, key: tuple[str, int], what: str, size: int) -> dict[int, Any]:
        """What every rank has put under `key`, of which there are `size`; blocks until all have."""
        calls, turn = self.calls[key], this_thread().turn
        self.turns.wait_until(turn, f"others in {what}", lambda: len(calls) == size)
        return calls


class Communicator:
    """A process group: its name, and on each rank a stream and what is under way on it.

    Args:
        network: Over which.
        name: The same on all ranks.
        device: Of the rank that has this one.
        ranks: In it; None: all.
    """

    def __init__(
        self, network: Network, name: str, device: Device, ranks: Sequence[int] | None = None
    ) -> None:
        self.network, self.name, self.device = network, name, device
        self.ranks = ranks or range(network.size)
        self.place = self.ranks.index(device.rank)
        self.key = name if ranks is None else f"{name} of {self.ranks[0]}"
        self.stream = device.new_stream(f"the stream of '{name}'")
        self.num_launched = 0
        self.under_way: list[Collective] = []

    @property
    def is_idle(self) -> bool:
        """Whether all ranks have launched what this rank has, so that no kernel waits for them."""
        calls = self.network.calls
        return all(len(calls[one.key]) == len(self.ranks) for one in self.under_way)

    def abort(self) -> None:
        """As a backend's: ends what is under way, whose results are not read."""
        self.under_way.clear()

    def destroy(self) -> None:
        """As torch does at the end of a process: waits for all kernels."""
        for one in self.under_way:
            one._deliver()

    def _get_backend(self, device: torch.device) -> Communicator:
        return self

    def _group_start(self) -> None:
        """One abort waits for no other here."""

    _group_end = _group_start


class Collective:
    """One rank's part of a collective, and torch's work for it.

    Args:
        op: Name of what is done.
        source: Read: a tensor, or one for each rank.
        target: Written, likewise.
        communicator: In which.
        sizes: How many elements of the source are for each rank; None: as many for each.
    """

    def __init__(
        self,
        op: str,
        source: Tensor | list[Tensor],
        target: Tensor | list[Tensor],
        communicator: Communicator,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.op, self.communicator, self.sizes = op, communicator, sizes
        self.sources = [source] if isinstance(source, Tensor) else source
        self.targets = [target] if isinstance(target, Tensor) else target
        # Where sizes are told, each rank has its own; so it is where each has a tensor for each.
        is_whole = sizes is None and isinstance(source, Tensor)
        self.shape = self.sources[0].dtype, tuple(self.sources[0].shape) if is_whole else None
        self.name = f"{op} {communicator.num_launched} of '{communicator.name}'"
        self.key = communicator.key, communicator.num_launched
        self.result: Any = None
        self.has_result = self.has_arrived = False
        self.clock: Clock = {}

    def launch(self, poisoned: Sequence[Tensor]) -> None:
        """Puts it on the communicator's stream, behind what is on the current one."""
        communicator, sources, targets = self.communicator, self.sources, self.targets
        device, stream = communicator.device, communicator.stream
        device.put(*sources, *targets)
        many = "parts" if self.sizes else sum(one.numel() for one in sources)
        device.launches.append(f"{self.op} of {many} {sources[0].dtype} in '{communicator.name}'")
        stream.wait_stream(device.current)
        device.run(
            stream, self.name, *([extent_of(one) for one in all_] for all_ in (sources, targets))
        )
        self.clock = dict(stream.clock)
        with unseen():
            for part in poisoned:
                part.data.fill_(float("nan") if part.is_floating_point() else 85)
        communicator.num_launched += 1
        communicator.under_way.append(self)
        network = communicator.network
        network.calls.setdefault(self.key, {})[device.rank] = self
        if not network.is_late:
            self._deliver()

    def wait(self, timeout: Any = None) -> bool:
        """As torch's: the current stream waits, the host does not, and no memory is kept longer."""
        current = here().current
        current.wait_clock(self.clock)
        under_way = self.communicator.under_way
        # A stream is in order: what was launched before has ended, too.
        while self in under_way:
            under_way[0]._deliver()
            under_way.pop(0)
        # Torch has kept both until now, whatever its caller does.
        self.sources = self.targets = []
        return True

    def _deliver(self) -> None:
        if self.has_arrived:
            return
        communicator = self.communicator
        size = len(communicator.ranks)
        everybody = communicator.network.from_all(self.key, self.name, size)
        if not self.has_result:
            _carry_out([everybody[rank] for rank in communicator.ranks])
        with unseen():
            for target, result in zip(self.targets, self.result or [], strict=False):
                target.data.copy_(result.view_as(target))
        self.result, self.has_arrived = None, True


def _carry_out(everybody: Sequence[Collective]) -> None:
    """Reads all ranks' sources as they are now, and has every rank's result ready."""
    ops = {(one.op, one.shape) for one in everybody}
    if len(ops) > 1:
        raise RuntimeError(f"Ranks have launched what does not fit together: {ops}.")
    with unseen():
        if everybody[0].op.endswith(" of parts"):
            parts = zip(*(one.sources for one in everybody), strict=True)
            result_of = RESULTS[everybody[0].op.removesuffix(" of parts")]
            results = [result_of([*part]) for part in parts]
            for one, result in zip(everybody, zip(*results, strict=True), strict=True):
                one.result = [*result]
        elif everybody[0].op == "from each to each":
            for rank, one in enumerate(everybody):
                one.result = [other.sources[rank].clone() for other in everybody]
        else:
            sources: list[Any] = [one.sources[0] for one in everybody]
            if everybody[0].sizes is not None:
                sources = [
                    one.split(other.sizes) for one, other in zip(sources, everybody, strict=True)
                ]
            for one, result in zip(everybody, RESULTS[everybody[0].op](sources), strict=True):
                one.result = None if result is None else [result]
    for one in everybody:
        one.has_result = True


def _summed(sources: list[Tensor]) -> Tensor:
    total = sources[0].clone()
    for other in sources[1:]:
        total = total + other
    return total


def _alike(result: Tensor, sources: list[Tensor]) -> list[Tensor]:
    return [result.clone() for _ in sources]


RESULTS: dict[str, Callable[[list[Any]], Sequence[Tensor | None]]] = {
    "reduce-scatter": lambda sources: [*_summed(sources).chunk(len(sources))],
    "sum": lambda sources: _alike(_summed(sources), sources),
    "maximum": lambda sources: _alike(torch.stack(sources).amax(0), sources),
    "all-gather": lambda sources: _alike(torch.cat(sources), sources),
    "all-to-all": lambda sources: [
        torch.cat([source[rank].reshape(-1) for source in sources]) for rank in range(len(sources))
    ],
    "broadcast": lambda sources: [None, *_alike(sources[0], sources[1:])],
}
"""Collective -> makes of all ranks' sources what each of them gets."""


class _Part:
    """The work of a part of one kernel, which nobody can wait for."""

    def wait(self, timeout: Any = None) -> bool:
        """As torch's `_IllegalWork`."""
        raise AssertionError("A part of a coalesced launch has no work of its own.")


class _Together:
    """The work of a coalesced launch."""

    collective: Collective

    def wait(self) -> None:
        """For all parts."""
        self.collective.wait()


class _Default:
    """The default process group, in which nothing is sent here."""

    def _get_backend(self, device: torch.device) -> _Default:
        return self

    def abort(self) -> None:
        """Ends nothing."""


class Calls:
    """What stands in for torch.distributed, behind `Strict`, over simulated communicators."""

    group = SimpleNamespace(WORLD=_Default())

    def __init__(self) -> None:
        # Parts of the coalesced launch that is being made, behind None; empty: there is none.
        self._parts: list[Any] = []

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        *,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch.distributed; `output` may lie in `input`."""
        assert input.numel() == output.numel() * len(group.ranks)
        return self._launch("reduce-scatter", input, output, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, *, group: Any, async_op: bool = False
    ) -> Any:
        """See torch.distributed; `input_tensor` may lie in `output_tensor`."""
        size, rank = len(group.ranks), group.place
        assert output_tensor.numel() == input_tensor.numel() * size
        others = [part for one, part in enumerate(output_tensor.chunk(size)) if one != rank]
        return self._launch("all-gather", input_tensor, output_tensor, group, async_op, others)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch.distributed."""
        assert output_split_sizes is not None or input.shape == output.shape
        return self._launch(
            "all-to-all", input, output, group, async_op, [output], input_split_sizes
        )

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        *,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch.distributed; what is empty is not sent."""
        outputs, inputs = output_tensor_list, input_tensor_list
        assert len(outputs) == len(inputs) == len(group.ranks)
        return self._launch("from each to each", inputs, outputs, group, async_op, outputs)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        *,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch.distributed."""
        name = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "maximum"}[op]
        return self._launch(name, tensor, tensor, group, async_op)

    def broadcast(self, tensor: Tensor, src: int, *, group: Any, async_op: bool = False) -> Any:
        """See torch.distributed; from rank 0."""
        assert src == 0
        poisoned = [tensor] if group.device.rank else []
        return self._launch("broadcast", tensor, tensor, group, async_op, poisoned)

    def all_gather_object(self, object_list: list[Any], obj: Any, *, group: Any) -> None:
        """See torch.distributed; on the host."""
        key = f"objects of {group.name}", group.num_launched
        group.num_launched += 1
        with unseen():
            group.network.calls.setdefault(key, {})[group.device.rank] = pickle.dumps(obj)
        what, size = f"all_gather_object at {told(place())}", group.network.size
        everybody = group.network.from_all(key, what, size)
        with unseen():
            object_list[:] = [pickle.loads(everybody[rank]) for rank in range(size)]

    @contextmanager
    def _coalescing_manager(
        self, group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        """As torch's: what is launched within is one kernel, which is launched at the end."""
        assert async_ops
        assert not self._parts
        together = _Together()
        self._parts = [None]
        yield together
        parts, self._parts = self._parts[1:], []
        ops, sources, targets, poisoned = zip(*parts, strict=True)
        assert len({*ops}) == 1
        together.collective = Collective(f"{ops[0]} of parts", [*sources], [*targets], group)
        together.collective.launch(sum(poisoned, []))

    def _launch(
        self,
        op: str,
        source: Tensor | list[Tensor],
        target: Tensor | list[Tensor],
        group: Communicator,
        async_op: bool,
        poisoned: Sequence[Tensor] = (),
        sizes: Sequence[int] | None = None,
    ) -> Collective | None:
        given = [*(one if isinstance(one, list) else [one] for one in (source, target))]
        for tensor in sum(given, []):
            assert tensor.is_contiguous(), f"{op}: NCCL takes contiguous tensors only"
            assert tensor.dtype in KNOWN, f"{op}: NCCL sends no {tensor.dtype}"
            assert tensor.dtype == given[0][0].dtype
        if self._parts:
            self._parts.append((op, source, target, [*poisoned]))
            return _Part()
        collective = Collective(op, source, target, group, sizes)
        collective.launch(poisoned)
        if async_op:
            return collective
        collective.wait()
        return None
