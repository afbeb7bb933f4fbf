"""Records with round numbers, for the arithmetic on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_dear.studies.block import FIGURES, RankBlock
from lightning_dear.studies.files import Line
from lightning_dear.studies.rounds import Turn
from lightning_dear.studies.summary import block_of, summarize

POINT: Line = {
    "point": "ratio=1",
    "model": "mlp",
    "is_replay": True,
    "scale": 20.0,
    "link_rate_mbit": 800.0,
    "stands_for_mbit": 16000.0,
    "rate_source": "shaped",
    "world_size": 2,
    "model_bytes": 40_000_000,
    "compute_source": "profile",
    "forward_s": 0.1,
    "backward_s": 0.2,
    "one_way_s": 0.2,
    "rig": "",
}

LOAD: Line = {
    **{"host_bytes": None, "peak_memory_bytes": None, "num_buckets": None},
    **{"cpu_per_rank": 0.25, "machine_use": 0.25, "others_use": 0.25, "codec_s": 0.0},
}


def rank_of_steps(rank: int, *steps: Sequence[float], **load: object) -> RankBlock:
    """One rank's block with these figures of each step; those at its end may be missing."""
    whole = [[*step, *[np.nan] * (len(FIGURES) - len(step))] for step in steps]
    assert load.keys() <= LOAD.keys()
    return RankBlock(rank, np.array(whole), {**LOAD, **load})


def rank_block(rank: int, *steps_s: float, **load: object) -> RankBlock:
    """One rank's block with these steps and nothing else of note."""
    steps = [(step_s, step_s / 4, step_s / 2) for step_s in steps_s]
    return rank_of_steps(rank, *steps, **load)


def block(
    entry: str, round_number: int, *ranks: RankBlock, number: int = 0, note: str = ""
) -> Line:
    """A block of all ranks."""
    return block_of(Turn(entry, round_number, 0), ranks, number, note)


def rows_of(
    point: Line, blocks: Sequence[Line], names: Sequence[str], **notes: str
) -> list[Mapping]:
    """The rows of blocks whose entries stand in this order."""
    numbered = [
        {**one, "number": names.index(one["entry"]), "note": notes.get(one["entry"], "")}
        for one in blocks
    ]
    return summarize(point, numbered)
