"""A launched collective, the bytes it sends, and what the engine asks of whoever launches it."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.world import World

T = TypeVar("T")

SplitTensor = tuple[Tensor, list[int]]
"""A flat tensor, and how many of its elements are for, or from, each rank, by rank."""

Encode = Callable[[Tensor], Tensor]
"""Makes of a host's sums, [hosts, elements] fp32, what is sent to each host, a row for each."""

TAGS_OF_ONE_OPTIMIZER = 1 << 12
"""Of the buckets of one optimizer; what it exchanges besides begins at multiples of it."""

GRADIENT_TAGS = 1 << 22
STATE_TAGS = 1 << 23
SELECTION_TAGS = 3 << 22
"""Added to a bucket's number for exchanges that may be made while the bucket's own is under way, or
is expected after a step that was broken off: of whole gradients, of saved state, and of what owners
select."""


@contextmanager
def uncounted(collectives: Collectives) -> Iterator[None]:
    """What is sent meanwhile, to measure or to save something, belongs to no step."""
    ledger, collectives.ledger = collectives.ledger, Counter()
    try:
        yield
    finally:
        collectives.ledger = ledger


@contextmanager
def as_metadata(collectives: Collectives) -> Iterator[None]:
    """What is sent meanwhile says how many numbers travel, and which."""
    ledger = collectives.ledger
    with uncounted(collectives):
        yield
        ledger["metadata"] += collectives.ledger.total()


