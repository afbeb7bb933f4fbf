"""A simulated CUDA device: streams, events and memory, and what is ordered behind what.

Kernels run at once, on the CPU. What is simulated is what a GPU would have been free to do: every
stream has a vector clock, which says how much of each stream is over when its next kernel begins.
Two accesses of the same bytes, of which one writes, are a race unless one is known to be over when
the other begins. That does not depend on how fast anything was in this run, so that one run is
enough.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lightning_dear

Clock = dict[int, int]
"""Number of a stream -> how many of its kernels are over."""

_numbers = itertools.count()
_here = threading.local()

Place = tuple[tuple[CodeType, int], ...]
"""Where something was called: code and line, the innermost first."""

_FOLDERS = (str(Path(lightning_dear.__file__).parent), str(Path(__file__).parents[1]))
# How collectives are launched and timed is the same for all.
_SKIPPED = (
    "collectives/work.py",
    "distributed/strict.py",
    "telemetry/clock.py",
    "streams/device.py",
    "streams/communicators.py",
    "streams/checker.py",
    "streams/ranks.py",
)
_names: dict[CodeType, str | None] = {}


class Extent(NamedTuple):
    """Bytes of one allocation, from the first to the one behind the last."""

    memory: Memory
    first: int
    end: int


class Access(NamedTuple):
    """Of an extent by a kernel: which kernel of its stream, and for people."""

    number: int
    name: str
    place: Place


class Stream:
    """A queue of kernels, each of which begins when those before it are over.

    Args:
        device: Whose.
        name: For people.

    Attributes:
        number: Its own, over all devices.
        clock: What is over when its next kernel begins.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.number = self.cuda_stream = next(_numbers)
        self.clock: Clock = {self.number: 0}

    def wait_clock(self, clock: Clock) -> None:
        """Puts kernels that come behind what `clock` knows to be over."""
        if self is self.device.default:
            self.device.note_held_up("a wait of the compute stream")
        join(self.clock, clock)

    def wait_stream(self, other: Stream) -> None:
        """See torch.cuda.Stream."""
        self.wait_clock(other.clock)

    def wait_event(self, event: Event) -> None:
        """See torch.cuda.Stream."""
        self.wait_clock(event.clock)

    def synchronize(self) -> None:
        """See torch.cuda.Stream: the host waits."""
        if self is self.device.default:
            self.device.note_held_up("Stream.synchronize")
        self.device.block_host("Stream.synchronize", self.clock)


class Event:
    """See torch.cuda.Event; times count kernels, as if each took a millisecond."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """See torch.cuda.Event."""
        self.clock = dict((stream or here().current).clock)

    def synchronize(self) -> None:
        """See torch.cuda.Event: the host waits."""
        here().block_host("Event.synchronize", self.clock)

    def elapsed_time(self, end: Event) -> float:
        """See torch.cuda.Event."""
        return float(sum(end.clock.values()) - sum(self.clock.values()))


class Thread:
    """A thread of the host: its current stream, and what it knows to be over.

    What it does to the host's own memory is in the order of its calls, as kernels are on a stream.

    Args:
        device: Of its rank.
        name: For people.
        turn: Its number in `Turns`.

    Attributes:
        device: See above.
        name: See above.
        turn: See above.
        is_training: Whether it is the one that trains.
        number: Its own, over all streams and threads.
        current: The stream on which its kernels run at present.
        clock: What it knows to be over.
    """

    def __init__(self, device: Device, name: str, turn: int) -> None:
        self.device, self.name, self.turn = device, name, turn
        self.is_training = turn == device.rank
        self.number = next(_numbers)
        self.current = device.default
        self.clock: Clock = {self.number: 0}
        device.names[self.number] = name


class Memory:
    """One allocation. It hangs on torch's storage, and so ends with it.

    Args:
        device: Whose.

    Attributes:
        is_pinned: Whether it was declared as memory of the host, from and to which copies go.
        stream: On which it was allocated, and whose next kernels may get it when it is free.
        is_on_device: Whether kernels have had to do with it; else perhaps the host's.
        accesses: (first byte, end, whether it writes, stream) -> the last such access that a later
            one may still have to be ordered behind.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.current
        self.is_on_device = self.is_pinned = False
        self.accesses: dict[tuple[int, int, bool, int], Access] = {}

    def __del__(self) -> None:
        self.device.look_at_freed(self)


