"""How fast codecs are on one thread of a CPU, next to copying memory.

    python -m tests.benchmarks.codecs
    python -m tests.benchmarks.codecs bf16 int8 int4:block_size=64 --raw codecs.csv

Names are those of all codecs in lightning_dear.compression, options follow a colon. Prints GB of
fp32 numbers a second for encode and decode, and the median of the ratios to a copy of the same
numbers made just before. Raw repeats go to the CSV file.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import lightning_dear.compression
from lightning_dear.compression.codec import Codec

SHAPES = (1, 4)
"""Numbers of rows into which the same numbers are cut."""


class Repeat(NamedTuple):
    """One encode or decode, and the copy before it."""

    codec: str
    num_rows: int
    direction: str
    nbytes: int
    seconds: float
    copy_s: float


def codecs() -> dict[str, type[Codec]]:
    """All codecs by name: every concrete class in a module of lightning_dear.compression."""
    package = lightning_dear.compression
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return {
        value.name: value
        for info in modules
        for value in vars(importlib.import_module(info.name)).values()
        if inspect.isclass(value) and issubclass(value, Codec)
        if hasattr(value, "name") and not inspect.isabstract(value)
    }


def codec_of(text: str, known: dict[str, type[Codec]]) -> Codec:
    """The codec that `name` or `name:option=value,option=value` means."""
    name, _, options = text.partition(":")
    if name not in known:
        raise SystemExit(f"Unknown codec {name!r}; valid names: {', '.join(sorted(known))}.")
    pairs = [option.split("=", 1) for option in options.split(",") if option]
    return known[name](**{key: _value_of(value) for key, value in pairs})


def _value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Buffers:
    """Numbers and where they go; written once, so that no page is touched for the first time."""

    def __init__(self, nbytes: int) -> None:
        self.source = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1))
        self.target = torch.zeros_like(self.source)

    def measure(self, label: str, codec: Codec, repeats: int) -> Iterator[Repeat]:
        """Encode and decode in turns, a copy before each; the first turn warms up."""
        for num_rows in SHAPES:
            actions = self._actions(codec, num_rows)
            for repeat in range(repeats + 1):
                for direction, action in actions.items():
                    copy_s = _seconds_of(lambda: self.target.copy_(self.source))
                    seconds = _seconds_of(action)
                    if repeat:
                        nbytes = self.source.nbytes
                        yield Repeat(label, num_rows, direction, nbytes, seconds, copy_s)

    def _actions(self, codec: Codec, num_rows: int) -> dict[str, Callable[[], object]]:
        rows, back = (each.view(num_rows, -1) for each in (self.source, self.target))
        nbytes = codec.wire_bytes(rows.shape[1])
        wire = torch.zeros(num_rows, nbytes, dtype=torch.uint8)
        return {
            "encode": lambda: codec.encode(rows, wire, _generator_for(codec)),
            "decode": lambda: codec.decode(wire, back, _generator_for(codec)),
        }


def _generator_for(codec: Codec) -> torch.Generator | None:
    return None if codec.randomness == "none" else torch.Generator().manual_seed(7)


def _seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def print_table(repeats: list[Repeat]) -> None:
    """One line per codec and shape; GB/s and the ratio to a copy for both directions."""
    print(f"{'codec':28}{'rows':>5}{'encode':>14}{'of copy':>9}{'decode':>14}{'of copy':>9}")
    for codec, num_rows in dict.fromkeys((each.codec, each.num_rows) for each in repeats):
        mine = [each for each in repeats if (each.codec, each.num_rows) == (codec, num_rows)]
        cells = (
            _cell([each for each in mine if each.direction == way]) for way in ("encode", "decode")
        )
        print(f"{codec:28}{num_rows:>5}" + "".join(cells))
    copy_gbps = median(each.nbytes / each.copy_s for each in repeats) / 1e9
    print(f"copy: {copy_gbps:.2f} GB/s, median of {len(repeats)}")


def _cell(repeats: list[Repeat]) -> str:
    gbps = median(each.nbytes / each.seconds for each in repeats) / 1e9
    # A shared machine changes its speed all the time: only neighbours are comparable.
    ratio = median(each.copy_s / each.seconds for each in repeats)
    return f"{gbps:9.2f} GB/s{ratio:8.0%} "


def write(repeats: list[Repeat], path: Path) -> None:
    """All repeats as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Repeat._fields)
        writer.writerows(repeats)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", help="name or name:option=value,...; none: all")
    parser.add_argument("--mib", type=int, default=64, help="of fp32 numbers")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--raw", type=Path, help="CSV file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = codecs()
    buffers = Buffers(options.mib << 20)
    repeats = [
        repeat
        for label in options.codecs or sorted(known)
        for repeat in buffers.measure(label, codec_of(label, known), options.repeats)
    ]
    print_table(repeats)
    if options.raw:
        write(repeats, options.raw)


if __name__ == "__main__":
    main()
