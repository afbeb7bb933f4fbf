"""From blocks to rows: medians, ratios and what is void."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import TypeVar

from lightning_dear.studies.records import Block, Point, Row, Step

MAX_REPLAY_USE = 0.6
"""Share of the machine above which a replayed model's ranks wait for the CPU, not for the link."""

T = TypeVar("T")


def in_turn(names: Sequence[T], round_number: int) -> list[T]:
    """Return `names` in the order of one round: in turn each is first, and each follows each.

    A Williams design: from one name outwards to both sides, shifted by one from round to round; an
    odd number of names needs every second pass backwards.
    """
    count = len(names)
    turn, is_backwards = round_number % count, count % 2 and round_number // count % 2
    offsets = [(place + 1) // 2 * (-1) ** (place + 1) for place in range(count)]
    order = [names[(turn + offset) % count] for offset in offsets]
    return order[::-1] if is_backwards else order


def summarize(
    point: Point, blocks: Sequence[Block], names: Sequence[str], notes: dict[str, str] | None = None
) -> list[Row]:
    """Return a row for each entry of `names` that has a block, in that order.

    Args:
        point: What the blocks share.
        blocks: Of any entries and rounds; a broken-off last round is fine.
        names: Entries; ratios are to the first.
        notes: Entry -> what its tuning found.
    """
    first = _by_round(blocks, names[0])
    return [
        _row(point, name, _by_round(blocks, name), first, (notes or {}).get(name, ""))
        for name in names
        if _by_round(blocks, name)
    ]


def _by_round(blocks: Iterable[Block], name: str) -> dict[int, Block]:
    """The blocks of one entry, without those in which it still looked for its options."""
    return {
        block.round_number: block
        for block in blocks
        if block.entry == name and block.round_number >= 0
    }


def _row(point: Point, name: str, own: dict[int, Block], first: dict[int, Block], note: str) -> Row:
    steps = [step for block in own.values() for step in block.steps]
    ratios = [
        _median_step(own[number]) / _median_step(first[number]) for number in own if number in first
    ]
    use = _known(rank.machine_use for block in own.values() for rank in block.ranks)
    memory = _known(rank.peak_memory_bytes for block in own.values() for rank in block.ranks)
    ranks = [rank for block in own.values() for rank in block.ranks]
    sent = [(one.interface_bytes, len(one.steps)) for one in ranks]
    host_bytes = [count / num_steps for count, num_steps in sent if count is not None]
    others_use = (rank.machine_use - rank.codec_use for rank in ranks if rank.machine_use)
    return Row(
        point=point,
        entry=name,
        num_steps=len(steps),
        step_s=median(step.step_s for step in steps),
        ratio=median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        compute_s=_median(_compute_s(step) for step in steps),
        exposed_reduce_scatter_s=_median(step.exposed_reduce_scatter_s for step in steps),
        exposed_all_gather_s=_median(step.exposed_all_gather_s for step in steps),
        host_bytes=mean(host_bytes) if host_bytes else None,
        peak_memory_bytes=max(memory, default=None),
        cpu_per_rank=mean(rank.cpu_s / rank.wall_s for rank in ranks),
        machine_use=max(use, default=None),
        is_void=point.is_replay and max(others_use, default=0) > MAX_REPLAY_USE,
        num_buckets=ranks[-1].num_buckets,
        note=note,
        codec_s=mean(rank.codec_cpu_s / len(rank.steps) for rank in ranks),
    )


def _median_step(block: Block) -> float:
    return median(step.step_s for step in block.steps)


def _compute_s(step: Step) -> float | None:
    if step.exposed_reduce_scatter_s is None or step.exposed_all_gather_s is None:
        return None
    return step.step_s - step.exposed_reduce_scatter_s - step.exposed_all_gather_s


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return median(known) if known else None
