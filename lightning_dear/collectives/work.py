"""Class `Work`, a launched collective, and class `Collectives`, which launches collectives."""

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from lightning_dear.collectives import launch_log, shards
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.world import World

T = TypeVar("T")

SplitTensor = tuple[Tensor, list[int]]
"""A flat tensor, and how many of its elements go to, or come from, each rank, in rank order."""

Encode = Callable[[Tensor], Tensor]
"""Encodes a host's sums, [hosts, elements] fp32. Returns bytes, a row for each host."""

GRADIENT_TAGS, STATE_TAGS, SELECTION_TAGS = 1 << 22, 1 << 23, 3 << 22
"""Added to a bucket's tag for other messages that may travel at the same time as the bucket's own,
or while those of a step that broke off are still expected. They carry whole gradients, saved state,
and what owners select (Ok-Topk)."""


@contextmanager
def uncounted(collectives: "Collectives") -> Iterator[None]:
    """Within this context the ledger counts no bytes: measuring and saving belong to no step."""
    ledger, collectives.ledger = collectives.ledger, Counter()
    try:
        yield
    finally:
        collectives.ledger = ledger


@contextmanager
def as_metadata(collectives: "Collectives") -> Iterator[None]:
    """Within this context bytes count as "metadata": they say how many values travel, and which."""
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
        is_done: Whether the data has arrived and `finish` has run, so that `wait` returns at once.
    """

    def __init__(
        self, arrive: Callable[[], None], finish: Callable[[], object] | None = None
    ) -> None:
        self._arrive = arrive
        self._finishes = [] if finish is None else [finish]
        self._arrival: Future[None] | None = None
        self.is_done = False

    @classmethod
    def done(cls) -> "Work":
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
            # Running half-finished local work once more would add some of its data twice.
            self._arrive = partial(_raise, error)
            raise
        self.is_done = True
        # Drops the references to the memory that was sent and received.
        self._arrive, self._finishes = _nothing, []

    def then(self, finish: Callable[[], object] | None = None) -> "Work":
        """Appends local work, which `wait` runs last; None is no work. Returns this, not done."""
        self._finishes += [] if finish is None else [finish]
        self.is_done = False
        return self

    def inside(self, call: Callable[[Callable[[], None]], None]) -> "Work":
        """Lets `wait` call `call(arrive)` instead of `arrive()`, and returns this work."""
        self._arrive = partial(call, self._arrive)
        return self

    def await_in(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Lets another thread wait for the data; from now on `wait` waits for that thread.

        Args:
            submit: Queues a call for the thread, as `Background.submit` does.
        """
        self._arrival = submit(self._arrive)
        self._arrive = self._arrival.result

    @property
    def is_on_host(self) -> bool:
        """Whether the data is known to be here, so that `wait` does not block the host."""
        return self.is_done or (self._arrival is not None and self._arrival.done())


def _nothing() -> None:
    return None


def _raise(error: BaseException) -> NoReturn:
    raise error


Begun = tuple[Work, Callable[[], object]]
"""A work of two hops, and a function that blocks until the second hop has been launched."""

WorkObserver = Callable[[str, str, Callable[[], None]], Callable[[], None]]
"""(lane, name, arrive) -> wrapped arrive: lets a timeline note when a collective's data arrived."""


alive: "WeakSet[Collectives]" = WeakSet()
"""All collectives that may hold groups. Weak, so that trainings that are over can be deleted."""

reusable_groups: dict[timedelta | None, tuple[Any, list[Any]]] = {}
"""Timeout -> (weak reference to the default group, groups made under it). The next fit with this
timeout reuses them and their sockets, if all ranks still have that default group."""

LEAVE_S = 2.0
"""Seconds that a rank that has failed waits for its device before it aborts its collectives."""

under_way: list[Any] = []
"""Memory of messages that may arrive after all waits, kept until `forget_process_groups`."""

Waits = Sequence[tuple[Any, ...]]
"""Tuples (peer, or None if only torch knows it; torch's work; references to hold until the wait)"""

_AT_ONCE = timedelta(milliseconds=1)


