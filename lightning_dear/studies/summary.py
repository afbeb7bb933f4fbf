"""From steps to blocks and from blocks to rows; and both as lines of raw.csv and its siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from lightning_dear.studies.files import Line, read_lines, typed
from lightning_dear.studies.records import (
    COMPUTE_ALONE,
    Block,
    Load,
    Point,
    RankBlock,
    Row,
    Step,
)

MAX_REPLAY_USE = 0.6
"""Share of the machine above which a replayed model's ranks wait for the CPU, not for the link."""

_LAST = 1_000_000
"""Number of `compute alone`, which is no competitor."""

_WAITS = ("compute_s", "exposed_reduce_scatter_s", "exposed_all_gather_s")

_LOADS: Mapping[str, Callable[[list[Any]], Any]] = {
    "peak_memory_bytes": max,
    "machine_use": max,
    "others_use": max,
    "num_buckets": lambda known: known[-1],
}
"""What is said of several ranks or blocks; of others their mean."""


def block_of(
    entry: str,
    ranks: Sequence[RankBlock],
    *,
    number: int = 0,
    round: int = 0,
    place: int = 0,
    note: str = "",
) -> Block:
    """Return what all ranks' blocks come to, in six digits: a clock tells no more.

    A step is the mean over its ranks. Ranks wait for each other and keep pace, but a rank that is
    late in one step is short in the next. The longest of each step would therefore add up to more
    than the time that passed, by up to 2 % where ranks are loosely coupled, and by nothing under
    DDP.

    Args:
        entry: Name of the entry.
        ranks: With as many steps each.
        number: Its place among the entries.
        round: As in `Block`.
        place: In the round.
        note: For people.
    """
    columns = zip(*(rank.steps for rank in ranks), strict=True)
    steps = [Step(**_each(Step, column, mean)) for column in columns]
    figures = {
        **_each(Step, steps, median),
        "compute_s": _of_all([step.rest_s for step in steps], median),
        **_loads(ranks),
    }
    return Block(
        **{name: _rounded(value) for name, value in figures.items()},
        entry=entry,
        number=_LAST if entry == COMPUTE_ALONE else number,
        round=round,
        place=place,
        num_steps=len(steps),
        note=note,
    )


