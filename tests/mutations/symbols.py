"""Where a function, class or constant of the package is written, read off its syntax trees."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Lines:
    """Lines `first` to `last` of a file, counted from 1, decorators included."""

    path: Path
    module: str
    first: int
    last: int


def lines_of(symbol: str, package: Path) -> list[Lines]:
    """The lines of `symbol`: more than one piece where a property has a setter.

    Args:
        symbol: A qualified name, such as "BucketRound.finish". Where several files have one of
            that name, with a room or module in front: "engine:BucketRound.finish". With nothing
            behind the colon it is the whole module: "collectives.factory:".
        package: The package's folder. Its files are read once.

    Raises:
        ValueError: If no file, or more than one, has such a symbol.
    """
    room, _, name = symbol.rpartition(":")
    start = f"{room}." if room else ""
    pieces = [lines for lines in _index(package)[name] if f"{lines.module}.".startswith(start)]
    files = sorted({lines.module for lines in pieces})
    if len(files) != 1:
        raise ValueError(f"{symbol} is in {files or 'no file'}")
    return pieces


@cache
def _index(package: Path) -> dict[str, list[Lines]]:
    index: dict[str, list[Lines]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        text = path.read_text()
        index[""].append(Lines(path, module, 1, len(text.splitlines())))
        for name, first, last in _named(ast.parse(text), ""):
            index[name].append(Lines(path, module, first, last))
    return index


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of what is defined within `node`, at any depth."""
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(one.lineno for one in (child, *child.decorator_list))
            yield prefix + child.name, first, child.end_lineno or first
            inside = f"{prefix}{child.name}."
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            # Constants, fields, and local variables too, which nobody names.
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, child.lineno, child.end_lineno or child.lineno
        yield from _named(child, inside)
