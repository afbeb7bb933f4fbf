"""CSV and text files of studies. A kill at any moment leaves each file readable."""

import csv
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""Column -> a number, text, True or False. None means not measured, and is an empty cell."""

OTHER_FOLDER = "Choose another folder (hydra.run.dir=...), or move that one away."
"""Last sentence of errors on a folder with files of another run."""

_NAMED = {"": None, "True": True, "False": False}


def append_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a CSV file; a new file gets titles first. None becomes an empty cell.

    Raises:
        ValueError: If the file has other columns.
    """
    titles = list(lines[0])
    with path.open("a+", newline="") as file:
        file.seek(0)
        if next(csv.reader(file), titles) != titles:
            raise ValueError(f"{path} has columns of another version. {OTHER_FOLDER}")
        file.seek(0, 2)
        writer = csv.DictWriter(file, titles)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(lines)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a CSV file atomically by one with these lines; without lines, remove it."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    if lines:
        append_lines(part, lines)
        part.replace(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically by one with `text` and a newline."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{text}\n")
    part.replace(path)


def read_rows(path: Path) -> list[Line]:
    """Return the rows of a CSV file as text; an empty list if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_lines(path: Path, words: Collection[str]) -> list[Line]:
    """Return all complete lines of a CSV file; an empty list if there is no such file.

    Args:
        path: Path of the file.
        words: Columns that are text, even if a cell is empty or looks like a number.
    """
    # A kill may have cut off the last line, which then lacks cells.
    whole = [line for line in read_rows(path) if None not in line.values()]
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
