"""Summarizes steps as blocks (lines of blocks.csv), and blocks as rows (lines of summary.csv).

The first columns of both files describe the point, which all entries of a comparison share:

- point: overrides that distinguish it from other points; empty if there is only one.
- model: name of the model. is_replay: whether it waits instead of computing. scale: divisor of its
  tensors' sizes. model_bytes: bytes of all parameters of the scaled model, sent uncompressed.
- world_size: number of ranks. rig: emulated hosts and their links in one line; empty on real hosts.
- link_rate_mbit: rate of each link in 10^6 bits per second, if known. rate_source: "shaped" on
  emulated links, "assumed" if it is from the cluster's file. stands_for_mbit: rate at which the
  unscaled model would take as long.
- compute_source: "profile", "measured" or "not measured". forward_s and backward_s: seconds without
  communication, if known; in a line of blocks.csv, those measured in the block.
- one_way_s: seconds that each link needs to reduce-scatter, or to all-gather, the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from lightning_dear.studies.block import FIGURES, WAITS, RankBlock
from lightning_dear.studies.files import Line
from lightning_dear.studies.rounds import Turn

COMPUTE_ALONE = "compute alone"
"""Name of the row in which every rank trains alone, without communication."""

WORDS = frozenset({"point", "model", "entry", "note"})
"""Columns of both files that are text, even if a cell looks like a number."""

MAX_REPLAY_USE = 0.6
"""CPU use of the machine, 0 to 1. Above it, ranks of a replay may wait for a core, and the row is
void."""

_WAITS = ("compute_s", *WAITS)

_LOADS: Mapping[str, Callable[[list[Any]], Any]] = {
    "host_bytes": mean,
    "peak_memory_bytes": max,
    "cpu_per_rank": mean,
    "machine_use": max,
    "others_use": max,
    "codec_s": mean,
    "num_buckets": lambda known: known[-1],
}
"""Figure of `RankBlock.load` -> how the values of several ranks, or blocks, become one."""


def block_of(turn: Turn, ranks: Sequence[RankBlock], number: int = 0, note: str = "") -> Line:
    """Return a line of blocks.csv from the measurements of all ranks, rounded to the microsecond.

    A figure of a step is the mean over ranks, and a figure of the block is the median over steps.
    With local steps it is the median over rounds, each the mean of its steps: few of them exchange.
    compute_s is the step's time without the two waits. The mean is used, not the slowest rank,
    because a rank that is late in one step is faster in the next. The slowest ranks of all steps
    would add up to more than the time that passed: by up to 2 % if ranks are loosely coupled, and
    by nothing under DDP.

    Args:
        turn: Entry, round and position of the block.
        ranks: Measurements of all ranks, with the same number of steps.
        number: Position of the entry among all entries, from 0; ratios are to the first entry.
        note: Result of the entry's tuning, for people.
    """
    steps = np.mean([rank.steps for rank in ranks], axis=0)
    columns = dict(zip(FIGURES, steps.T, strict=True))
    columns["compute_s"] = columns["step_s"] - sum(columns[name] for name in WAITS)
    rounds = {name: column.reshape(-1, ranks[0].period) for name, column in columns.items()}
    figures = {name: float(np.median(of.mean(axis=1))) for name, of in rounds.items()}
    figures |= _loads([rank.load for rank in ranks])
    known = {name: _rounded(value) for name, value in figures.items()}
    return {**known, **turn._asdict(), "number": number, "num_steps": len(steps), "note": note}


def _loads(lines: Sequence[Line]) -> Line:
    return {name: _combined(lines, name, how) for name, how in _LOADS.items()}


def _combined(lines: Sequence[Line], name: str, how: Callable[[list[Any]], Any]) -> Any:
    """Return the figure `name` of all lines that have it, combined by `how`; else None."""
    known = [line[name] for line in lines if line[name] is not None]
    return how(known) if known else None


def _rounded(value: float | None) -> float | None:
    if value is None or np.isnan(value):
        return None
    return value if isinstance(value, int) else round(float(value), 6)


def raw_lines(point: Line, block: Line, ranks: Sequence[RankBlock]) -> list[Line]:
    """Return a line of raw.csv for every rank and step of one block, to the microsecond."""
    place = {name: block[name] for name in ("round", "place", "entry")}
    return [
        {**point, **place, "rank": rank.rank, "step": number}
        | dict(zip(FIGURES, map(_rounded, step), strict=True))
        for rank in ranks
        for number, step in enumerate(rank.steps)
    ]


def summarize(point: Line, blocks: Iterable[Line]) -> list[Line]:
    """Return a row for each entry that has a block. Blocks of a tuning do not count.

    A row has medians over rounds, and these columns. ratio: step time over the first entry's in the
    same round; median, lowest and highest over rounds. is_void: whether the ranks of a replay had
    too little CPU to wait as an accelerator does. The bounds of `bounds_of`, and the step time over
    two of them.

    Args:
        point: Columns that all blocks share. For a model that is no replay, forward_s and
            backward_s are taken from the entry `COMPUTE_ALONE`.
        blocks: Blocks of any entries and rounds; the last round may be incomplete.
    """
    entries: dict[str, dict[int, Line]] = {}
    for block in sorted(blocks, key=lambda one: int(one["number"])):
        if block["round"] >= 0:
            entries.setdefault(block["entry"], {})[block["round"]] = block
    if not point["is_replay"] and COMPUTE_ALONE in entries:
        alone = entries[COMPUTE_ALONE].values()
        names = ("forward_s", "backward_s")
        seconds = {name: median(block[name] for block in alone) for name in names}
        point = {**point, **seconds, "compute_source": "measured"}
    first = next(iter(entries.values()), {})
    return [_row(point, list(own.values()), first) for own in entries.values()]


def _row(point: Line, blocks: Sequence[Line], first: Mapping[int, Line]) -> Line:
    bounds = bounds_of(point)
    compared = [block for block in blocks if block["round"] in first]
    ratios = [block["step_s"] / first[block["round"]]["step_s"] for block in compared]
    loads = _loads(blocks)
    step_s = median(block["step_s"] for block in blocks)
    return {
        **point,
        **loads,
        "entry": blocks[0]["entry"],
        "num_steps": sum(block["num_steps"] for block in blocks),
        "step_s": step_s,
        "ratio": median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        **{name: _combined(blocks, name, median) for name in _WAITS},
        "is_void": point["is_replay"] and (loads["others_use"] or 0) > MAX_REPLAY_USE,
        "note": blocks[-1]["note"],
        **bounds,
        "over_bound": step_s / bounds["bound_s"] if bounds["bound_s"] else None,
        "over_dear_bound": step_s / bounds["dear_bound_s"] if bounds["dear_bound_s"] else None,
    }


def bounds_of(point: Line) -> Line:
    """Return lower bounds on a step; None if the rate or the seconds of compute are unknown.

    - communication_ratio: communication over compute: 2(P-1)/P x bytes / rate / (forward +
      backward), with P links.
    - bound_s: `max(forward + backward, bytes / rate)`: no step that sends these bytes is shorter.
    - dear_bound_s: `max(forward, all-gather) + max(backward, reduce-scatter)`: DeAR's own bound.
    """
    known = [point[name] for name in ("forward_s", "backward_s", "one_way_s")]
    if None in known:
        return dict.fromkeys(("communication_ratio", "bound_s", "dear_bound_s"))
    forward_s, backward_s, one_way_s = known
    return {
        "communication_ratio": 2 * one_way_s / (forward_s + backward_s),
        "bound_s": max(forward_s + backward_s, 2 * one_way_s),
        "dear_bound_s": max(forward_s, one_way_s) + max(backward_s, one_way_s),
    }
