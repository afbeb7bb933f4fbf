"""Collectives on gloo: point-to-point messages between ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, partialmethod
from itertools import accumulate
from math import ceil
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.background import Background
from lightning_dear.collectives.launch_log import BUFFERS_TAG, TAGS_OF_ONE_OPTIMIZER, Logged
from lightning_dear.collectives.shards import shard_of, sum_in_source_order, take_largest
from lightning_dear.collectives.work import Collectives, SplitTensor, Waits, Work, blamed

# Above the tags of all buckets.
_FLAGS_TAG = 1 << 29

# Added to the tags of the buckets of `in_rings`. A receive that was posted before the change, and
# is still unused, gets no message of a bucket that is sent in turn or in a ring.
_RING_TAGS = 1 << 20

_HEAD_SHARE = 0.8
"""Share of a message that has arrived when a rank sends to its next peer. While the rest is under
way, the rank has time to do so."""

_MOST_DIRECT = 8
"""Largest number of ranks at which flags and module buffers go straight to all ranks."""

RankRows = Sequence[tuple[int, Tensor]]
"""Pairs (rank, row); the row is sent to that rank, or received from it."""

Rounds = Sequence[Callable[[], Waits]]
"""Functions that launch a round each, and return its waits; see `PairwiseCollectives._pass_on`."""


def nbytes_of(rows: RankRows) -> int:
    """Returns the bytes of all rows together."""
    return sum(row.nbytes for _, row in rows)


def _in_parts(rows: RankRows) -> RankRows:
    """Cuts each row into its head (`_HEAD_SHARE`) and, unless it is short, a tail."""
    cuts = [(rank, row, ceil(_HEAD_SHARE * len(row))) for rank, row in rows]
    parts = [(rank, part) for rank, row, cut in cuts for part in (row[:cut], row[cut:])]
    return [(rank, part) for rank, part in parts if len(part)]


def by_source(rows: RankRows) -> list[Tensor]:
    """Returns the rows in the order of their ranks."""
    return [row for _, row in sorted(rows, key=itemgetter(0))]


def rounds_of(size: int) -> list[list[int]]:
    """Returns the rounds in which every rank hears of all ranks, each as a list of distances.

    Rank r sends to the ranks (r + distance) mod P. Up to `_MOST_DIRECT` ranks there is one round.
    Otherwise a rank has heard of 4 ranks after the first round, and of twice as many after each
    further one. A rank sends ceil(log2 P) + 1 messages, in one round less than ceil(log2 P).
    """
    if size <= _MOST_DIRECT:
        return [[*range(1, size)]]
    return [[1, 2, 3], *([2**power] for power in range(2, (size - 1).bit_length()))]


def parent_of(rank: int, size: int) -> int:
    """Returns the rank from which `rank` gets rank 0's message, in the rounds of `rounds_of`.

    Up to `_MOST_DIRECT` ranks it is rank 0. Above, it is rank 0 for ranks 1 to 3, and every further
    rank's parent has that rank's number without the highest bit. Rank 0 is its own parent.
    """
    return 0 if rank < 4 or size <= _MOST_DIRECT else rank - (1 << rank.bit_length() - 1)


class PairwiseCollectives(Collectives):
    """Collectives by point-to-point messages, for gloo, which has no reduce-scatter of its own.

    gloo's `reduce_scatter` runs a whole all-reduce. Here every shard goes straight to its owner, so
    that each rank sends (P-1)/P of the buffer with P ranks, and gloo's own threads make the
    progress. With one rank nothing is sent, and `launch_reduce_scatter` only copies.

    All messages of a bucket are sent at once, so that a rank that comes late does not hold up the
    messages of others. But flows of several ranks into one host share its link unevenly, and the
    last rank to have its shards decides. So the optimizers of `in_rings` send to one peer at a
    time, see `RingTrial`: reduce-scatters in turn, all-gathers in a ring. No two messages meet
    then.

    Flags and module buffers go straight to all other ranks up to `_MOST_DIRECT` ranks. With more
    ranks a thread passes them on, round by round (`rounds_of`), so that no rank sends to all.

    Python objects travel in the all-gather group, where all other messages are matched by tag. If
    several hosts have several ranks each, an owner adds up the shards of each host first, then the
    hosts' sums, so that the bits are those of two hops.
    """

    wait_blocks_host = matches_by_tag = has_variable_lengths = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._expected: dict[tuple[str, int], tuple[int, Waits]] = {}
        # Tag of flags -> memory of the posted receives, a row for each, and their waits.
        self._heard: dict[int, tuple[Tensor, Waits]] = {}
        # (half, number of the optimizer or -1) -> a thread, see `_pass_on`.
        self._threads: dict[tuple[str, int], Background] = {}

    def _others(self, way: int) -> list[int]:
        """Returns the other ranks, in the order of sends (way 1) or receives (-1).

        Receives are in the order in which messages are likely to arrive. `way` is 1 or -1.
        """
        # Each rank begins with a different peer, so that not all ranks send to rank 0 first.
        rank, size = self.world.rank, self.world.size
        return [(rank + way * hop) % size for hop in range(1, size)]

    @property
    @override
    def favors_all_reduce(self) -> bool:
        # Of n bytes, the R ranks of a host send R (P - R) / P n to other hosts in each half. A ring
        # all-reduce sends 2 (P - 1) / P n between hosts in both. If the ranks form a grid of hosts,
        # two hops send no more than that, so that an all-reduce has no advantage.
        return self.world.fewest_on_a_host > 1 and self.world.ranks_a_host == 1

    @override
    def scratch_numel(self, numel: int) -> int:
        return numel // self.world.size * (self.world.size - 1)

    @override
    def launch_reduce_scatter(
        self, buffer: Tensor, received: Tensor, out: Tensor, tag: int
    ) -> Work:
        own = shard_of(buffer, self.world.rank, self.world.size)
        rows = self._reduce_rows(received, self._others(-1))
        parts, tag_sent = self._reduced_parts(rows, tag)
        outgoing = [(peer, shard_of(buffer, peer, self.world.size)) for peer in self._others(1)]
        if tag_sent != tag:
            work = self._reduce_in_turn(received, parts, outgoing, tag, tag_sent)
        else:
            waits = self._exchange("reduce_scatter", received, rows, outgoing, tag)
            work = self.new_work("reduce_scatter", f"bucket {tag}", waits)
        self.ledger["reduce_scatter"] += nbytes_of(outgoing)
        # Summed in rank order, and not in the order in which messages arrive, so that all runs have
        # the same bits.
        addends, size = by_source((*rows, (self.world.rank, own))), self.world.ranks_a_host
        return work.then(partial(sum_in_source_order, addends, out, size))

    def _reduced_parts(self, rows: RankRows, tag: int) -> tuple[RankRows, int]:
        """Returns the messages that fill `rows` in a reduce-scatter, and their tag."""
        if tag // TAGS_OF_ONE_OPTIMIZER not in self.in_rings:
            return rows, tag
        return _in_parts(rows), tag + _RING_TAGS

    def _reduce_in_turn(
        self, received: Tensor, parts: RankRows, outgoing: RankRows, tag: int, tag_sent: int
    ) -> Work:
        """Has a thread send to one peer at a time. Does not block.

        This rank sends to the peer at distance d + 1 once the head of the message from the rank at
        distance -d has arrived. All ranks do so, hence each link carries one message.
        """
        lane, name, num_rows = "reduce_scatter", f"bucket {tag}", len(outgoing)
        receives = self._receives(lane, received, parts, tag_sent)
        self.log.add(Logged(lane, 0, received.dtype, received.numel(), tag, has_tag=True))
        num_parts = len(parts) // num_rows
        tails = [one for number, one in enumerate(receives) if number % num_parts]

        def send(number: int) -> Waits:
            sends = self._sends(lane, _in_parts([outgoing[number]]), tag_sent)
            return [receives[num_parts * number], *sends]

        later: list[Callable[[], Waits]] = [partial(send, number) for number in range(num_rows)]
        later.append(lambda: tails)
        names = [f"{name}, in turn"] * (num_rows + 2)
        sent = self._pass_on(lane, names, [], later, tag // TAGS_OF_ONE_OPTIMIZER)
        return Work(self.observed(lane, name, lambda: sent.result()()))

    @override
    def launch_all_to_all(self, rows: Tensor, incoming: Tensor, tag: int) -> Work:
        outgoing, own = [(peer, rows[peer]) for peer in self._others(1)], self.world.rank
        waits = self._exchange("reduce_scatter", incoming, self._rows(incoming), outgoing, tag)
        self.ledger["reduce_scatter"] += nbytes_of(outgoing)
        # Not before the wait: `rows` may still be filled (see `StagedCollectives`).
        keep = partial(incoming[own].copy_, rows[own])
        return self.new_work("reduce_scatter", f"bucket {tag}", waits, keep)

    @override
    def launch_parts(self, outgoing: SplitTensor, incoming: SplitTensor, tag: int) -> Work:
        sent, rows = (
            [(rank, part) for rank, part in enumerate(torch.split(flat, sizes)) if len(part)]
            for flat, sizes in (outgoing, incoming)
        )
        # The length differs by rank.
        self.log.add(Logged("all_gather", 1, incoming[0].dtype, None, tag, has_tag=True))
        waits = self._both_ways("all_gather", incoming[0], rows, sent, tag)
        self.ledger["all_gather"] += nbytes_of(sent)
        return self.new_work("all_gather", f"bucket {tag}", waits)

    @override
    def launch_messages(
        self,
        lane: str,
        messages: Mapping[int, Tensor],
        sources: Collection[int],
        incoming: Tensor,
        tag: int,
        num_notes: int = 1,
    ) -> Work:
        # gloo lets a message be shorter than the memory of its receive.
        outgoing = [(peer, messages[peer]) for peer in self._others(1) if peer in messages]
        rows = [(source, incoming[source]) for source in self._others(-1) if source in sources]
        waits = [*self._receives(lane, incoming, rows, tag), *self._sends(lane, outgoing, tag)]
        note_bytes = sum(num_notes * message.element_size() for _, message in outgoing)
        self.ledger["metadata"] += note_bytes
        self.ledger[lane] += nbytes_of(outgoing) - note_bytes
        return self.new_work(lane, f"bucket {tag}", waits)

    @property
    @override
    def can_use_rings(self) -> bool:
        hosts = self.world.hosts
        return self.hops == 1 and len(hosts) > 2 and len({*hosts}) == len(hosts)

    @override
    def launch_all_gather(self, buffer: Tensor, tag: int) -> Work:
        rows, tag_sent = self._gathered_rows(buffer, tag)
        self.ledger["all_gather"] += self.ring_bytes(buffer)
        if tag_sent != tag:
            return self._gather_in_ring(buffer, rows, tag, tag_sent)
        own = shard_of(buffer, self.world.rank, self.world.size)
        outgoing = [(peer, own) for peer in self._others(1)]
        waits = self._exchange("all_gather", buffer, rows, outgoing, tag)
        return self.new_work("all_gather", f"bucket {tag}", waits)

    def _gathered_rows(self, buffer: Tensor, tag: int) -> tuple[RankRows, int]:
        """Returns the rows of an all-gather with their sources, and the tag of its messages.

        In a ring all shards come from the rank before this one: first that rank's own, then those
        that it was sent.
        """
        rank, size, shards = self.world.rank, self.world.size, buffer.tensor_split(self.world.size)
        if tag // TAGS_OF_ONE_OPTIMIZER not in self.in_rings:
            return self._rows(shards), tag
        before = (rank - 1) % size
        return [(before, shards[(rank - hop) % size]) for hop in range(1, size)], tag + _RING_TAGS

    def _gather_in_ring(self, buffer: Tensor, rows: RankRows, tag: int, tag_sent: int) -> Work:
        """Sends this rank's shard to the next rank, and has a thread pass on all but the last row.

        Does not block.
        """
        lane, name, peer = "all_gather", f"bucket {tag}", self._others(1)[0]
        shards = [shard_of(buffer, self.world.rank, self.world.size), *(row for _, row in rows)]
        receives = self._receives(lane, buffer, rows, tag_sent)
        self.log.add(Logged(lane, 1, buffer.dtype, buffer.numel(), tag, has_tag=True))

        def send(number: int) -> Waits:
            return [receives[number], *self._sends(lane, [(peer, shards[number])], tag_sent)]

        later = [partial(send, number) for number in range(1, len(rows))]
        names = [f"{name}, in a ring"] * len(rows)
        sent = self._pass_on(lane, names, send(0), later, tag // TAGS_OF_ONE_OPTIMIZER)
        return Work(self.observed(lane, name, lambda: sent.result()()))

    @override
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        lane, rank, size = "reduce_scatter", self.world.rank, self.world.size
        rounds, known = rounds_of(size), flags.clone()
        self.expect_max(len(flags), tag)
        heard, receives = self._heard[tag]
        if heard.shape[1] != len(flags):
            raise RuntimeError(f"{len(flags)} flags, not {heard.shape[1]}. Pass what was expected.")
        del self._heard[tag]
        ends = accumulate(map(len, rounds))
        parts = [slice(end - len(hops), end) for hops, end in zip(rounds, ends, strict=True)]

        def launch(number: int) -> Waits:
            # The sends of the round before, which read `known`, have been waited for.
            if number:
                take_largest([*heard[parts[number - 1]]], known)
            outgoing = [((rank + hop) % size, known) for hop in rounds[number]]
            return [*receives[parts[number]], *self._sends(lane, outgoing, _FLAGS_TAG + tag)]

        self.log.add(Logged(lane, 0, flags.dtype, len(flags), _FLAGS_TAG + tag, has_tag=True))
        self.ledger["other"] += flags.nbytes * len(receives)
        later = [partial(launch, number) for number in range(1, len(rounds))]
        finish = partial(take_largest, [known, *heard[parts[-1]]], flags)
        return self._in_rounds(lane, "used parameters", launch(0), later).then(finish)

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        lane, tag = "all_gather", BUFFERS_TAG + index
        rank, size = self.world.rank, self.world.size
        rows = [] if rank == 0 else [(parent_of(rank, size), buffer)]
        children = [one for one in range(1, size) if parent_of(one, size) == rank]
        outgoing = [(child, buffer) for child in children]
        first = self._exchange(lane, buffer, rows, outgoing if rank == 0 else [], tag)
        self.ledger["other"] += nbytes_of(outgoing)
        later = [partial(self._sends, lane, outgoing, tag)] if rank and children else []
        return self._in_rounds(lane, "module buffers", first, later)

    def _in_rounds(self, lane: str, name: str, first: Waits, later: Rounds) -> Work:
        """Returns the work of a message that ranks pass on, see `_pass_on`. Does not block.

        Without later rounds there is no thread.
        """
        if not later:
            return self.new_work("other", name, first)
        names = [f"{name}, which ranks pass on"] * (len(later) + 1)
        sent = self._pass_on(lane, names, first, later)
        return Work(self.observed("other", name, lambda: sent.result()()))

    def _pass_on(
        self, lane: str, names: Sequence[str], first: Waits, later: Rounds, optimizer: int = -1
    ) -> Future[Callable[[], None]]:
        """Has a thread launch each later round once the round before has arrived. Does not block.

        Args:
            lane: "reduce_scatter" or "all_gather", which decides on the process group.
            names: Names of all rounds, for errors.
            first: Waits of the first round, which has been launched.
            later: Launch the rounds after it.
            optimizer: Number of the optimizer whose buckets travel. -1 means that none do. Each
                half of each optimizer has a thread of its own.

        Returns:
            A future, which is done once the last round has been launched. Its result is a function
            that blocks until that round has arrived.
        """

        def forward() -> Callable[[], None]:
            arrive = self.arriving(lane, names[0], first)
            for name, launch in zip(names[1:], later, strict=True):
                arrive()
                if self.reduce_group is None:
                    raise RuntimeError(f"{name}: cannot be sent after training. Wait earlier.")
                arrive = self.arriving(lane, name, launch())
            return arrive

        key = lane, optimizer
        if key not in self._threads:
            self._threads[key] = Background(f"dear {lane}, passed on, {optimizer}")
        return self._threads[key].submit(forward)

    @override
    def expect_reduce_scatter(self, received: Tensor, tag: int) -> None:
        rows = self._reduce_rows(received, self._others(-1))
        self._expect("reduce_scatter", received, *self._reduced_parts(rows, tag))

    @override
    def expect_all_gather(self, buffer: Tensor, tag: int) -> None:
        self._expect("all_gather", buffer, *self._gathered_rows(buffer, tag))

    @override
    def expect_messages(self, lane: str, incoming: Tensor, tag: int) -> None:
        self._expect(lane, incoming, self._rows(incoming), tag)

    @override
    def expect_max(self, num_flags: int, tag: int) -> None:
        if tag not in self._heard:
            rank, size = self.world.rank, self.world.size
            sources = [(rank - hop) % size for hops in rounds_of(size) for hop in hops]
            heard = torch.empty(len(sources), num_flags, dtype=torch.uint8, device="cpu")
            rows = [*zip(sources, heard, strict=True)]
            self._heard[tag] = heard, self._receive("reduce_scatter", rows, _FLAGS_TAG + tag)

    @override
    def end_training(self) -> None:
        """Keeps later fits from reusing the groups, if receives are posted that no launch has used.

        A step that raised leaves such receives. A later fit's messages would arrive in them.
        """
        if any(waits for _, waits in (*self._expected.values(), *self._heard.values())):
            self.discard(has_failed=False)

    def _reduce_rows(self, received: Tensor, sources: Sequence[int]) -> RankRows:
        """Cuts the scratch of a reduce-scatter into rows, one shard for each of `sources`."""
        return [
            (source, shard_of(received, place, self.world.size - 1))
            for place, source in enumerate(sources)
        ]

    def _rows(self, incoming: Tensor | Sequence[Tensor]) -> RankRows:
        """Returns the rows of `incoming`, which has one for each rank, without this rank's."""
        return [(source, incoming[source]) for source in self._others(-1)]

    def _expect(self, lane: str, buffer: Tensor, rows: RankRows, tag: int) -> None:
        """Posts receives into `rows`, unless some are posted with this half and tag already."""
        if (lane, tag) not in self._expected:
            self._expected[lane, tag] = buffer.data_ptr(), self._receive(lane, rows, tag)

    def _exchange(
        self, lane: str, buffer: Tensor, rows: RankRows, outgoing: RankRows, tag: int
    ) -> Waits:
        """Posts the receives of `rows`, unless they are posted, and sends `outgoing`.

        Args:
            lane: "reduce_scatter" or "all_gather", which decides on the process group.
            buffer: Tensor whose address tells whether receives that are posted write where this
                launch wants. It must be the one that the `expect_...` call was given, and have the
                same length on all ranks.
            rows: Memory that other ranks' messages are written into.
            outgoing: Messages to other ranks.
            tag: Tag of all these messages.
        """
        group = int(lane == "all_gather")
        self.log.add(Logged(lane, group, buffer.dtype, buffer.numel(), tag, has_tag=True))
        return self._both_ways(lane, buffer, rows, outgoing, tag)

    def _both_ways(
        self, lane: str, buffer: Tensor, rows: RankRows, outgoing: RankRows, tag: int
    ) -> Waits:
        """Does what `_exchange` does, without noting it in the log."""
        # Receives first: a send takes 1.7 times as long if its receive is not posted yet.
        return [*self._receives(lane, buffer, rows, tag), *self._sends(lane, outgoing, tag)]

    def _receives(self, lane: str, buffer: Tensor, rows: RankRows, tag: int) -> Waits:
        """Returns the waits of the posted receives. Posts them into `rows` if there are none."""
        data_ptr, receives = self._expected.pop((lane, tag), (0, None))
        # A posted receive writes into the memory that the `expect_...` call was given, whatever
        # this launch asks for.
        if receives and data_ptr != buffer.data_ptr():
            raise RuntimeError(
                f"{lane} {tag} got another tensor than expect_{lane}. Pass that. If you have caught"
                " an error of optimizer.step(), begin another fit: plan and parameters may no"
                " longer change, since messages are still expected in the old plan's buffers."
            )
        return self._receive(lane, rows, tag) if receives is None else receives

    def _post(self, end: str, lane: str, rows: RankRows, tag: int) -> Waits:
        """Posts messages, of which the peers are at the `end` "dst" or "src".

        If the connection to a peer is closed already, the error names it.
        """
        call = self.calls.isend if end == "dst" else self.calls.irecv
        group = self.reduce_group if lane == "reduce_scatter" else self.gather_group
        posted = list[tuple[int, Any]]()
        for peer, row in rows:
            try:
                posted.append((peer, call(row, **{end: peer}, group=group, tag=tag)))
            except RuntimeError as error:
                self.has_given_up = True
                how = blamed(peer, 0.0, str(error))
                raise RuntimeError(f"{lane.replace('_', '-')}: {how}") from error
        return posted

    _sends, _receive = partialmethod(_post, "dst"), partialmethod(_post, "src")
