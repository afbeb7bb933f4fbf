"""Files of studies: lines of figures as CSV, and text; a kill leaves each of them whole."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Line = Mapping[str, str]
"""Column -> text; empty for None."""

_KINDS: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}

OTHER_FOLDER = "choose another folder (hydra.run.dir=...), or move that one away"


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines, under titles if the file is new; None becomes an empty cell.

    Raises:
        ValueError: If the file has other columns.
    """
    titles = list(lines[0])
    with path.open("a+", newline="") as file:
        file.seek(0)
        known = next(csv.reader(file), titles)
        if known != titles:
            raise ValueError(f"{path} has columns of another version: {OTHER_FOLDER}.")
        file.seek(0, 2)
        writer = csv.DictWriter(file, titles)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(lines)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write all lines in place of what was there, all at once; no file for no lines."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    if lines:
        append_lines(part, lines)
        part.replace(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` and a line's end in place of what was there, all at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{text}\n")
    part.replace(path)


def read_lines(path: Path) -> list[dict[str, str]]:
    """Return all whole lines; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        # A kill may have cut the last one off.
        return [line for line in csv.DictReader(file) if None not in line.values()]


def read_records(path: Path, kind: type[T]) -> list[T]:
    """Return a record of a dataclass for each line; none if there is no such file.

    Raises:
        ValueError: If the file has other columns than the dataclass has fields.
    """
    lines = read_lines(path)
    if lines and list(lines[0]) != [field.name for field in fields(kind)]:  # type: ignore[arg-type]
        raise ValueError(
            f"{path} is of another program or version: its columns are"
            f" {', '.join(map(str, lines[0]))}; {OTHER_FOLDER}."
        )
    return [typed(kind, line) for line in lines]


def typed(kind: type[T], line: Line) -> T:
    """Return a line as a record of a dataclass; what the line lacks has its default."""
    known = {one.name: str(one.type) for one in fields(kind) if one.name in line}  # type: ignore[arg-type]
    return kind(**{name: _value(form, line[name]) for name, form in known.items()})


def _value(form: str, text: str) -> Any:
    kind, _, or_none = form.partition(" | ")
    return None if or_none and text == "" else _KINDS[kind](text)


def rigs_of(lines: Iterable[Line]) -> str:
    """Return the emulated hosts and links that lines of a summary.csv name, for people."""
    return "; ".join(filter(None, dict.fromkeys(line.get("rig") for line in lines)))