class Work:
    """A launched collective. `wait` may be called any number of times; it acts once.

    Args:
        arrive: Blocks the host (gloo) or the current stream (NCCL) until the data is here. It holds
            all memory that is sent or received, because torch's own works let go of that memory as
            soon as any stream waits, such as one that records a timeline.
        finish: Local work on the arrived data. None means that there is none.

    Attributes:
        is_done: Whether `wait` has nothing left to do: the data has arrived and is finished.
    """

    def __init__(
        self, arrive: Callable[[], None], finish: Callable[[], object] | None = None
    ) -> None:
        self._arrive = arrive
        self._finishes = [] if finish is None else [finish]
        self._arrival: Future[None] | None = None
        self.is_done = False

    @classmethod
    def done(cls) -> Work:
        """Returns a work with nothing to wait for."""
        work = cls(_nothing)
        work.is_done = True
        return work

    def wait(self) -> None:
        """Blocks until the result may be read. The first call also runs the local work.

        Raises what the backend or local work raises, and raises it again at each further call.
        """
        if self.is_done:
            return
        self._arrive()
        try:
            for finish in self._finishes:
                finish()
        except BaseException as error:
            # The result is half finished, and finishing it once more would count parts of it twice.
            self._arrive = partial(_raise, error)
            raise
        self.is_done = True
        # Lets go of the memory that they hold.
        self._arrive, self._finishes = _nothing, []

    def then(self, finish: Callable[[], object] | None = None) -> Work:
        """Adds local work that `wait` runs last; returns this work, which is not done before."""
        self._finishes += [] if finish is None else [finish]
        self.is_done = False
        return self

    def inside(self, call: Callable[[Callable[[], None]], None]) -> Work:
        """Lets `wait` run `call`, which is given what waits for the data; returns this work."""
        self._arrive = partial(call, self._arrive)
        return self

    def await_in(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Lets another thread wait for the data from now on; `wait` then waits for that thread.

        Args:
            submit: Hands a call to the thread; see `Background.submit`.
        """
        self._arrival = submit(self._arrive)
        self._arrive = self._arrival.result

    @property
    def is_on_host(self) -> bool:
        """Whether the data is known to be here, so that `wait` does not block the host.

        Unknown, and False, unless a thread waits for it (`await_in`) or the work is done.
        """
        return self.is_done or (self._arrival is not None and self._arrival.done())


def _nothing() -> None:
    return None


def _raise(error: BaseException) -> NoReturn:
    raise error


Begun = tuple[Work, Callable[[], object]]
"""A work, and what blocks until its second part has begun."""

WorkObserver = Callable[[str, str, Callable[[], None]], Callable[[], None]]
"""(lane, name, arrive) -> arrive: lets a timeline see when a collective's data arrived."""


alive: WeakSet[Collectives] = WeakSet()
"""All that may hold groups. Weak: nobody is to be kept by this once its training is over."""

reusable_groups: dict[timedelta | None, tuple[Any, list[Any]]] = {}
"""Timeout -> the default group and ours made under it; else every fit would open new sockets."""

Waits = Sequence[tuple[Any, ...]]
"""Torch's own works, each behind its peer, or None where only the backend knows whom it waits for.
Behind the work stands what must be held until then."""

_AT_ONCE = timedelta(milliseconds=1)


@dataclass(eq=False)
class Collectives(ABC):
    """What the engine needs from a backend, over process groups of our own.

    Attributes:
        reduce_group: Process group of the reduce-scatters.
        gather_group: Process group of the all-gathers.
        object_group: Process group of `all_gather_object`, on gloo. Nothing else in it may be
            matched by its order: a rank that broke off its backward has launched less than others.
        world: The ranks of all groups, and this one's place among them.
        calls: What is called to send and receive: torch.distributed, or what stands in for it,
            where a device is simulated.
        streams: Those of the parameters' device.
        ledger: Kind -> bytes that this rank has handed to the network since the ledger was made:
            "reduce_scatter", "all_gather", "all_reduce", "other", and "metadata", which says how
            many numbers travel, and which.
        hops: 2 if both halves go within hosts and between them; 1 if they do not tell hosts apart.
        wait_blocks_host: Whether a work's `wait` blocks the host until the data is here (gloo), so
            that reading flags costs no other wait. If not (NCCL), `wait` blocks a stream.
        matches_by_tag: Whether messages are matched by their numbers (gloo). If not, they are
            matched by their order, and all ranks must launch in one order over all groups.
        has_variable_lengths: Whether a message may be shorter than the memory that awaits it.
        was_discarded: Whether `discard` has been called.
        has_given_up: Whether a wait has failed, here or elsewhere: from then on nobody waits for
            what is late.
    """

    hops: ClassVar[int] = 1
    wait_blocks_host: ClassVar[bool]
    matches_by_tag: ClassVar[bool]
    has_variable_lengths: ClassVar[bool]

    reduce_group: Any
    gather_group: Any
    object_group: Any
    world: World = World()
    calls: Any = dist
    streams: Streams = field(default_factory=Streams)

    def __post_init__(self) -> None:
        self.ledger = Counter[str]()
        self.observer: WorkObserver | None = None
        # (lane, name) -> context, in which work is that a timeline shows.
        self.showing: Callable[[str, str], AbstractContextManager[None]] | None = None
        self.was_discarded = self.was_aborted = self.has_given_up = False
        alive.add(self)

    def _column(self, buffer: Tensor, rank: int | None = None) -> list[Tensor]:
        """The shards of all ranks with the place of `rank` on their hosts, by host; None: ours."""
        owners = self.world.with_place(self.world.rank if rank is None else rank)
        return [shard_of(buffer, owner, self.world.size) for owner in owners]

    @abstractmethod
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        """Sums `buffer` over ranks; after `wait`, `out` holds this rank's shard of the sum.

        Args:
            buffer: `world_size` shards of equal size, flat. Mutated: undefined after `wait`, but
                for its own shard where `out` is a view of that.
            received: Flat scratch of `scratch_numel(buffer.numel())` elements.
            out: One shard: `buffer`'s own shard itself, or elsewhere in fp32. gloo sums in rank
                order, and 16-bit values in fp32.
            tag: Of the message, equal on all ranks; see `Exchange.tag_of`.
        """

    @abstractmethod
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        """Fills `buffer` (flat, `world_size` shards) in place from every rank's own shard."""

    @abstractmethod
    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, tag: int) -> Work:
        """Sends row r to rank r; after `wait`, row s of `incoming` is what rank s has sent here.

        In the place of a reduce-scatter, for bytes that have to be decoded before they are summed.

        Args:
            rows: [world_size, n]; not to be mutated before `wait`.
            incoming: [world_size, n] of the same dtype; overwritten.
            tag: Of the message, equal on all ranks; see `Exchange.tag_of`.
        """

    @abstractmethod
    def launch_parts(self, outgoing: SplitTensor, incoming: SplitTensor, tag: int) -> Work:
        """Sends each rank its part; after `wait`, `incoming` holds what they have sent here.

        On the all-gather group.

        Args:
            outgoing: Not to be mutated before `wait`; nothing for this rank itself.
            incoming: Of the same dtype; overwritten.
            tag: See `launch_reduce_scatter`.
        """

    def expect_reduce_scatter(self, received: Tensor, tag: int) -> None:
        """Lets others' parts of the bucket arrive in `received` from now on. Idempotent.

        The next `launch_reduce_scatter` of the bucket must come, with the same `received`. A gloo
        sender that finds no receive posted waits for a message that says there is one, and that
        message queues behind whatever its host is sending. NCCL has nothing to do here.
        """

    def expect_all_gather(self, buffer: Tensor, tag: int) -> None:
        """Lets others' shards arrive in `buffer` from now on; as `expect_reduce_scatter`."""

    def launch_messages(
        self,
        lane: str,
        messages: Mapping[int, Tensor],
        sources: Collection[int],
        incoming: Tensor,
        tag: int,
        num_notes: int = 1,
    ) -> Work:
        """Sends `messages[r]` to rank r; after `wait`, row s of `incoming` begins with rank s's.

        Where lengths must not be told beforehand (gloo only). A message to this rank is not sent,
        and its own row is left alone.

        Args:
            lane: "reduce_scatter" or "all_gather", in the place of which it is.
            messages: Rank -> [n], n of at least 1 and at most the length of a row, the first
                element of which says how long it is; not to be mutated before `wait`.
            sources: Ranks that send something here.
            incoming: [world_size, most elements] of the same dtype; overwritten.
            tag: Of the message, equal on all ranks; see `Exchange.tag_of`.
            num_notes: How many elements each message begins with that are no payload.

        Raises:
            RuntimeError: On other backends.
        """
        raise RuntimeError("Messages of unknown length need gloo.")

    def expect_messages(self, lane: str, incoming: Tensor, tag: int) -> None:
        """Lets rows, or messages, of all others arrive from now on; as `expect_reduce_scatter`."""

    def launch_all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """Sums the flat `buffer`, in place on all ranks alike, in the reduce-scatter group."""
        if self.world.size == 1:
            return Work.done()
        waits = self.start("all_reduce", self.reduce_group, buffer)
        self.ledger["all_reduce"] += 2 * self.ring_bytes(buffer)
        # In this lane since it takes the reduce-scatters' place in backward.
        return self.new_work("reduce_scatter", f"bucket {tag}", waits)

    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, tag: int
    ) -> Begun:
        """Sums `buffer` within each host, and sends what `encode` makes of that between hosts.

        Of N hosts; where `hops` is 2. After the work's `wait`, row h of `incoming` is what host h
        has sent here.

        Args:
            buffer: As in `launch_reduce_scatter`.
            received: As there.
            encode: Called once: by a thread when the sums are there (gloo), or at once, for a
                stream beside the current one (NCCL). Given this host's sums for the ranks that have
                this one's place on their hosts, [N, elements of a shard] fp32, which it may mutate.
                Returns [N, n], a row for each.
            incoming: [N, n] of the same dtype; overwritten.
            tag: Of the message, equal on all ranks; see `Exchange.tag_of`.

        Returns:
            The work, and what blocks the host (gloo) or the current stream (NCCL) until all that
            was to be encoded by then is, and raises if `encode` cannot be called.
        """
        raise RuntimeError("There is one hop.")

    def expect_sums_of_host(self, received: Tensor, incoming: Tensor, tag: int) -> None:
        """Lets others' parts arrive from now on; as `expect_reduce_scatter`."""

    def launch_gather_of_host(self, buffer: Tensor, tag: int) -> Work:
        """Fills `buffer`, as long as `launch_sums_of_host`'s, with what ranks of this host sum.

        Each has, in place, the shards of its place's ranks. Where `hops` is 1, nothing is done.
        """
        return Work.done()

    @abstractmethod
    def launch_max(self, flags: Tensor) -> Work:
        """Combines uint8 `flags` over ranks by maximum, in place, on the reduce-scatter group."""

    @abstractmethod
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        """Overwrites `buffer` with rank 0's, in place, on the all-gather group."""

    @property
    def flags_device(self) -> torch.device:
        """Where flags lie while ranks combine them."""
        return torch.device("cpu")

    @property
    def favors_all_reduce(self) -> bool:
        """Whether an all-reduce sends less between hosts than both halves do."""
        return False

    def scratch_numel(self, numel: int) -> int:
        """Elements of scratch that a reduce-scatter of `numel` elements needs."""
        return 0

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order. Blocks."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        self.calls.all_gather_object(values, value, group=self.object_group)
        return values

    def abort(self) -> None:
        """After a failure elsewhere, by any thread: ends what a device waits for in vain.

        What is launched or waited for here from now on raises. May block a few seconds. Nothing to
        do on gloo, where nobody waits for a rank that has ended.
        """

    def check(self) -> None:
        """Raises `RuntimeError` after `abort`: what has arrived since is of no use."""
        if self.was_aborted:
            raise RuntimeError("another rank has failed, and the communicator was aborted")

    def discard(self) -> None:
        """After a failure: something may still be in flight, so nobody may use the groups again."""
        self.was_discarded = True
        reusable_groups.clear()

    @property
    def device_groups(self) -> list[Any]:
        """Process groups for what a device sends."""
        return [self.reduce_group, self.gather_group]

    def forget_groups(self) -> None:
        """Lets go of them: nothing can be sent any more."""
        self.reduce_group = self.gather_group = self.object_group = None

    def start(self, call: str, group: Any, *arguments: Any) -> Waits:
        """Launches the backend's own collective `call`, which does not say whom it waits for."""
        self.check()
        work = getattr(self.calls, call)(*arguments, group=group, async_op=True)
        return [(None, work, arguments)]

    def ring_bytes(self, buffer: Tensor) -> int:
        """What a rank sends to reduce-scatter, or to gather, the flat `buffer`."""
        return buffer.nbytes // self.world.size * (self.world.size - 1)

    def new_work(
        self, lane: str, name: str, waits: Waits, finish: Callable[[], object] | None = None
    ) -> Work:
        """A work that waits for all of `waits`, and is seen by the observer; see `Work`."""
        arrive = self.arriving(lane, name, waits)
        work = Work(self.observed(lane, name, arrive) if waits else arrive, finish)
        work.is_done = not waits and finish is None
        return work

    def observed(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """`arrive`, seen by the observer if there is one."""
        # Read once: a thread that gathers may be here when a recording ends.
        observe = self.observer
        return observe(lane, name, arrive) if observe else arrive

    def arriving(self, lane: str, name: str, waits: Waits) -> Callable[[], None]:
        """What waits for all of `waits`, seen by nobody.

        What fails in it names the peer. Afterwards nobody waits for anything else: who was silent
        for a whole timeout would be waited for again.
        """

        def arrive() -> None:
            for peer, work, *_ in waits:
                begin_s = time.monotonic()
                try:
                    self.check()
                    work.wait(*([_AT_ONCE] if self.has_given_up else []))
                except RuntimeError as error:
                    self.has_given_up = True
                    how = _blame(peer, time.monotonic() - begin_s, str(error))
                    raise RuntimeError(f"{name}, {lane.replace('_', '-')}: {how}") from error

        return arrive


def _blame(peer: int | None, late_s: float, said: str) -> str:
    """Who was silent, or has closed the connection, in words that `FailureBoard` reads as well."""
    who = f"rank {peer}" if peer is not None else "a rank that the backend does not name"
    if re.search("[Tt]imed out|[Tt]imeout", said):
        return f"nothing from {who} for {late_s:.0f} s: link or rank. ({said})"
    is_closed = re.search("closed|reset|[Bb]roken pipe", said)
    return (f"connection closed by {who}" if is_closed else f"with {who}") + f". ({said})"


def shard_of(buffer: Tensor, number: int, num_shards: int) -> Tensor:
    """View of the `number`-th of `num_shards` equal, contiguous parts of the flat `buffer`."""
    size = buffer.numel() // num_shards
    return buffer[number * size : (number + 1) * size]


def take_largest(rows: Sequence[Tensor], out: Tensor) -> None:
    """Makes each element of `out` the largest of its own and those of all rows."""
    for row in rows:
        torch.maximum(out, row, out=out)


def sum_in_source_order(rows: Sequence[Tensor], out: Tensor, size: int = 1) -> None:
    """Writes `rows[0] + rows[1] + ...` into `out` (one of the rows, or fp32), left to right.

    Left to right in rank order, so that the bits depend on the number of ranks alone, and on how
    many a host has. 16-bit rows are summed in fp32, and rounded once if `out` is as narrow. May
    overwrite any row.

    Args:
        rows: Of all ranks, or of all hosts.
        out: See above.
        size: How many ranks a host has: each host's rows are summed first, and rounded to their
            dtype; then the hosts' sums.
    """
    if size > 1:
        for begin in range(0, len(rows), size):
            sum_in_source_order(rows[begin : begin + size], rows[begin])
        rows = rows[::size]
    total = rows[0]
    if total.dtype in (torch.float16, torch.bfloat16):
        total = total.float()
        for row in rows[1:]:
            total.add_(row)
        out.copy_(total)
        return
    # Only the last sum goes to `out`, which may be a row that is still to be added.
    for number, row in enumerate(rows[1:], start=2):
        torch.add(total, row, out=out if number == len(rows) else total)
    if len(rows) == 1 and total.data_ptr() != out.data_ptr():
        out.copy_(total)
