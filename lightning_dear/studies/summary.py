"""From steps to blocks, lines of blocks.csv; and from blocks to rows, lines of summary.csv.

Both begin with what all entries of a comparison share, its point:

- point: the overrides that set it apart from other points; empty for a single one.
- model: its name, as people know it. is_replay: whether it waits instead of computing. scale: what
  its bytes were divided by. model_bytes: all parameters of the scaled model, as they travel
  uncompressed.
- world_size: ranks. rig: emulated hosts and their links in one line; empty on others.
- link_rate_mbit: rate of each link, 10^6 bits per second, if it is known. rate_source: "shaped", or
  "assumed" in the cluster's file. stands_for_mbit: rate at which the whole model would take as
  long.
- compute_source: "profile", "measured" or "not measured"; forward_s and backward_s: without
  communication, if that is known (in a block's line: the block's own).
- one_way_s: what each link takes to reduce-scatter, or to all-gather, the model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from lightning_dear.studies.block import FIGURES, RankBlock
from lightning_dear.studies.files import Line
from lightning_dear.studies.rounds import Turn

COMPUTE_ALONE = "compute alone"
"""Name of the row that every rank trains for itself, with nothing sent."""

WORDS = frozenset({"point", "model", "entry", "note"})
"""Columns of both files that are no figures, whatever stands in them."""

MAX_REPLAY_USE = 0.6
"""Share of the machine above which a replayed model's ranks wait for the CPU, not for the link."""

_WAITS = ("compute_s", "exposed_reduce_scatter_s", "exposed_all_gather_s")

_LOADS: Mapping[str, Callable[[list[Any]], Any]] = {
    "host_bytes": mean,
    "peak_memory_bytes": max,
    "cpu_per_rank": mean,
    "machine_use": max,
    "others_use": max,
    "codec_s": mean,
    "num_buckets": lambda known: known[-1],
}
"""What is said of several ranks or blocks."""


def block_of(turn: Turn, ranks: Sequence[RankBlock], number: int = 0, note: str = "") -> Line:
    """Return what all ranks' blocks come to, to the microsecond: a clock tells no more.

    A step is the mean over its ranks, and a figure the median of its steps; compute_s is what is
    none of the two waits. Ranks wait for each other and keep pace, but a rank that is late in one
    step is short in the next. The longest of each step would therefore add up to more than the time
    that passed, by up to 2 % where ranks are loosely coupled, and by nothing under DDP.

    Args:
        turn: Whose block it is, and when.
        ranks: With as many steps each.
        number: Its place among the entries, from 0; ratios are to the first.
        note: What was found by tuning, for people.
    """
    steps = np.mean([rank.steps for rank in ranks], axis=0)
    columns = dict(zip(FIGURES, steps.T, strict=True))
    _, *waits = _WAITS
    columns["compute_s"] = columns["step_s"] - sum(columns[name] for name in waits)
    figures = {name: float(np.median(column)) for name, column in columns.items()}
    figures |= _loads([rank.load for rank in ranks])
    known = {name: _rounded(value) for name, value in figures.items()}
    return {**known, **turn._asdict(), "number": number, "num_steps": len(steps), "note": note}


def _loads(lines: Sequence[Line]) -> Line:
    return {name: _combined(lines, name, how) for name, how in _LOADS.items()}


def _combined(lines: Sequence[Line], name: str, how: Callable[[list[Any]], Any]) -> Any:
    """One figure of those that have it; None if none has."""
    known = [line[name] for line in lines if line[name] is not None]
    return how(known) if known else None


def _rounded(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return value if isinstance(value, int) else round(float(value), 6)


def raw_lines(point: Line, block: Line, ranks: Sequence[RankBlock]) -> list[Line]:
    """Return a line of raw.csv for every rank and step of one block, to the microsecond."""
    place = {name: block[name] for name in ("round", "place", "entry")}
    return [
        {
            **{**point, **place, "rank": rank.rank, "step": number},
            **{name: _rounded(value) for name, value in zip(FIGURES, step, strict=True)},
        }
        for rank in ranks
        for number, step in enumerate(rank.steps)
    ]


def summarize(point: Line, blocks: Iterable[Line]) -> list[Line]:
    """Return a row for each entry that has a block; those in which it was tuned do not count.

    Beside medians of the rounds a row has ratio: step time over the first entry's, median, lowest
    and highest of the rounds; is_void: whether a replayed model's ranks had too little CPU to wait
    as an accelerator does; the bounds of `bounds_of`; and step time over two of these.

    Args:
        point: What the blocks share; of a model that computes, `compute alone` says how fast.
        blocks: Of any entries and rounds; a broken-off last round is fine.
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
    """Return how short a step could be; None where a rate or the seconds of compute are unknown.

    - communication_ratio: communication over compute: 2(P-1)/P x bytes / rate / (forward +
      backward), P links.
    - bound_s: `max(forward + backward, bytes / rate)`: nothing that moves these bytes is faster.
    - dear_bound_s: DeAR's own: `max(forward, all-gather) + max(backward, reduce-scatter)`.
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