class Device:
    """What one rank has: its streams, and what was found.

    Args:
        rank: Its number.

    Attributes:
        default: The stream on which everything runs that is put nowhere else.
        names: Number of a stream, thread or message -> for people.
        races: What is in no order -> how often.
        frees: What was free while a stream still used it -> how often.
        syncs: Where the training thread waited for the device -> how often.
        held_up: Where another thread made the compute stream wait, or waited for it -> how often.
        kernels: Name -> how many were launched, without those of communicators.
        launches: Collectives in the order in which the host launched them, over all communicators.
        is_over: Whether nobody looks any more.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams: dict[int, Stream] = {}
        self.names: dict[int, str] = {}
        self.default = self.new_stream("the compute stream")
        self.races: Counter[str] = Counter()
        self.frees: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.held_up: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.launches: list[str] = []
        self.is_over = False

    @property
    def current(self) -> Stream:
        """The stream on which kernels of the calling thread run at present."""
        return this_thread().current

    @current.setter
    def current(self, stream: Stream) -> None:
        this_thread().current = stream

    def new_stream(self, name: str) -> Stream:
        """Another one."""
        stream = Stream(self, name)
        self.streams[stream.number] = stream
        self.names[stream.number] = name
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Kernels run on `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(
        self,
        stream: Stream | Thread,
        name: str,
        reads: Sequence[Extent],
        writes: Sequence[Extent],
    ) -> None:
        """Notes a kernel at the end of `stream`, and what it is in no order with.

        Or what a thread does to the host's memory.
        """
        clock = stream.clock
        if stream is self.default:
            self.note_held_up(f"{name} on the compute stream")
        join(clock, this_thread().clock)
        clock[stream.number] += 1
        access = Access(clock[stream.number], name, place())
        for extent in reads:
            self._touch(extent, stream, access, is_write=False)
        for extent in writes:
            self._touch(extent, stream, access, is_write=True)

    def _touch(
        self, extent: Extent, stream: Stream | Thread, access: Access, *, is_write: bool
    ) -> None:
        memory, first, end = extent
        if first == end:
            return
        over, clock = [], stream.clock
        for key, other in memory.accesses.items():
            other_first, other_end, other_writes, number = key
            if other_first >= end or first >= other_end:
                continue
            if clock.get(number, 0) < other.number:
                if is_write or other_writes:
                    self._note_race(stream, access, is_write, number, other, other_writes)
            elif is_write and first <= other_first and other_end <= end:
                # Whoever is ordered behind this one is so behind that one.
                over.append(key)
        for key in over:
            del memory.accesses[key]
        memory.accesses[first, end, is_write, stream.number] = access

    def _note_race(
        self,
        stream: Stream | Thread,
        access: Access,
        is_write: bool,
        number: int,
        other: Access,
        other_writes: bool,
    ) -> None:
        this, that = ("write" if one else "read" for one in (is_write, other_writes))
        self.races[
            f"{access.name} on {stream.name} {this}s at {told(access.place)} what"
            f" {other.name} on {self.names[number]} {that}s at {told(other.place)}"
        ] += 1

    def look_at_freed(self, memory: Memory) -> None:
        """Whether a stream may still use memory that the next allocation may get now."""
        thread = getattr(_here, "thread", None)
        if self.is_over or thread is None or thread.device is not self:
            return
        clock, host = memory.stream.clock, thread.clock
        for (_, _, _, number), access in memory.accesses.items():
            if memory.is_pinned and number in self.streams:
                # Torch's allocator of pinned memory waits for copies.
                continue
            if max(clock.get(number, 0), host.get(number, 0)) < access.number:
                self.frees[
                    f"{access.name} on {self.names[number]}, launched at"
                    f" {told(access.place)}, uses memory that is free at {told(place())}"
                ] += 1

    def block_host(self, name: str, clock: Clock) -> None:
        """The calling thread waits until all in `clock` is over."""
        thread = this_thread()
        join(thread.clock, clock)
        if thread.is_training:
            self.syncs[f"{name} at {told(place())}"] += 1

    def note_held_up(self, how: str) -> None:
        """Another thread than the one that trains has to do with the compute stream."""
        if not this_thread().is_training:
            self.held_up[f"{how} at {told(place())}"] += 1

    def put(self, *tensors: Tensor) -> None:
        """Tensors are the device's from now on, and no longer the host's."""
        for tensor in tensors:
            memory_of(tensor).is_on_device = True

    def forget(self) -> None:
        """Begins anew to count kernels and the host's waits: what came before was no steady step"""
        self.syncs.clear()
        self.kernels.clear()