def _each(
    kind: type[Step], records: Sequence[Any], how: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Each figure of all records; None where one has none."""
    names = [field.name for field in fields(kind)]
    return {name: _of_all([getattr(one, name) for one in records], how) for name in names}


def _of_all(values: list[Any], how: Callable[[list[Any]], Any]) -> Any:
    return None if None in values else how(values)


def _loads(records: Sequence[Load]) -> dict[str, Any]:
    """Each figure of those that have one."""
    figures = {}
    for field in fields(Load):
        known = [one for record in records if (one := getattr(record, field.name)) is not None]
        figures[field.name] = _LOADS.get(field.name, mean)(known) if known else None
    return figures


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def summarize(point: Point, blocks: Iterable[Block]) -> list[Row]:
    """Return a row for each entry that has a block; those in which it was tuned do not count.

    Args:
        point: What the blocks share; of a model that computes, `compute alone` says how fast.
        blocks: Of any entries and rounds; a broken-off last round is fine.
    """
    entries: dict[str, dict[int, Block]] = {}
    for block in sorted(blocks, key=lambda one: one.number):
        if block.round >= 0:
            entries.setdefault(block.entry, {})[block.round] = block
    first = next((own for own in entries.values() if _any(own).number == 0), {})
    if not point.is_replay and COMPUTE_ALONE in entries:
        alone = entries[COMPUTE_ALONE].values()
        point = replace(
            point,
            compute_source="measured",
            alone_forward_s=median(block.forward_s for block in alone),
            alone_backward_s=median(block.backward_s for block in alone),
        )
    return [_row(point, own, first) for own in entries.values()]


def _any(own: Mapping[int, Block]) -> Block:
    return next(iter(own.values()))


def _row(point: Point, own: Mapping[int, Block], first: Mapping[int, Block]) -> Row:
    blocks = list(own.values())
    ratios = [one.step_s / first[one.round].step_s for one in blocks if one.round in first]
    loads = _loads(blocks)
    return Row(
        point=point,
        entry=blocks[0].entry,
        num_steps=sum(block.num_steps for block in blocks),
        step_s=median(block.step_s for block in blocks),
        ratio=median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        is_void=point.is_replay and (loads["others_use"] or 0) > MAX_REPLAY_USE,
        note=blocks[-1].note,
        **{name: _of_all([getattr(one, name) for one in blocks], median) for name in _WAITS},
        **loads,
    )


# --- lines --------------------------------------------------------------------------------------


def _point_columns(point: Point) -> dict[str, Any]:
    columns = asdict(point)
    return {
        "point": columns.pop("label"),
        **columns,
        "stands_for_mbit": point.stands_for_mbit,
    }


def block_line(point: Point, block: Block) -> dict[str, Any]:
    """Return a block's line of blocks.csv, which is all that a report needs."""
    return {**_point_columns(point), **asdict(block)}


def raw_lines(point: Point, block: Block, ranks: Sequence[RankBlock]) -> list[dict[str, Any]]:
    """Return a line of raw.csv for every rank and step of one block, in six digits."""
    columns = _point_columns(point)
    place = {"round": block.round, "place": block.place, "entry": block.entry}
    return [
        {
            **{**columns, **place, "rank": rank.rank, "step": number},
            **{name: _rounded(value) for name, value in asdict(step).items()},
        }
        for rank in ranks
        for number, step in enumerate(rank.steps)
    ]


def summary_line(row: Row) -> dict[str, Any]:
    """Return one row's line of summary.csv, with its bounds."""
    columns = _point_columns(row.point)
    seconds = {name: columns.pop(f"alone_{name}") for name in ("forward_s", "backward_s")}
    figures = {field.name: getattr(row, field.name) for field in fields(row)}
    del figures["point"]
    return {
        **columns,
        **seconds,
        **figures,
        **row.point.bounds._asdict(),
        "over_bound": row.over_bound,
        "over_dear_bound": row.over_dear_bound,
    }


def read_blocks(folder: Path) -> dict[Point, list[Block]]:
    """Return what `dear-bench` has measured in a folder, point by point.

    Reads blocks.csv, or raw.csv where an earlier version has left nothing else; what that version
    wrote into summary.csv alone is taken from there.

    Raises:
        ValueError: If there is neither, or if they are of another program.
    """
    blocks, steps = (read_lines(folder / name) for name in ("blocks.csv", "raw.csv"))
    lines: Sequence[Line] = blocks or steps
    if not lines or not {"point", "round", "entry", "step_s"} <= lines[0].keys():
        raise ValueError(f"{folder} has no blocks.csv or raw.csv that dear-bench has written to.")
    lines = blocks or _blocks_of_steps(steps)
    if "number" not in lines[0]:
        lines = _completed(lines, read_lines(folder / "summary.csv"))
    points: dict[Point, list[Block]] = {}
    for line in lines:
        point = typed(Point, {**line, "label": line["point"]})
        points.setdefault(point, []).append(typed(Block, line))
    return points


def _blocks_of_steps(lines: Sequence[Line]) -> list[Line]:
    """Lines of blocks.csv from those of raw.csv, where each block's stand together."""
    blocks: list[Line] = []
    places = ("point", "round", "place", "entry")
    for _, group in groupby(lines, key=lambda line: [line.get(name) for name in places]):
        own = list(group)
        ranks: dict[str, list[Step]] = {}
        for line in own:
            ranks.setdefault(line["rank"], []).append(typed(Step, line))
        of_ranks = [RankBlock(rank=int(rank), steps=tuple(ranks[rank])) for rank in ranks]
        figures = asdict(block_of(own[0]["entry"], of_ranks))
        known = {field.name for field in fields(Step)} | {"compute_s", "num_steps"}
        texts = {name: _text(value) for name, value in figures.items() if name in known}
        blocks.append({**own[0], **texts})
    return blocks


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _completed(lines: Sequence[Line], rows: Sequence[Line]) -> list[Line]:
    """An earlier version's lines with what it wrote of each point and entry into summary.csv."""
    known = {(row["point"], row["entry"]): row for row in rows}
    numbers: dict[str, int] = {COMPUTE_ALONE: _LAST}
    completed: list[Line] = []
    for line in lines:
        row = known.get((line["point"], line["entry"]), {})
        number = numbers.setdefault(line["entry"], len(numbers) - 1)
        completed.append({**row, **_renamed(row), **line, "number": str(number)})
    return completed


def _renamed(row: Line) -> dict[str, str]:
    """What has another name in a block than in a row of an earlier version."""
    forward_s, backward_s = row.get("forward_s", ""), row.get("backward_s", "")
    ratio, one_way_s = row.get("communication_ratio"), ""
    if ratio:
        one_way_s = str(float(ratio) * (float(forward_s) + float(backward_s)) / 2)
    others_use = row.get("machine_use", "") if row.get("is_void") == "True" else "0"
    return {
        "alone_forward_s": forward_s,
        "alone_backward_s": backward_s,
        "one_way_s": one_way_s,
        "others_use": others_use,
    }