@dataclass(eq=False)
class Collectives(ABC):
    """Launches collectives on process groups of the engine's own, and counts the bytes they send.

    Every method `launch_...` does not block and returns a work. All but `launch_messages` are
    collective.

    Attributes:
        reduce_group: Process group of the reduce-scatters.
        gather_group: Process group of the all-gathers.
        object_group: Process group of Python objects, on gloo. Other messages in it need tags: a
            rank whose backward broke off has launched fewer of them than other ranks.
        world: All ranks, and the number of this rank.
        calls: `torch.distributed`, or a stand-in for it where a device is simulated.
        streams: Streams of the parameters' device.
        ledger: Kind -> bytes that this rank has sent so far: "reduce_scatter", "all_gather",
            "all_reduce", "other" and "metadata" (see `as_metadata`).
        hops: 2 if each half has one hop within hosts and one between them; else 1.
        wait_blocks_host: Whether a work's `wait` blocks the host (gloo), which may then read flags
            without another wait. On a device `wait` blocks the current stream, also on NCCL.
        matches_by_tag: Whether messages are matched by tag (gloo). If not, they are matched by
            order, and all ranks must launch in one order over all groups.
        has_variable_lengths: Whether a message may be shorter than the memory that receives it.
        in_rings: Numbers of optimizers that send to one rank at a time (gloo); see `RingTrial`.
        log: What this rank has launched, to be compared between ranks.
        sums_in_fp32: Whether NCCL's reduce-scatters, too, sum 16-bit elements in fp32; to be
            assigned to before the first plan.
        was_discarded: Whether `discard` has been called, after a failure.
        has_given_up: Whether a wait or a rank has failed. Then a wait lasts at most 1 ms.
        observer: Wraps each work's `arrive`, to record when data arrives. None means no timeline.
        showing: (lane, name) -> context around local work, for a timeline. None means no timeline.
    """

    wait_blocks_host: ClassVar[bool]
    matches_by_tag: ClassVar[bool]
    has_variable_lengths: ClassVar[bool]

    reduce_group: Any
    gather_group: Any
    object_group: Any
    world: World = World()
    calls: Any = dist
    streams: Streams = field(default_factory=Streams)
    hops: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.ledger = Counter[str]()
        self.in_rings = set[int]()
        self.log = launch_log.LaunchLog(matches_by_tag=self.matches_by_tag)
        self.observer: WorkObserver | None = None
        self.showing: Callable[[str, str], AbstractContextManager[None]] | None = None
        self.was_discarded = self.was_aborted = self.has_given_up = self.sums_in_fp32 = False
        alive.add(self)

    def _column(self, buffer: Tensor, rank: int | None = None) -> list[Tensor]:
        """Returns, by host, the shards of the ranks with `rank`'s place. None means this rank."""
        owners = self.world.with_place(self.world.rank if rank is None else rank)
        return [shards.shard_of(buffer, owner, self.world.size) for owner in owners]

    @abstractmethod
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        """Sums `buffer` over ranks; after `wait`, `out` holds this rank's shard of the sum.

        Args:
            buffer: Flat, `world_size` shards of equal size. Mutated: undefined after `wait`, except
                this rank's shard if `out` is a view of it.
            received: Flat scratch of `scratch_numel(buffer.numel())` elements; overwritten.
            out: One shard: `buffer`'s own shard itself, or an fp32 tensor elsewhere. gloo sums in
                rank order, and 16-bit values in fp32.
            tag: Tag of the message, equal on all ranks; see `Exchange.tag_of`.
        """

    @abstractmethod
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        """Fills `buffer` (flat, `world_size` shards), in place: shard r with that of rank r."""

    @abstractmethod
    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, tag: int) -> Work:
        """Sends row r to rank r; after `wait`, row s of `incoming` is what rank s has sent here.

        In place of a reduce-scatter for bytes that must be decoded before they are summed.

        Args:
            rows: [world_size, n]; must not be mutated before `wait`.
            incoming: Like `rows`; overwritten.
            tag: Tag of the message, equal on all ranks.
        """

    @abstractmethod
    def launch_parts(self, outgoing: SplitTensor, incoming: SplitTensor, tag: int) -> Work:
        """Sends parts of any length to ranks, on the gather group, as an all-to-all.

        After `wait`, part s of `incoming` is what rank s has sent here.

        Args:
            outgoing: Elements to send, none to this rank. Must not be mutated before `wait`.
            incoming: Buffer of the same dtype; overwritten.
            tag: Tag of the message, equal on all ranks.
        """

    def expect_reduce_scatter(self, received: Tensor, tag: int) -> None:
        """Posts the receives of the bucket's next reduce-scatter, into `received`. Idempotent.

        `launch_reduce_scatter` must follow with the same `received`. On gloo a sender waits until
        it hears that the receive is posted, and that message queues behind what the receiver's host
        is sending. On NCCL this does nothing.
        """

    def expect_all_gather(self, buffer: Tensor, tag: int) -> None:
        """Posts the receives of an all-gather into `buffer`; see `expect_reduce_scatter`."""

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

        For messages whose lengths receivers do not know beforehand; only gloo can send them. A
        message to this rank itself is not sent, and its row is not written. Only the senders and
        receivers of messages with this tag need to call.

        Args:
            lane: "reduce_scatter" or "all_gather": the half that the messages belong to.
            messages: Rank -> [n], n from 1 to the length of a row. The first element is the length.
                Must not be mutated before `wait`.
            sources: Ranks that send a message to this rank.
            incoming: [world_size, most elements] of the same dtype; overwritten.
            tag: Tag of the message, equal on all ranks.
            num_notes: Leading elements of each message that the ledger counts as metadata.
        """
        raise RuntimeError("Messages on devices have fixed lengths. Use OkTopk(mode='static').")

    def expect_messages(self, lane: str, incoming: Tensor, tag: int) -> None:
        """Posts receives of all other ranks' rows, or messages; see `expect_reduce_scatter`."""

    def launch_all_reduce(self, buffer: Tensor, tag: int) -> Work:
        """Sums the flat `buffer` over ranks, in place, with equal bits, on the reduce group."""
        if self.world.size == 1:
            return Work.done()
        waits = self.start("all_reduce", self.reduce_group, buffer, tag=tag)
        self.ledger["all_reduce"] += 2 * self.ring_bytes(buffer)
        # The lane of the reduce-scatter, whose place in backward the all-reduce takes.
        return self.new_work("reduce_scatter", f"bucket {tag}", waits)

    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, tag: int
    ) -> Begun:
        """Sums `buffer` within each host, and sends what `encode` makes of that between N hosts.

        Only if `hops` is 2. After `wait`, row h of `incoming` is what host h has sent here.

        Args:
            buffer: Same as in `launch_reduce_scatter`.
            received: Same as in `launch_reduce_scatter`.
            encode: Called once: by a thread when the sums are there (gloo), or at once, with the
                second stream as the current one (NCCL). Gets this host's sums for the ranks that
                have this rank's place on their hosts, [N, elements of a shard] fp32, which it may
                mutate. Returns [N, n], a row for each host.
            incoming: [N, n] of the same dtype; overwritten.
            tag: Tag of the message, equal on all ranks.

        Returns:
            The work, and a function that blocks the host (gloo) or the current stream (NCCL) until
            `encode` has run. It raises what the first hop or `encode` raised.
        """
        raise RuntimeError("Sums of a host need two hops. Set hops=2 on the strategy.")

    def expect_sums_of_host(self, received: Tensor, incoming: Tensor, tag: int) -> None:
        """Posts the receives of both hops; see `expect_reduce_scatter`."""

    def launch_gather_of_host(self, buffer: Tensor, tag: int) -> Work:
        """Gathers within each host the shards that `launch_sums_of_host` sums, into `buffer`.

        Each rank brings the shards of all ranks with its place. Does nothing if `hops` is 1.
        """
        return Work.done()

    @abstractmethod
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        """Combines uint8 `flags` over ranks by maximum, in place, on the reduce-scatter group.

        Args:
            flags: [n] uint8; overwritten.
            tag: Smallest tag of the round's buckets. -1 means that the flags are of no round.
        """

    def expect_max(self, num_flags: int, tag: int) -> None:
        """Posts the receives of the next `num_flags` flags; see `expect_reduce_scatter`."""

    @abstractmethod
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        """Overwrites `buffer` with rank 0's, on the gather group. `index` makes the tag unique."""

    @property
    def flags_device(self) -> torch.device:
        """Device on which flags lie while ranks combine them."""
        return torch.device("cpu")

    @property
    def can_use_rings(self) -> bool:
        """Whether `in_rings` may hold optimizers: gloo, and three or more hosts of one rank."""
        return False

    @property
    def favors_all_reduce(self) -> bool:
        """Whether an all-reduce sends fewer bytes between hosts than both halves together."""
        return False

    def check_memory(self, parameters: Iterable[Tensor]) -> None:
        """Warns, before training, if the messages of `parameters` need too much host memory."""

    def begin_plan(self, first_tag: int) -> None:
        """Drops host memory of the optimizer's earlier plan. `first_tag` is that of bucket 0."""

    def scratch_numel(self, numel: int) -> int:
        """Returns how many elements of scratch a reduce-scatter of `numel` needs; it may be 0."""
        return 0

    def all_gather_object(self, value: T) -> list[T]:
        """Returns every rank's picklable `value`, in rank order. Collective, blocks."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        self.calls.all_gather_object(values, value, group=self.object_group)
        return values

    def abort(self) -> None:
        """After a failure: ends what this rank's device waits for in vain. May block some seconds.

        Any thread may call. From now on each launch and each wait raises. Does nothing on gloo,
        where a wait for a rank that has ended fails by itself.
        """

    def abort_if_stuck(self) -> None:
        """After a failure of this rank: aborts, unless the device ends all its work in `LEAVE_S`.

        A device that ends may still send what other ranks need. One that waits for messages that
        other ranks never launch would wait until the timeout.
        """
        waiter = threading.Thread(target=self.streams.synchronize, daemon=True)
        waiter.start()
        waiter.join(LEAVE_S)
        if waiter.is_alive():
            self.abort()

    def check(self) -> None:
        """Raises `RuntimeError` after `abort`: data that has arrived since may be incomplete."""
        if self.was_aborted:
            raise RuntimeError("A rank failed. Read its error: the communicator was aborted.")

    def discard(self, *, has_failed: bool = True) -> None:
        """Keeps later fits from reusing groups with messages in flight, as after a failure."""
        self.was_discarded |= has_failed
        under_way.append(self)
        reusable_groups.clear()

    def end_training(self) -> None:
        """Called where a training ends; see `PairwiseCollectives`. Does nothing on NCCL."""

    @property
    def device_groups(self) -> list[Any]:
        """Process groups whose messages the device sends, if the backend is NCCL."""
        return [self.reduce_group, self.gather_group]

    def forget_groups(self) -> None:
        """Drops the references to the groups. Afterwards nothing can be sent."""
        self.reduce_group = self.gather_group = self.object_group = None

    def start(self, call: str, group: Any, *arguments: Any, tag: int = 0) -> Waits:
        """Launches the function `call` of `calls`, which matches by order and names no peers."""
        self.check()
        # With lengths of parts, or with rows for some ranks only, the length may differ by rank.
        has_one_length = len(arguments) <= 2 and isinstance(arguments[0], Tensor)
        like = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        elements = like.numel() if has_one_length else None
        number = self.device_groups.index(group)
        self.log.add(launch_log.Logged(call, number, like.dtype, elements, tag, has_tag=False))
        work = getattr(self.calls, call)(*arguments, group=group, async_op=True)
        return [(None, work, arguments)]

    def ring_bytes(self, buffer: Tensor) -> int:
        """Returns the bytes that a rank sends to reduce-scatter or gather `buffer` in one hop."""
        return buffer.nbytes // self.world.size * (self.world.size - 1)

    def new_work(
        self, lane: str, name: str, waits: Waits, finish: Callable[[], object] | None = None
    ) -> Work:
        """Returns a work that waits for all of `waits` and that the observer sees; see `Work`."""
        arrive = self.arriving(lane, name, waits)
        work = Work(self.observed(lane, name, arrive) if waits else arrive, finish)
        work.is_done = not waits and finish is None
        return work

    def observed(self, lane: str, name: str, arrive: Callable[[], None]) -> Callable[[], None]:
        """Returns `arrive`, wrapped by the observer if there is one, to be called in its place."""
        # Read once, as another thread may end the recording meanwhile.
        observe = self.observer
        return observe(lane, name, arrive) if observe else arrive

    def arriving(self, lane: str, name: str, waits: Waits) -> Callable[[], None]:
        """Returns a function that waits for all of `waits`. The observer does not see it.

        Its error names the peer. After a failure each further wait gives up at once, instead of
        lasting a whole timeout.
        """

        def arrive() -> None:
            for peer, work, *_ in waits:
                begin_s = time.monotonic()
                try:
                    self.check()
                    work.wait(*([_AT_ONCE] if self.has_given_up else []))
                except RuntimeError as error:
                    self.has_given_up = True
                    how = blamed(peer, time.monotonic() - begin_s, str(error))
                    raise RuntimeError(f"{name}, {lane.replace('_', '-')}: {how}") from error

        return arrive


def blamed(peer: int | None, late_s: float, said: str) -> str:
    """Describes a failed message, with the rank if it is known. `FailureBoard` parses the text."""
    who = f"rank {peer}" if peer is not None else "a rank that the backend does not name"
    if re.search("[Tt]imed out|[Tt]imeout", said):
        return f"nothing from {who} for {late_s:.0f} s: link or rank. Check both. ({said})"
    is_closed = re.search("closed|reset|[Bb]roken pipe", said)
    what = "connection closed by" if is_closed else "an error between this rank and"
    return f"{what} {who}: see its output. ({said})"
