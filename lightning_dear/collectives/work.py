"""A launched collective, the bytes it sends, and what the engine asks of whoever launches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Parts = tuple[Tensor, list[int]]
"""A flat tensor, and how many of its elements are for, or from, each rank, by rank."""

Encode = Callable[[Tensor], Tensor]
"""Makes of a host's sums, [hosts, elements] fp32, what is sent to each host, a row for each."""

NUMBERS_OF_ONE = 1 << 12
"""Of the buckets of one optimizer; what it exchanges besides begins at multiples of it."""

GRADIENT_NUMBERS = 1 << 22
STATE_NUMBERS = 1 << 23
SELECTION_NUMBERS = 3 << 22
"""Added to a bucket's number for exchanges that may be made while the bucket's own is under way, or
is expected after a step that was broken off: of whole gradients, of saved state, and of what owners
select."""

OTHER_NUMBERS = 1 << 24
"""Of exchanges of gradients that are in no bucket."""


@dataclass
class WireLedger:
    """Bytes that this rank handed to the network since the ledger was made.

    Attributes:
        metadata_bytes: Of what says how many numbers travel, and which.
    """

    reduce_scatter_bytes: int = 0
    all_gather_bytes: int = 0
    all_reduce_bytes: int = 0
    other_bytes: int = 0
    metadata_bytes: int = 0

    def add(self, lane: str, nbytes: int) -> None:
        """Adds to the bytes of "reduce_scatter" or "all_gather"."""
        if lane == "reduce_scatter":
            self.reduce_scatter_bytes += nbytes
        else:
            self.all_gather_bytes += nbytes

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds, in bytes."""
        decoupled_bytes = self.reduce_scatter_bytes + self.all_gather_bytes
        return decoupled_bytes + self.all_reduce_bytes + self.other_bytes + self.metadata_bytes


@contextmanager
def uncounted(collectives: Collectives) -> Iterator[None]:
    """What is sent meanwhile, to measure or to save something, belongs to no step."""
    ledger, collectives.ledger = collectives.ledger, WireLedger()
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
        ledger.metadata_bytes += collectives.ledger.total_bytes


def ranks_on_each_host(hosts: Sequence[int]) -> int:
    """How many ranks each of several hosts has, if all have as many, one after the other; else 1.

    Args:
        hosts: See `Collectives`.
    """
    size = len(hosts) // max(1, len(set(hosts)))
    is_grid = list(hosts) == [rank - rank % size for rank in range(len(hosts))] if size else False
    return size if is_grid and size < len(hosts) else 1


def ranks_on_a_host(hosts: Sequence[int]) -> int:
    """How many ranks there are on the host that has the fewest; 1 if there is only one host.

    Args:
        hosts: See `Collectives`.
    """
    counts = Counter(hosts).values()
    return min(counts) if len(counts) > 1 else 1


def is_uneven(collectives: Collectives) -> bool:
    """Whether gloo has several hosts of several ranks each, and two hops are not possible."""
    hosts = collectives.hosts
    has_several = ranks_on_a_host(hosts) > 1 and collectives.reads_flags_freely
    return has_several and ranks_on_each_host(hosts) == 1


class Streams:
    """The queues in which a device does its work. A CPU has none: all is done at once.

    Attributes:
        readers: Those on which parameters are stepped, or were read in a recorded forward.
    """

    def __init__(self) -> None:
        self.readers: set[Any] = set()

    @property
    def model(self) -> str:
        """Which model the device is; others may draw other numbers from the same seed."""
        return ""

    def current(self) -> Any:
        """The one on which the calling thread puts work; None where there are none."""
        return None

    def follow(self, others: Iterable[Any]) -> None:
        """Work put on the current one from now on waits for what is on `others`. Host: no wait."""

    def read_later(self, numbers: Tensor) -> Callable[[], list[int]]:
        """Takes what [n] `numbers` are now; what it returns blocks until that is known.

        The host does not wait before.
        """
        known: list[int] = numbers.tolist()
        return lambda: known

    def synchronize(self) -> None:
        """Blocks the host until all work is done."""

    def lead_readers(self) -> None:
        """Work put on `readers` from now on waits for what is on the current one. Host: no wait.

        So does what is put `beside`.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """Work put on the current one in it goes to another, which waits for what it is told to.

        What is made in it is to be read elsewhere between `follow_beside` and `lead_readers` alone.
        """
        return nullcontext()

    def follow_beside(self) -> None:
        """Work put on the current one from now on waits for what was put `beside`."""


class Signal:
    """A number that all ranks hear once a step, with the flags of used parameters.

    Attributes:
        ask: What this rank says at present, from 0 to 255.
        heard: The largest that any said in the last exchange, or, where the host would have to wait
            for that, in the one before; None if there was none since it was set to None.
        on_heard: Called with it, unless that is 0.
    """

    def __init__(self) -> None:
        # `int()` is 0: this rank says nothing.
        self.ask: Callable[[], int] = int
        self.heard: int | None = None
        self.on_heard: Callable[[int], object] = int

    def hear(self, number: int) -> None:
        """Notes what was heard."""
        self.heard = number
        if number:
            self.on_heard(number)


class Work:
    """A launched collective. `wait` may be called any number of times; it acts once.

    Args:
        arrive: Blocks the host (gloo) or the current stream (NCCL) until the data is here. Holds
            all memory that is sent or received: torch's works let go of it as soon as any stream
            waits, such as one that records a timeline.
        finish: Local work on the arrived data, run by whoever waits first.

    Attributes:
        arrive: See above; assign to it to wait in another way.
        is_done: Whether `wait` has nothing left to do: no data is awaited, no local work is left.
    """

    def __init__(
        self, arrive: Callable[[], None], finish: Callable[[], object] | None = None
    ) -> None:
        self.arrive = arrive
        self._finish = finish
        self.is_done = False

    @classmethod
    def done(cls) -> Work:
        """One with nothing to wait for."""
        work = cls(_nothing)
        work.is_done = True
        return work

    def wait(self) -> None:
        """Blocks until the result may be read; raises what the backend raises."""
        if self.is_done:
            return
        self.arrive()
        if self._finish is not None:
            self._finish()
        self.is_done = True
        # Lets go of what they hold.
        self.arrive, self._finish = _nothing, None


def _nothing() -> None:
    return None


Begun = tuple[Work, Callable[[], object]]
"""A work, and what blocks until its second part has begun."""

WorkObserver = Callable[[str, str, Callable[[], None]], Callable[[], None]]
"""(lane, name, arrive) -> arrive: lets a timeline see when a collective's data arrived."""


class Collectives(Protocol):
    """What the engine needs from a backend; `rank` and `world_size` are those of the groups."""

    rank: int
    world_size: int
    ledger: WireLedger
    observer: WorkObserver | None
    signal: Signal
    streams: Streams
    """Those of the parameters' device."""
    hosts: Sequence[int]
    """Number of each rank's host, which is that of its first rank; of nobody: not known."""
    was_discarded: bool
    """Whether `discard` has been called."""
    has_given_up: bool
    """Whether a wait has failed, here or elsewhere: from then on nobody waits for what is late."""
    hops: int = 1
    """2: both halves go within hosts, and between them; 1: they do not tell hosts apart."""
    reads_flags_freely: bool
    """Whether reading flags on the host costs no wait beyond those there are in any case."""

    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, bucket: int
    ) -> Work:
        """Sums `buffer` over ranks; after `wait`, `out` holds this rank's shard of the sum.

        Args:
            buffer: `world_size` shards of equal size, flat. Mutated: undefined after `wait`, but
                for its own shard where `out` is a view of that.
            received: Flat scratch of `scratch_numel(buffer.numel())` elements.
            out: One shard: `buffer`'s own shard itself, or elsewhere in fp32. gloo sums in rank
                order, and 16-bit values in fp32.
            bucket: Number of the bucket, equal on all ranks.
        """

    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        """Fills `buffer` (flat, `world_size` shards) in place from every rank's own shard."""

    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, bucket: int) -> Work:
        """Sends row r to rank r; after `wait`, row s of `incoming` is what rank s has sent here.

        In the place of a reduce-scatter, for bytes that have to be decoded before they are summed.

        Args:
            rows: [world_size, n]; not to be mutated before `wait`.
            incoming: [world_size, n] of the same dtype; overwritten.
            bucket: Number of the bucket, equal on all ranks.
        """

    def launch_parts(self, outgoing: Parts, incoming: Parts, number: int) -> Work:
        """Sends each rank its part; after `wait`, `incoming` holds what they have sent here.

        On the all-gather group.

        Args:
            outgoing: Not to be mutated before `wait`; nothing for this rank itself.
            incoming: Of the same dtype; overwritten.
            number: As a bucket's, equal on all ranks.
        """

    def expect_reduce_scatter(self, received: Tensor, bucket: int) -> None:
        """Lets others' parts of the bucket arrive in `received` from now on. Idempotent.

        The next `launch_reduce_scatter` of the bucket must come, with the same `received`. A gloo
        sender that finds no receive posted waits for a message that says there is one, and that
        message queues behind whatever its host is sending. NCCL has nothing to do here.
        """
        return

    def expect_all_gather(self, buffer: Tensor, bucket: int) -> None:
        """Lets others' shards arrive in `buffer` from now on; as `expect_reduce_scatter`."""
        return

    def launch_messages(
        self,
        lane: str,
        messages: Mapping[int, Tensor],
        sources: Collection[int],
        incoming: Tensor,
        bucket: int,
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
            bucket: Number of the bucket, equal on all ranks.
            num_notes: How many elements each message begins with that are no payload.

        Raises:
            RuntimeError: On other backends.
        """
        raise RuntimeError("Messages of unknown length need gloo.")

    def expect_messages(self, lane: str, incoming: Tensor, bucket: int) -> None:
        """Lets rows, or messages, of all others arrive from now on; as `expect_reduce_scatter`."""
        return

    def launch_all_reduce(self, buffer: Tensor, bucket: int) -> Work:
        """Sums the flat `buffer` over ranks, in place and on every rank, as the backend does it.

        In the same order on every rank, on the reduce-scatter group.
        """

    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, bucket: int
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
            bucket: Number of the bucket, equal on all ranks.

        Returns:
            The work, and what blocks the host (gloo) or the current stream (NCCL) until all that
            was to be encoded by then is, and raises if `encode` cannot be called.
        """
        raise RuntimeError("There is one hop.")

    def expect_sums_of_host(self, received: Tensor, incoming: Tensor, bucket: int) -> None:
        """Lets others' parts arrive from now on; as `expect_reduce_scatter`."""
        return

    def launch_gather_of_host(self, buffer: Tensor, bucket: int) -> Work:
        """Fills `buffer`, as long as `launch_sums_of_host`'s, with what ranks of this host sum.

        Each has, in place, the shards of all ranks that have its place on their hosts. Where `hops`
        is 1, nothing is done.
        """
        return Work.done()

    def launch_any(self, flags: Tensor) -> Work:
        """Combines uint8 `flags` over ranks by maximum, in place, on the reduce-scatter group."""

    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        """Overwrites `buffer` with rank 0's, in place, on the all-gather group."""

    def scratch_numel(self, numel: int) -> int:
        """Elements of scratch that a reduce-scatter of `numel` elements needs."""
        return 0

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order. Blocks."""

    def abort(self) -> None:
        """After a failure elsewhere, by any thread: ends what a device waits for in vain.

        What is launched or waited for here from now on raises. May block a few seconds. Nothing to
        do on gloo, where nobody waits for a rank that has ended.
        """
        return

    def check(self) -> None:
        """Raises `RuntimeError` after `abort`: what has arrived since is of no use."""
        return

    def discard(self) -> None:
        """After a failure: something may still be in flight, so nobody may use the groups again."""


def shard_of(buffer: Tensor, number: int, num_shards: int) -> Tensor:
    """View of the `number`-th of `num_shards` equal, contiguous parts of the flat `buffer`."""
    size = buffer.numel() // num_shards
    return buffer[number * size : (number + 1) * size]


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
