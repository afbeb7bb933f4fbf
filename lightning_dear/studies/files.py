"""raw.csv, blocks.csv and summary.csv: every step, every block and every row."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from lightning_dear.studies.records import Block, Point, Row, Step


def point_columns(point: Point) -> dict[str, Any]:
    """Return what stands in every line of both files: what was measured on what."""
    bounds = point.bounds
    return {
        "point": point.label,
        "model": point.model,
        "is_replay": point.is_replay,
        "scale": point.scale,
        "link_rate_mbit": point.link_rate_mbit,
        "stands_for_mbit": None
        if point.link_rate_mbit is None
        else point.link_rate_mbit * point.scale,
        "rate_source": point.rate_source,
        "world_size": bounds.world_size,
    }


def _block_columns(point: Point, block: Block) -> dict[str, Any]:
    place = {"round": block.round_number, "place": block.place, "entry": block.entry}
    return {**point_columns(point), **place}


def block_line(point: Point, block: Block) -> dict[str, Any]:
    """Return a line for a block: medians of its steps; None where a step has no figure."""
    figures: dict[str, Any] = {}
    for one in fields(Step):
        values = [getattr(step, one.name) for step in block.steps]
        figures[one.name] = None if None in values else median(values)
    return {**_block_columns(point, block), **_figures(Step(**figures))}


def raw_lines(point: Point, block: Block) -> list[dict[str, Any]]:
    """Return a line for every rank and step of one block; seconds to six digits."""
    return [
        {**_block_columns(point, block), "rank": rank.rank, "step": number, **_figures(step)}
        for rank in block.ranks
        for number, step in enumerate(rank.steps)
    ]


def _figures(step: Step) -> dict[str, Any]:
    # A clock tells no more, and the file has hundreds of thousands of them.
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in asdict(step).items()
    }


def summary_line(row: Row) -> dict[str, Any]:
    """Return one row with its bounds, flat."""
    bounds = row.point.bounds
    figures = {field.name: getattr(row, field.name) for field in fields(row)}
    del figures["point"]
    return {
        **point_columns(row.point),
        **figures,
        "model_bytes": bounds.model_bytes,
        "compute_source": row.point.compute_source,
        "forward_s": bounds.forward_s,
        "backward_s": bounds.backward_s,
        "rig": row.point.rig,
        "communication_ratio": bounds.communication_ratio,
        "bound_s": bounds.step_s,
        "over_bound": row.over_bound,
        "dear_bound_s": bounds.dear_s,
        "over_dear_bound": row.over_dear_bound,
    }


class RawFile:
    """raw.csv, and blocks.csv beside it, written so that an interrupted run loses nothing.

    Args:
        path: Of the first; created with the first block.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, point: Point, block: Block) -> None:
        """Append one block's steps, and their medians."""
        append_lines(self._path, raw_lines(point, block))
        append_lines(self._path.with_name("blocks.csv"), [block_line(point, block)])


def steps_file(folder: Path) -> Path:
    """What a run has left of its steps: raw.csv, or blocks.csv, which is all that recipes keep.

    There a line is a block: medians of its steps, of which each is the mean over its ranks.
    """
    raw = folder / "raw.csv"
    return raw if raw.exists() else folder / "blocks.csv"


def check_is_new(folder: Path) -> None:
    """Refuse a folder that an earlier run has written to; its steps would be taken for this run's.

    Raises:
        ValueError: If there is a raw.csv.
    """
    if (folder / "raw.csv").exists():
        raise ValueError(
            f"{folder} has the raw.csv of an earlier run: give another folder (hydra.run.dir=...),"
            " or move that one away."
        )


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines, under titles if the file is new; None becomes an empty cell."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(lines)


def write_summary(path: Path, rows: Sequence[Row]) -> None:
    """Write all rows in place of what was there, all at once; nothing for no rows."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    if rows:
        append_lines(part, [summary_line(row) for row in rows])
        part.replace(path)
    else:
        path.unlink(missing_ok=True)


def write_table(path: Path, text: str) -> None:
    """Write `text` and a line's end in place of what was there, all at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{text}\n")
    part.replace(path)


def rigs_of(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the emulated hosts and links that rows of a summary.csv name, for people."""
    return "; ".join(filter(None, dict.fromkeys(row.get("rig") for row in rows)))


def join_csv(path: Path, parts: Sequence[Path]) -> None:
    """Write the lines of files with the same titles one after the other; nothing for no parts."""
    texts = [part.read_text().splitlines() for part in parts]
    if texts:
        lines = [texts[0][0], *(line for text in texts for line in text[1:])]
        path.write_text("\n".join(lines) + "\n")
