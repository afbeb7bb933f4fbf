"""Collectives in two hops, for hosts with several ranks: one hop within hosts, one between them.

There are N hosts with L ranks each; rank h L + l has place l on host h. With n bytes:

    reduce-scatter    first, on each host, rank l sums all shards that go to ranks with place l;
                      then the ranks with place l of all hosts exchange these sums
    all-gather        first, the ranks with place l of all hosts exchange their shards;
                      then each rank passes on what it has received to the ranks of its host

In each half (N-1)/N n bytes leave a host. If each shard went straight to its owner, L times as many
would. Shards belong to the same ranks as in one hop. On gloo sums have the same bits as in one hop,
too: a host's ranks are added up in order, then the hosts in order. NCCL adds up a host's ranks in
an order of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.gloo import PairwiseCollectives, RankRows, by_source, nbytes_of
from lightning_dear.collectives.launch_log import TAGS_OF_ONE_OPTIMIZER
from lightning_dear.collectives.nccl import ALL_GATHER, REDUCE_SCATTER, NativeCollectives
from lightning_dear.collectives.shards import shard_of, sum_in_source_order
from lightning_dear.collectives.work import Begun, Encode, Waits, Work

_SECOND_HOP = 1 << 28
"""Added to a bucket's tag for the messages of its second hop. It is above the tags of all buckets,
and below those of flags and module buffers."""


class TwoHopCollectives(PairwiseCollectives):
    """`PairwiseCollectives` whose reduce-scatters and all-gathers go in two hops.

    A launch sends the first hop. A thread waits for that and sends the second hop. Each half of
    each optimizer has a thread of its own, which handles buckets in the order in which all ranks
    launch them. With a shared thread ranks could wait for each other without end: a first hop would
    be waited for in front of a second hop, which another rank needs before it launches that first
    hop.

    All other messages go straight to the ranks that they are for.

    The ranks must form a grid: `world.hosts` are several, each with the same number of ranks, two
    or more, numbered consecutively.
    """

    hops = 2

    def _within(self, way: int) -> list[int]:
        """Returns the other ranks of this host, in the order of sends (way 1) or receives (-1).

        `way` is 1 or -1.
        """
        # Each rank begins with a different peer, and receives in the order in which others send.
        size, first = self.world.ranks_a_host, self.world.rank - self.world.place_on_host
        return [first + (self.world.rank + way * hop) % size for hop in range(1, size)]

    def _across(self, way: int) -> list[int]:
        """Returns the ranks of other hosts with this rank's place, in the order of `_within`."""
        hops = range(self.world.ranks_a_host, self.world.size, self.world.ranks_a_host)
        return [(self.world.rank + way * hop) % self.world.size for hop in hops]

    def _columns(self, buffer: Tensor, ranks: Iterable[int]) -> RankRows:
        """Pairs each rank r of `ranks` with every shard of the ranks with r's place on a host."""
        return [(rank, shard) for rank in ranks for shard in self._column(buffer, rank)]

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        own, (_, across) = self._column(buffer), self._received(received)
        receives = self._receives("reduce_scatter", received, across, tag + _SECOND_HOP)
        self.ledger["reduce_scatter"] += own[0].nbytes * len(self._across(1))
        work, _ = self._reduce(buffer, received, own, lambda: own, receives, tag)
        of_hosts = by_source((*across, (self.world.rank, own[self.world.host])))
        return work.then(partial(sum_in_source_order, of_hosts, out))

    @override
    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, tag: int
    ) -> Begun:
        own, across = self.world.host, self._incoming(incoming)
        sums = buffer.view(self.world.size, -1)[: len(incoming)]
        if sums.dtype != torch.float32:
            sums = torch.empty_like(sums, dtype=torch.float32)

        def encode_and_keep_own() -> Tensor:
            rows = encode(sums)
            incoming[own].copy_(rows[own])
            return rows

        receives = self._receives("reduce_scatter", incoming, across, tag + _SECOND_HOP)
        self.ledger["reduce_scatter"] += incoming[own].nbytes * len(across)
        return self._reduce(buffer, received, list(sums), encode_and_keep_own, receives, tag)

    def _reduce(
        self,
        buffer: Tensor,
        received: Tensor,
        sums: Sequence[Tensor],
        encode: Callable[[], Sequence[Tensor] | Tensor],
        receives: Waits,
        tag: int,
    ) -> Begun:
        """Sums within the host into `sums`, then sends each host its row of what `encode` returns.

        Args:
            buffer: Gradients to sum, [world_size shards], flat.
            received: Scratch for the gradients of this host's other ranks.
            sums: A tensor for each host, into which a thread writes this host's sum of the shard
                of the rank on that host that has this rank's place.
            encode: Called by that thread afterwards. Returns a row for each host, to be sent.
            receives: Waits of the posted receives of the second hop.
            tag: Tag of the first hop's messages.

        Returns:
            The work, and a function that blocks until the rows have been encoded and their sends
            launched. It raises what that has raised.
        """
        lane, within = "reduce_scatter", self._received(received)[0]
        outgoing = self._columns(buffer, self._within(1))
        first = self._exchange(lane, received, within, outgoing, tag)
        own = self._column(buffer)

        def pass_on() -> RankRows:
            for host, shard in enumerate(own):
                addends = by_source((*within[host :: len(own)], (self.world.rank, shard)))
                sum_in_source_order(addends, sums[host])
            rows = encode()
            return [(peer, rows[peer // self.world.ranks_a_host]) for peer in self._across(1)]

        self.ledger["reduce_scatter"] += nbytes_of(outgoing)
        return self._two_hops(lane, tag, first, pass_on, receives)

    @override
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        lane, across, within = "all_gather", *self._gathered(buffer)
        own = shard_of(buffer, self.world.rank, self.world.size)
        outgoing = [(peer, own) for peer in self._across(1)]
        passed_on = [(peer, row) for peer in self._within(1) for row in self._column(buffer)]
        first = self._exchange(lane, buffer, across, outgoing, tag)
        self.ledger["all_gather"] += nbytes_of(outgoing) + nbytes_of(passed_on)
        receives = self._receives(lane, buffer, within, tag + _SECOND_HOP)
        return self._two_hops(lane, tag, first, lambda: passed_on, receives)[0]

    @override
    def launch_gather_of_host(self, buffer: Tensor, tag: int) -> Work:
        lane, own = "all_gather", self._column(buffer)
        outgoing = [(peer, row) for peer in self._within(1) for row in own]
        rows = self._columns(buffer, self._within(-1))
        self.ledger["all_gather"] += nbytes_of(outgoing)
        waits = self._exchange(lane, buffer, rows, outgoing, tag)
        return self.new_work(lane, f"bucket {tag} within the host", waits)

    @override
    def expect_reduce_scatter(self, received: Tensor, tag: int) -> None:
        within, across = self._received(received)
        self._expect("reduce_scatter", received, within, tag)
        self._expect("reduce_scatter", received, across, tag + _SECOND_HOP)

    @override
    def expect_sums_of_host(self, received: Tensor, incoming: Tensor, tag: int) -> None:
        self._expect("reduce_scatter", received, self._received(received)[0], tag)
        self._expect("reduce_scatter", incoming, self._incoming(incoming), tag + _SECOND_HOP)

    @override
    def expect_all_gather(self, buffer: Tensor, tag: int) -> None:
        across, within = self._gathered(buffer)
        self._expect("all_gather", buffer, across, tag)
        self._expect("all_gather", buffer, within, tag + _SECOND_HOP)

    def _received(self, received: Tensor) -> tuple[RankRows, RankRows]:
        """Cuts `received` into rows: N shards for each rank of this host, one per other host."""
        sources = [source for source in self._within(-1) for _ in self._column(received, 0)]
        rows = self._reduce_rows(received, [*sources, *self._across(-1)])
        return rows[: len(sources)], rows[len(sources) :]

    def _incoming(self, incoming: Tensor) -> RankRows:
        """Pairs the ranks of other hosts with this rank's place with their hosts' rows."""
        size = self.world.ranks_a_host
        return [(source, incoming[source // size]) for source in self._across(-1)]

    def _gathered(self, buffer: Tensor) -> tuple[RankRows, RankRows]:
        """Cuts `buffer` into rows: one shard per other host, N for each rank of this host."""
        shards = buffer.tensor_split(self.world.size)
        across = [(source, shards[source]) for source in self._across(-1)]
        return across, self._columns(buffer, self._within(-1))

    def _two_hops(
        self, lane: str, tag: int, first: Waits, pass_on: Callable[[], RankRows], receives: Waits
    ) -> Begun:
        """Has a thread start the second hop when the first has arrived. Does not block.

        Args:
            lane: Half of the exchange, "reduce_scatter" or "all_gather".
            tag: Tag of the first hop's messages.
            first: Waits of the first hop, which has been launched.
            pass_on: Called by the thread when the first hop has arrived. Returns the rows to send
                in the second hop.
            receives: Waits of the second hop's receives, which are posted.

        Returns:
            A work whose `wait` blocks until the second hop has arrived, and a function that blocks
            until the second hop has been launched.
        """
        hops = "within the host", "between hosts"
        hops = hops if lane == "reduce_scatter" else hops[::-1]
        names = [f"bucket {tag} {hop}" for hop in hops]
        # Says so because, if the wait fails, the rank that its error names need not be the one that
        # failed.
        last = f"{names[1]}, where the named rank may wait for a rank of its host"

        def second() -> Waits:
            return [*receives, *self._sends(lane, pass_on(), tag + _SECOND_HOP)]

        sent = self._pass_on(lane, [names[0], last], first, [second], tag // TAGS_OF_ONE_OPTIMIZER)
        if self.observer is not None:
            # The wait that the observer returns is not used: the observer has one thread for first
            # hops of both halves, so that it would also wait for those of the other half.
            self.observer("first_hop", names[0], partial(_until_done, sent))
        return Work(self.observed(lane, f"bucket {tag}", lambda: sent.result()())), sent.result


def _until_done(sent: Future[Any]) -> None:
    """Blocks until `sent` is done. Does not raise what it has raised."""
    sent.exception()


NUM_SUBGROUPS = 4
"""Number of process groups that two hops on NCCL need beside those of one hop."""


class NativeTwoHopCollectives(NativeCollectives):
    """`NativeCollectives` whose reduce-scatters and all-gathers go in two hops.

    A launch hands both hops, and the encoding between them, to the device. The host launches the
    second hop at once, on a second stream (see `Streams.beside`), which waits for the first hop. So
    neither the host nor the compute stream waits. All other collectives go in one hop.

    Each half has two communicators of its own. A communicator runs its collectives in the order of
    their launches: gathers of a step may still be under way while the next backward reduces.

    Args:
        groups: Four process groups, then the first arguments of `Collectives`, whose world has
            `hosts`. The four are, for the reduce half, the ranks of this host in order, and the
            ranks with this rank's place on their hosts in order; then the same for the gather half.
        options: Other arguments of `Collectives`.
    """

    hops = 2

    def __init__(self, *groups: Any, **options: Any) -> None:
        super().__init__(*groups[NUM_SUBGROUPS:], **options)
        self._subgroups: Sequence[Any] = groups[:NUM_SUBGROUPS]

    @property
    @override
    def device_groups(self) -> list[Any]:
        return [*super().device_groups, *self._subgroups]

    @override
    def forget_groups(self) -> None:
        super().forget_groups()
        self._subgroups = [None] * NUM_SUBGROUPS

    def _but_own(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows, with an empty one for this host, whose own row need not travel."""
        return [row[:0] if host == self.world.host else row for host, row in enumerate(rows)]

    def _start_within(self, call: str, buffer: Tensor, tag: int) -> Waits:
        """Launches `call` within this host, in place, for each host's shards in `buffer`."""
        pairs = []
        for of_host in buffer.chunk(self.world.num_hosts):
            own = shard_of(of_host, self.world.place_on_host, self.world.ranks_a_host)
            pairs.append((own, of_host) if call == REDUCE_SCATTER else (of_host, own))
        return self.start_together(call, self._subgroups[2 * (call == ALL_GATHER)], pairs, tag)

    def _start_across(self, lane: str, call: str, *both: Any, tag: int) -> Waits:
        """Launches `call` between this rank and the ranks with its place on other hosts."""
        return self.start(call, self._subgroups[1 + 2 * (lane == "all_gather")], *both, tag=tag)

    def _two_hops(
        self, lane: str, tag: int, first: Waits, launch_second: Callable[[], Waits]
    ) -> Waits:
        """Launches the second hop on the second stream, behind the first hop. Does not block.

        Returns:
            Waits of the second hop. They also hold references to the memory of the first one.
        """
        hops = "within the host", "between hosts"
        name = f"bucket {tag} {hops[lane == 'all_gather']}"
        await_first = self.arriving(lane, name, first)
        if self.observer is not None:
            await_first = self.observer("first_hop", name, await_first)
        with self.streams.beside():
            await_first()
            # torch's works hold the memory that is sent. That of the first hop must be held until
            # the second hop has been waited for.
            return [(*wait, first) for wait in launch_second()]

    def _count(self, lane: str, within: Tensor, across: Tensor) -> None:
        """Adds the bytes that this rank sends in both hops of a half to the ledger.

        Args:
            lane: Half of the exchange, "reduce_scatter" or "all_gather".
            within: Tensor that travels within the host, with the shards of all of its ranks.
            across: Tensor that travels to, or from, every other host.
        """
        nbytes = within.nbytes // self.world.ranks_a_host * (self.world.ranks_a_host - 1)
        self.ledger[lane] += nbytes + across.nbytes * (self.world.num_hosts - 1)

    @override
    def scratch_numel(self, numel: int) -> int:
        return numel // self.world.ranks_a_host

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        lane, own = "reduce_scatter", self._column(buffer)
        of_hosts = list(received.chunk(len(own)))
        both = self._but_own(of_hosts), self._but_own(own)
        second = partial(self._start_across, lane, "all_to_all", *both, tag=tag)
        waits = self._two_hops(lane, tag, self._start_within(REDUCE_SCATTER, buffer, tag), second)
        of_hosts[self.world.host] = shard_of(buffer, self.world.rank, self.world.size)
        self._count(lane, buffer, own[0])
        finish = partial(sum_in_source_order, of_hosts, out)
        return self.new_work(lane, f"bucket {tag}", waits, finish)

    @override
    def launch_sums_of_host(
        self, buffer: Tensor, received: Tensor, encode: Encode, incoming: Tensor, tag: int
    ) -> Begun:
        lane, own = "reduce_scatter", self._column(buffer)

        def launch_second() -> Waits:
            rows = encode(torch.stack(own, out=received.view(len(own), -1)).float())
            return self._start_across(lane, "all_to_all_single", incoming, rows, tag=tag)

        first = self._start_within(REDUCE_SCATTER, buffer, tag)
        waits = self._two_hops(lane, tag, first, launch_second)
        self._count(lane, buffer, incoming[0])
        return self.new_work(lane, f"bucket {tag}", waits), self.streams.follow_beside

    @override
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        lane, rows = "all_gather", self._but_own(self._column(buffer))
        own = shard_of(buffer, self.world.rank, self.world.size)
        outgoing = self._but_own([own] * len(rows))
        first = self._start_across(lane, "all_to_all", rows, outgoing, tag=tag)
        second = partial(self._start_within, ALL_GATHER, buffer, tag)
        waits = self._two_hops(lane, tag, first, second)
        self._count(lane, buffer, own)
        return self.new_work(lane, f"bucket {tag}", waits)

    @override
    def launch_gather_of_host(self, buffer: Tensor, tag: int) -> Work:
        lane, waits = "all_gather", self._start_within(ALL_GATHER, buffer, tag)
        self._count(lane, buffer, buffer[:0])
        return self.new_work(lane, f"bucket {tag} within the host", waits)
