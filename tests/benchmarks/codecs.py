"""How fast codecs are on one thread of a CPU, or on a CUDA device, next to copying memory.

    python -m tests.benchmarks.codecs
    python -m tests.benchmarks.codecs bf16 int8 int4:block_size=64 --raw codecs.csv
    python -m tests.benchmarks.codecs bf16 fp16 int8 --check
    python -m tests.benchmarks.codecs --device cuda --mib 256

Names are those of all codecs in lightning_dear.compression, options follow a colon. Prints GB of
fp32 numbers a second for encode and decode, and the median of the ratios to a copy of the same
numbers made just before, from memory of the device to memory of the device. Raw repeats go to the
CSV file. On a CUDA device events time what the device does: the host is given time to launch all
kernels before the first of them starts. With --check the command fails, naming the codecs, if
encoding or decoding takes longer beside a copy than LEAST_OF_COPY allows.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import inspect
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import lightning_dear.compression
from lightning_dear.compression.codec import Codec

SHAPES = (1, 4)
"""Numbers of rows into which the same numbers are cut."""

LEAST_OF_COPY = {"fp16": 0.80, "bf16": 0.80, "int8": 0.25}
"""Name -> least speed of either direction, as a share of a copy's, that passes --check."""

HEAD_START_CYCLES = 4_000_000
"""Some 2 ms of a GPU, in which the host launches the kernels of an encode or decode."""


class Repeat(NamedTuple):
    """One encode or decode, and the copy before it."""

    codec: str
    num_rows: int
    direction: str
    nbytes: int
    seconds: float
    copy_s: float

    @property
    def of_copy(self) -> float:
        """Speed as a share of the copy's."""
        return self.copy_s / self.seconds


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


# --- measuring ------------------------------------------------------------------------------------


def _seconds_on_cpu(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _seconds_on_cuda(action: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


SECONDS_ON = {"cpu": _seconds_on_cpu, "cuda": _seconds_on_cuda}


class Buffers:
    """Numbers and where they go; written once, so that no page is touched for the first time.

    Args:
        nbytes: Of fp32 numbers.
        device: Where they are: a key of `SECONDS_ON`.
    """

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        self.device = device
        numbers = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1))
        self.source = numbers.to(device)
        self.target = torch.zeros_like(self.source)

    def measure(self, label: str, codec: Codec, repeats: int) -> Iterator[Repeat]:
        """Encode and decode in turns, a copy before each; the first turn warms up."""
        seconds_of = SECONDS_ON[self.device]
        for num_rows in SHAPES:
            actions = self._actions(codec, num_rows)
            for repeat in range(repeats + 1):
                for direction, action in actions.items():
                    copy_s = seconds_of(lambda: self.target.copy_(self.source))
                    seconds = seconds_of(action)
                    if repeat:
                        nbytes = self.source.nbytes
                        yield Repeat(label, num_rows, direction, nbytes, seconds, copy_s)

    def _actions(self, codec: Codec, num_rows: int) -> dict[str, Callable[[], object]]:
        rows, back = (each.view(num_rows, -1) for each in (self.source, self.target))
        nbytes = codec.wire_bytes(rows.shape[1])
        wire = torch.zeros(num_rows, nbytes, dtype=torch.uint8, device=self.device)
        return {
            "encode": lambda: codec.encode(rows, wire, self._generator_for(codec)),
            "decode": lambda: codec.decode(wire, back, self._generator_for(codec)),
        }

    def _generator_for(self, codec: Codec) -> torch.Generator | None:
        if codec.randomness == "none":
            return None
        return torch.Generator(self.device).manual_seed(7)


# --- telling --------------------------------------------------------------------------------------


def print_table(repeats: list[Repeat]) -> None:
    """One line per codec and shape; GB/s and the ratio to a copy for both directions."""
    print(f"{'codec':28}{'rows':>5}{'encode':>14}{'of copy':>9}{'decode':>14}{'of copy':>9}")
    for (codec, num_rows), ways in _by_shape(repeats).items():
        print(f"{codec:28}{num_rows:>5}" + "".join(map(_cell, ways.values())))
    copy_gbps = median(each.nbytes / each.copy_s for each in repeats) / 1e9
    print(f"copy: {copy_gbps:.2f} GB/s, median of {len(repeats)}")


def _by_shape(repeats: list[Repeat]) -> dict[tuple[str, int], dict[str, list[Repeat]]]:
    """(codec, rows) -> direction -> repeats, in the order of the first of each."""
    shapes: dict[tuple[str, int], dict[str, list[Repeat]]] = {}
    for each in repeats:
        ways = shapes.setdefault((each.codec, each.num_rows), {})
        ways.setdefault(each.direction, []).append(each)
    return shapes


def _cell(repeats: list[Repeat]) -> str:
    gbps = median(each.nbytes / each.seconds for each in repeats) / 1e9
    # A shared machine changes its speed all the time: only neighbours are comparable.
    return f"{gbps:9.2f} GB/s{median(each.of_copy for each in repeats):8.0%} "


def too_slow(repeats: list[Repeat]) -> list[str]:
    """A sentence for each codec, shape and direction that `LEAST_OF_COPY` does not allow."""
    found = []
    for (codec, num_rows), ways in _by_shape(repeats).items():
        least = LEAST_OF_COPY.get(_name_of(codec), 0.0)
        for direction, mine in ways.items():
            share = median(each.of_copy for each in mine)
            if share < least:
                found.append(
                    f"{codec}: {direction} of {num_rows} row(s) runs at {share:.1%} of a copy's"
                    f" speed, less than {least:.0%}."
                )
    return found


def _name_of(label: str) -> str:
    return label.partition(":")[0]


def write(repeats: list[Repeat], path: Path) -> None:
    """All repeats as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Repeat._fields)
        writer.writerows(repeats)


# --- the command line -----------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", help="name or name:option=value,...; none: all")
    parser.add_argument("--mib", type=int, default=64, help="of fp32 numbers")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", choices=sorted(SECONDS_ON), default="cpu")
    limits = ", ".join(f"{name} {least:.0%}" for name, least in LEAST_OF_COPY.items())
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail below these shares of a copy's speed: {limits}".replace("%", "%%"),
    )
    parser.add_argument("--raw", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. Leave it out to use a CPU.")
    options.codecs = options.codecs or sorted(codecs())
    if options.check and not LEAST_OF_COPY.keys() & set(map(_name_of, options.codecs)):
        parser.error(f"--check has limits for {', '.join(LEAST_OF_COPY)} only: name one of them.")
    return options


def main(arguments: Sequence[str]) -> None:
    """Measures and prints.

    Raises:
        SystemExit: For arguments that cannot be, and with --check if a codec is too slow.
    """
    options = _options(arguments)
    torch.set_num_threads(1)
    known = codecs()
    chosen = {label: codec_of(label, known) for label in options.codecs}
    buffers = Buffers(options.mib << 20, options.device)
    repeats = [
        repeat
        for label, codec in chosen.items()
        for repeat in buffers.measure(label, codec, options.repeats)
    ]
    print_table(repeats)
    if options.raw:
        write(repeats, options.raw)
    if options.check and (complaints := too_slow(repeats)):
        raise SystemExit("\n".join(complaints))


if __name__ == "__main__":
    main(sys.argv[1:])
