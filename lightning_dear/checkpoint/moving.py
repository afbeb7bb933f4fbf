"""Moves parts of tensors from the ranks that have them to those that want them, little by little.

State between two plans, and state on its way into a checkpoint, go through here: nobody holds more
beside them than what is sent and received at once.
"""

from __future__ import annotations

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

ROUND_BYTES = 1 << 22
"""Most that a rank sends at once, and most that it receives."""

Extents = list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]]
"""By item: bytes of an element, and (start, stop) of what a rank has, and of what it wants."""


@dataclass(frozen=True)
class Wanted:
    """Says where consecutive elements of a tensor shall go.

    Attributes:
        start: Number of the first one.
        stop: One past the last one.
        make: Returns room for them, without gaps; called once, when the first of them is there.
    """

    start: int
    stop: int
    make: Callable[[], Tensor]

    @cached_property
    def values(self) -> Tensor:
        """Returns the room."""
        return self.make()


@dataclass
class Item:
    """Describes one tensor of which ranks have, and want, other parts.

    Attributes:
        dtype: The same on all ranks.
        have: This rank's parts; emptied once they are sent.
        want: What shall be here.
    """

    dtype: torch.dtype
    have: list[Chunk]
    want: Sequence[Wanted]


class _Transfer(NamedTuple):
    """Elements [start, stop) of an item, from a part of the source's to one of the target's."""

    item: int
    source: int
    have: int
    target: int
    want: int
    start: int
    stop: int
    nbytes: int


def move(items: Sequence[Item], collectives: Collectives, meeting: torch.device) -> None:
    """Fills what is wanted on each rank from whoever has it, from the rank itself where it can.

    Collective, blocks. What nobody has stays as it was made.

    Args:
        items: The same on all ranks, but for what is had and wanted.
        collectives: What moves the bytes.
        meeting: The device through which they travel.
    """
    extents: Extents = [
        (
            item.dtype.itemsize,
            [(one.start, one.start + one.values.numel()) for one in item.have],
            [(one.start, one.stop) for one in item.want],
        )
        for item in items
    ]
    done = 0
    for together in _rounds(_transfers(collectives.all_gather_object(extents))):
        _exchange(together, items, collectives, meeting)
        for item in items[done : together[-1].item]:
            item.have.clear()
        done = together[-1].item
    for item in items:
        # Also where nobody had anything, or wants it.
        _ = [wanted.values for wanted in item.want]
        item.have.clear()


def _transfers(everyones: Sequence[Extents]) -> Iterator[_Transfer]:
    """What has to go where, item by item; the same on all ranks."""
    ranks = len(everyones)
    for item, extents in enumerate(zip(*everyones, strict=True)):
        itemsize, transfers = extents[0][0], list[_Transfer]()
        holders: dict[tuple[int, int], dict[int, int]] = {}
        for source, (_, has, _) in enumerate(extents):
            for have, part in enumerate(has):
                holders.setdefault(part, {})[source] = have
        parts = sorted(holders)
        stops = [stop for _, stop in parts]
        for target, (_, _, wants) in enumerate(extents):
            for want, (start, stop) in enumerate(wants):
                for part in parts[bisect_right(stops, start) :]:
                    if part[0] >= stop:
                        break
                    source = target if target in holders[part] else min(holders[part])
                    way = item, source, holders[part][source], target, want
                    end, step = min(stop, part[1]), ROUND_BYTES // itemsize
                    for begin in range(max(start, part[0]), end, step):
                        last = min(begin + step, end)
                        transfers.append(_Transfer(*way, begin, last, (last - begin) * itemsize))
        # In turns, so that all ranks send at once.
        yield from sorted(transfers, key=lambda one: ((one.target - one.source) % ranks, one.start))


def _rounds(transfers: Iterable[_Transfer]) -> Iterator[list[_Transfer]]:
    """As many at once as every rank may send and receive."""
    together: list[_Transfer] = []
    load: Counter[tuple[str, int]] = Counter()
    for one in transfers:
        ends = ("sent", one.source), ("received", one.target)
        if together and max(load[end] for end in ends) + one.nbytes > ROUND_BYTES:
            yield together
            together, load = [], Counter()
        load.update(dict.fromkeys(ends, one.nbytes))
        together.append(one)
    if together:
        yield together


def _exchange(
    together: Sequence[_Transfer],
    items: Sequence[Item],
    collectives: Collectives,
    meeting: torch.device,
) -> None:
    """Makes the transfers of one round. Collective, blocks."""

    def of(one: _Transfer, part: Chunk | Wanted) -> Tensor:
        flat = as_flat(part.values, part.values.stride())
        return flat[one.start - part.start : one.stop - part.start]

    rank, ranks = collectives.world.rank, range(collectives.world.size)
    away = [one for one in together if one.source != one.target]
    sends = sorted((one for one in away if one.source == rank), key=attrgetter("target"))
    receives = sorted((one for one in away if one.target == rank), key=attrgetter("source"))
    for one in together:
        if one.source == one.target == rank:
            of(one, items[one.item].want[one.want]).copy_(of(one, items[one.item].have[one.have]))
    if not away:
        return
    sizes = [sum(one.nbytes for one in sends if one.target == other) for other in ranks]
    theirs = [sum(one.nbytes for one in receives if one.source == other) for other in ranks]
    incoming = torch.empty(sum(theirs), dtype=torch.uint8, device=meeting)
    parts = [of(one, items[one.item].have[one.have]).to(meeting) for one in sends]
    outgoing = torch.cat([incoming[:0], *(part.view(torch.uint8) for part in parts)])
    collectives.launch_parts((outgoing, sizes), (incoming, theirs), STATE_TAGS).wait()
    lengths = [one.nbytes for one in receives]
    for one, part in zip(receives, torch.split(incoming, lengths), strict=True):
        dtype, room = items[one.item].dtype, of(one, items[one.item].want[one.want])
        # Numbers of several sizes may lie in one message, not all where memory is aligned.
        room.copy_(part.clone().view(dtype))
