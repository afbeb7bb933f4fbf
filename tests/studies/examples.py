"""Records with round numbers, for the arithmetic on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_dear.studies.records import Block, Point, RankBlock, Row, Step
from lightning_dear.studies.summary import block_of, summarize

POINT = Point(
    label="ratio=1",
    model="mlp",
    is_replay=True,
    scale=20.0,
    link_rate_mbit=800.0,
    rate_source="shaped",
    world_size=2,
    model_bytes=40_000_000,
    compute_source="profile",
    alone_forward_s=0.1,
    alone_backward_s=0.2,
    one_way_s=0.2,
)


def rank_block(rank: int, *steps_s: float, **changes: object) -> RankBlock:
    """One rank's block with these steps and nothing else of note."""
    block = RankBlock(
        rank=rank,
        steps=tuple(Step(step_s, step_s / 4, step_s / 2) for step_s in steps_s),
        cpu_per_rank=0.25,
        machine_use=0.25,
        others_use=0.25,
        codec_s=0.0,
    )
    return replace(block, **changes)


def block(entry: str, round_number: int, *ranks: RankBlock, **place: Any) -> Block:
    """A block of all ranks."""
    return block_of(entry, ranks, round=round_number, **place)


def rows_of(point: Point, blocks: list[Block], names: list[str], **notes: str) -> list[Row]:
    """The rows of blocks whose entries stand in this order."""
    numbered = [
        replace(one, number=names.index(one.entry), note=notes.get(one.entry, "")) for one in blocks
    ]
    return summarize(point, numbered)