def join(clock: Clock, other: Clock) -> None:
    """Adds what `other` knows to be over."""
    for number, seen in other.items():
        if seen > clock.get(number, 0):
            clock[number] = seen


def use(thread: Thread) -> None:
    """What the calling thread is from now on."""
    _here.thread = thread


def this_thread() -> Thread:
    """The calling one."""
    thread: Thread = _here.thread
    return thread


def here() -> Device:
    """The calling thread's."""
    return this_thread().device


def memory_of(tensor: Tensor) -> Memory:
    """The allocation in which it lies, on the calling thread's device."""
    storage: Any = tensor.untyped_storage()
    memory: Memory | None = getattr(storage, "simulated_memory", None)
    # What one process has for all ranks would be each rank's own.
    if memory is None or memory.device is not here():
        memory = storage.simulated_memory = Memory(here())
    return memory


def extent_of(tensor: Tensor) -> Extent:
    """All bytes from its first to its last: views whose elements take turns seem to share them."""
    size, first = tensor.element_size(), tensor.storage_offset()
    last = first
    if tensor.is_contiguous():
        last += tensor.numel()
    elif tensor.numel():
        last += 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(memory_of(tensor), first * size, last * size)


def place() -> Place:
    """The two innermost lines of the package, or of whoever tests it."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 2:
        code = frame.f_code
        if code not in _names:
            _names[code] = _name_of(code)
        if _names[code] is not None:
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _name_of(code: CodeType) -> str | None:
    for folder in _FOLDERS:
        if code.co_filename.startswith(folder) and not code.co_filename.endswith(_SKIPPED):
            return code.co_filename[len(folder) + 1 :]
    return None


def told(where: Place) -> str:
    """For people: file, function and line."""
    return " < ".join(f"{_names[code]}:{code.co_name}:{line}" for code, line in where) or "?"


class Cuda:
    """What stands in for torch.cuda."""

    Event = Event

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802
        """See torch.cuda."""
        return here().new_stream(f"a stream made at {told(place())}")

    def stream(self, stream: Stream) -> Any:
        """See torch.cuda."""
        return here().on(stream)

    def current_stream(self, device: Any = None) -> Stream:
        """See torch.cuda."""
        return here().current

    def default_stream(self, device: Any = None) -> Stream:
        """See torch.cuda."""
        return here().default

    def get_device_name(self, device: Any = None) -> str:
        """See torch.cuda; of all ranks."""
        return "a simulated GPU"

    def synchronize(self, device: Any = None) -> None:
        """See torch.cuda: the host waits for all streams."""
        here().note_held_up("cuda.synchronize")
        everything: Clock = {}
        for stream in here().streams.values():
            join(everything, stream.clock)
        here().block_host("cuda.synchronize", everything)


DEVICE = torch.device("cpu")
"""Of tensors on the simulated device: torch knows them as the CPU's."""
