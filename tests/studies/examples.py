"""Records with round numbers, for the arithmetic on them."""

from __future__ import annotations

from dataclasses import replace

from lightning_dear.studies.bounds import Bounds
from lightning_dear.studies.records import Block, Point, RankBlock, Step

BOUNDS = Bounds(
    forward_s=0.1, backward_s=0.2, model_bytes=40_000_000, world_size=2, rate=100_000_000.0
)
POINT = Point(
    label="ratio=1",
    model="mlp",
    scale=20.0,
    link_rate_mbit=800.0,
    rate_source="shaped",
    is_replay=True,
    compute_source="profile",
    bounds=BOUNDS,
)


def rank_block(rank: int, *steps_s: float, **changes: object) -> RankBlock:
    """One rank's block with these steps and nothing else of note."""
    block = RankBlock(
        rank=rank,
        steps=tuple(Step(step_s, step_s / 4, step_s / 2) for step_s in steps_s),
        cpu_s=0.5,
        wall_s=2.0,
        machine_use=0.25,
        interface_bytes=None,
        peak_memory_bytes=None,
    )
    return replace(block, **changes)


def block(entry: str, round_number: int, *ranks: RankBlock) -> Block:
    """A block of all ranks."""
    return Block(entry, round_number, 0, ranks)
