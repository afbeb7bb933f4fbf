"""Moves parts of tensors from the ranks that have them to the ranks that want them, in batches.

`move` is used when another plan assigns optimizer state to other ranks, and when state is gathered
for a checkpoint. The batches are small, so that a rank needs little memory beside the state itself.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dear.bucket import Chunk, as_flat
from lightning_dear.collectives.work import STATE_TAGS, Collectives

BATCH_BYTES = 1 << 22
"""Largest number of bytes that a rank sends in one batch, and that it receives in one batch. Bytes
that a rank copies from its own memory count, too."""

Extents = list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]
"""What one rank tells the others, for each item: bytes of an element, (start, stop) of each chunk
that the rank has, and (start, stop) of each range that it wants. Both are indices of elements."""


@dataclass(frozen=True)
class Wanted:
    """A range of elements of a tensor that this rank wants, and the memory to put them into.

    Attributes:
        start: Index of the first element, in storage order.
        stop: Index of the last element plus one.
        make: Returns a tensor without gaps of stop - start elements. Called once: when the first
            elements arrive, or at the end of `move` if none do.
    """

    start: int
    stop: int
    make: Callable[[], Tensor]

    @cached_property
    def values(self) -> Tensor:
        """Returns the tensor that the elements are written into. The first read calls `make`."""
        return self.make()


class Item(NamedTuple):
    """One tensor to move: the chunks of it that this rank has, and the ranges that it wants.

    Attributes:
        dtype: Dtype of the tensor, the same on all ranks.
        have: Chunks that this rank has. `move` clears the list once they are sent, to free memory.
        want: Ranges that this rank wants. Empty means none.
    """

    dtype: torch.dtype
    have: list[Chunk]
    want: Sequence[Wanted]


class _Transfer(NamedTuple):
    """Elements [start, stop) of an item, which rank `source` sends to rank `target`.

    Attributes:
        item: Index of the item.
        source: Rank that sends.
        have: Index of the chunk in the source's `Item.have`.
        target: Rank that receives. If it is the source, the elements are copied and not sent.
        want: Index of the range in the target's `Item.want`.
        start: Index of the first element.
        stop: Index of the last element plus one.
        nbytes: Bytes of these elements.
    """

    item: int
    source: int
    have: int
    target: int
    want: int
    start: int
    stop: int
    nbytes: int


def move(items: Sequence[Item], collectives: Collectives, meeting: torch.device) -> None:
    """Fills the wanted ranges of every rank with the elements that the ranks have.

    Collective. Blocks. A rank copies the elements that it has itself and receives the others. If
    several other ranks have the same chunk, the one with the smallest rank number sends it.
    Elements that no rank has keep the values that `Wanted.make` gave them.

    Args:
        items: Tensors to move, in one order on all ranks. Only `have` and `want` differ by rank.
            Mutated: every `have` is empty afterwards.
        collectives: Collectives that send the messages.
        meeting: Device of the messages that are sent. Elements on another device are copied to it.
    """
    extents: Extents = []
    for item in items:
        have = [(chunk.start, chunk.start + chunk.values.numel()) for chunk in item.have]
        want = [(wanted.start, wanted.stop) for wanted in item.want]
        extents.append((item.dtype.itemsize, have, want))
    done = 0
    for batch in _batches(_transfers(collectives.all_gather_object(extents))):
        _send_batch(batch, items, collectives, meeting)
        # Transfers come item by item, so all items before the last one of this batch are done.
        for item in items[done : batch[-1].item]:
            item.have.clear()
        done = batch[-1].item
    for item in items:
        # Reading `values` also makes the tensors for which no element has arrived.
        _ = [wanted.values for wanted in item.want]
        item.have.clear()


def _transfers(extents_of_ranks: Sequence[Extents]) -> Iterator[_Transfer]:
    """Yields the transfers of all ranks that fill the wanted ranges. Equal on all ranks.

    They come item by item, each of at most `BATCH_BYTES`. Elements that no rank has are left out.
    """
    size = len(extents_of_ranks)
    for item, extents in enumerate(zip(*extents_of_ranks, strict=True)):
        itemsize, transfers = extents[0][0], list[_Transfer]()
        # (start, stop) of a chunk -> each rank that has it -> its index in that rank's `have`.
        holders: dict[tuple[int, int], dict[int, int]] = {}
        for source, (_, has, _) in enumerate(extents):
            for have, chunk in enumerate(has):
                holders.setdefault(chunk, {})[source] = have
        chunks = sorted(holders)
        stops = [stop for _, stop in chunks]
        for target, (_, _, wants) in enumerate(extents):
            for want, (start, stop) in enumerate(wants):
                for chunk in chunks[bisect_right(stops, start) :]:
                    if chunk[0] >= stop:
                        break
                    source = target if target in holders[chunk] else min(holders[chunk])
                    way = item, source, holders[chunk][source], target, want
                    end, step = min(stop, chunk[1]), BATCH_BYTES // itemsize
                    for begin in range(max(start, chunk[0]), end, step):
                        last = min(begin + step, end)
                        transfers.append(_Transfer(*way, begin, last, (last - begin) * itemsize))
        # Sorted by the distance from source to target. Otherwise they would be sorted by target, so
        # that a batch would be for one rank alone, and the others would wait.
        yield from sorted(transfers, key=lambda one: ((one.target - one.source) % size, one.start))


def _batches(transfers: Iterable[_Transfer]) -> Iterator[list[_Transfer]]:
    """Groups transfers so that no rank sends or receives more than `BATCH_BYTES` in a batch."""
    batch: list[_Transfer] = []
    load: Counter[tuple[str, int]] = Counter()
    for transfer in transfers:
        ends = ("sent", transfer.source), ("received", transfer.target)
        if batch and max(load[end] for end in ends) + transfer.nbytes > BATCH_BYTES:
            yield batch
            batch, load = [], Counter()
        load.update(dict.fromkeys(ends, transfer.nbytes))
        batch.append(transfer)
    if batch:
        yield batch


def _send_batch(
    batch: list[_Transfer], items: Sequence[Item], collectives: Collectives, meeting: torch.device
) -> None:
    """Makes the transfers of one batch. Collective. Blocks.

    Each rank sends at most one message to each other rank. If source and target of all transfers
    are equal, nothing is sent.
    """

    def view_of(transfer: _Transfer, place: Chunk | Wanted) -> Tensor:
        flat = as_flat(place.values, place.values.stride())
        return flat[transfer.start - place.start : transfer.stop - place.start]

    rank, ranks = collectives.world.rank, range(collectives.world.size)
    remote = [one for one in batch if one.source != one.target]
    sends = sorted((one for one in remote if one.source == rank), key=attrgetter("target"))
    receives = sorted((one for one in remote if one.target == rank), key=attrgetter("source"))
    for one in batch:
        if one.source == one.target == rank:
            source = view_of(one, items[one.item].have[one.have])
            view_of(one, items[one.item].want[one.want]).copy_(source)
    if not remote:
        return
    sizes = [sum(one.nbytes for one in sends if one.target == other) for other in ranks]
    their_sizes = [sum(one.nbytes for one in receives if one.source == other) for other in ranks]
    incoming = torch.empty(sum(their_sizes), dtype=torch.uint8, device=meeting)
    parts = [view_of(one, items[one.item].have[one.have]).to(meeting) for one in sends]
    outgoing = torch.cat([incoming[:0], *(part.view(torch.uint8) for part in parts)])
    collectives.launch_parts((outgoing, sizes), (incoming, their_sizes), STATE_TAGS).wait()
    lengths = [one.nbytes for one in receives]
    for one, part in zip(receives, torch.split(incoming, lengths), strict=True):
        dtype, room = items[one.item].dtype, view_of(one, items[one.item].want[one.want])
        # Cloned, because `view` needs aligned memory: a message may hold elements of several
        # dtypes one behind the other.
        room.copy_(part.clone().view(dtype))
