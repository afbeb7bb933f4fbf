"""Files of studies: lines of figures as CSV, and text; a kill leaves each of them whole."""

import csv
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""Column -> a number, a word, True or False; None for what was not measured, an empty cell."""

OTHER_FOLDER = "choose another folder (hydra.run.dir=...), or move that one away"

_NAMED = {"": None, "True": True, "False": False}


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


def read_lines(path: Path, words: Collection[str]) -> list[Line]:
    """Return all whole lines; none if there is no such file.

    Args:
        path: Of a CSV file.
        words: Columns whose cells stay words where they are empty, or look like numbers.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        # A kill may have cut the last one off.
        whole = [line for line in csv.DictReader(file) if None not in line.values()]
    return [
        {name: cell if name in words else _value(cell) for name, cell in line.items()}
        for line in whole
    ]


def _value(cell: str) -> Any:
    if cell in _NAMED:
        return _NAMED[cell]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell
