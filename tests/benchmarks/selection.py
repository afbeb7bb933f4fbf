"""How fast Ok-Topk finds what a rank sends, on one thread of a CPU, next to torch's topk.

    python -m tests.benchmarks.selection
    python -m tests.benchmarks.selection --numel 4000000 --repeats 20 --raw selection.csv
    python -m tests.benchmarks.selection --check

A selection is what a sparse bucket does before anything is sent: residual + gradient, the places of
what is large, the numbers there, and zeros in their stead. Large is what reaches the threshold that
was exact for other numbers of the same kind ("reused"), or the k-th largest number ("exact").

Prints milliseconds for both, and the median of the ratios of `x.abs().topk(k, sorted=False)` of
the same numbers, just before, to the selection. Raw repeats go to the CSV file. With --check the
command fails, naming the rows, if a selection is slower than LEAST_TIMES_FASTER allows, or if any
finds fewer or more numbers than a threshold may.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from lightning_dear.compression import OkTopk
from lightning_dear.compression.selectors import FEWEST, MOST, LocalThreshold
from lightning_dear.exchange.sparse.entries import Entries, Unsent
from tests.compression.inputs import KINDS

Result = TypeVar("Result")

INPUTS = ("normal", "heavy-tailed")
"""Kinds of numbers, of which both residual and gradient are."""

DENSITIES = (0.01, 0.001)

IS_EXACT = {"reused": False, "exact": True}
"""Threshold -> whether it is set anew."""


class Row(NamedTuple):
    """What a line of the table is about."""

    kind: str
    density: float
    threshold: str

    @property
    def label(self) -> str:
        """For a sentence."""
        return f"{self.kind} input, {self.density:g} of the numbers, {self.threshold} threshold"


LEAST_TIMES_FASTER = {Row("normal", 0.01, "reused"): 3.0}
"""Row -> how many times faster than topk it is at least, or --check fails."""


class Repeat(NamedTuple):
    """One selection, and the topk before it."""

    kind: str
    density: float
    threshold: str
    numel: int
    k: int
    num_found: int
    seconds: float
    topk_s: float

    @property
    def row(self) -> Row:
        """Its line of the table."""
        return Row(self.kind, self.density, self.threshold)

    @property
    def of_k(self) -> float:
        """How many numbers were found, as a share of those wanted."""
        return self.num_found / self.k

    @property
    def times_faster(self) -> float:
        """Speed over that of topk."""
        return self.topk_s / self.seconds


# --- measuring ------------------------------------------------------------------------------------


def _timed(action: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds, and what came of it, which is freed later."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


class Step:
    """A bucket of one rank, of which the same step is made again and again.

    Args:
        kind: Of numbers: a key of `KINDS`.
        numel: How many there are.
    """

    def __init__(self, kind: str, numel: int) -> None:
        draw = partial(KINDS[kind], torch.Generator().manual_seed(1), numel)
        self.kind, self.numel = kind, numel
        self._earlier = draw() + draw()
        self._gradients, residual = draw(), draw()
        self._worker = Unsent(numel, torch.device("cpu"))
        self._worker.kept["residual"].copy_(residual)
        self._whole = residual.add_(self._gradients)

    def measure(self, density: float, repeats: int) -> Iterator[Repeat]:
        """Selections with both thresholds in turns, a topk before each; the first turn warms up."""
        k = OkTopk(density=density).entries(self.numel)
        threshold = LocalThreshold()
        threshold.find(self._earlier, k, is_exact=True)
        threshold.commit()
        for repeat in range(repeats + 1):
            for name, is_exact in IS_EXACT.items():
                topk_s, _ = _timed(lambda: self._whole.abs().topk(k, sorted=False))
                seconds, found = _timed(partial(self._select, threshold, k, is_exact=is_exact))
                self._worker.discard()
                if repeat:
                    counts = self.numel, k, len(found.places)
                    yield Repeat(self.kind, density, name, *counts, seconds, topk_s)

    def _select(self, threshold: LocalThreshold, k: int, *, is_exact: bool) -> Entries:
        """What is sent, taken out of what is pending; neither that nor the threshold counts."""
        waiting = self._worker.accumulate(self._gradients, None)
        found = Entries(*threshold.find(waiting, k, is_exact=is_exact))
        waiting.index_fill_(0, found.places, 0.0)
        return found


# --- telling --------------------------------------------------------------------------------------


def print_table(repeats: list[Repeat]) -> None:
    """One line per input, density and threshold."""
    print(
        f"{'input':14}{'density':>8}  {'threshold':10}{'count / k':>10}{'ms':>9}{'topk ms':>9}"
        f"{'times faster':>14}"
    )
    for row, mine in _by_row(repeats).items():
        of_k, seconds, topk_s, times_faster = (
            median(getattr(each, name) for each in mine)
            for name in ("of_k", "seconds", "topk_s", "times_faster")
        )
        print(
            f"{row.kind:14}{row.density:>8g}  {row.threshold:10}{of_k:>10.3f}"
            f"{seconds * 1e3:>9.2f}{topk_s * 1e3:>9.2f}{times_faster:>14.2f}"
        )
    print(f"{repeats[0].numel:,} numbers, median of {len(repeats) // len(_by_row(repeats))}")


def _by_row(repeats: list[Repeat]) -> dict[Row, list[Repeat]]:
    """Row -> repeats, in the order of the first of each."""
    rows: dict[Row, list[Repeat]] = {}
    for each in repeats:
        rows.setdefault(each.row, []).append(each)
    return rows


def complaints(repeats: list[Repeat]) -> list[str]:
    """A sentence for each row that is too slow, or that finds too few or too many numbers."""
    found = []
    for row, mine in _by_row(repeats).items():
        # A shared machine changes its speed all the time: only neighbours are comparable.
        times_faster = median(each.times_faster for each in mine)
        least = LEAST_TIMES_FASTER.get(row, 0.0)
        if times_faster < least:
            found.append(
                f"{row.label}: {times_faster:.2f} times faster than topk, less than {least:g}."
            )
        outside = [each.of_k for each in mine if not FEWEST <= each.of_k <= MOST]
        if outside:
            found.append(
                f"{row.label}: finds {outside[0]:.3f} k numbers, not {FEWEST:.3f} to {MOST:.3f} k."
            )
    return found


def write(repeats: list[Repeat], path: Path) -> None:
    """All repeats as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Repeat._fields)
        writer.writerows(repeats)


# --- the command line -----------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000, help="numbers of the bucket")
    parser.add_argument("--repeats", type=int, default=9)
    limits = ", ".join(f"{row.label}: {least:g}" for row, least in LEAST_TIMES_FASTER.items())
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail where fewer times faster than topk than this: {limits}; or where the count is"
        f" not {FEWEST:.3f} to {MOST:.3f} k",
    )
    parser.add_argument("--raw", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    for name in ("numel", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}.")
    return options


def main(arguments: Sequence[str]) -> None:
    """Measures and prints.

    Raises:
        SystemExit: For arguments that cannot be, and with --check if there are complaints.
    """
    options = _options(arguments)
    torch.set_num_threads(1)
    repeats: list[Repeat] = []
    for kind in INPUTS:
        step = Step(kind, options.numel)
        for density in DENSITIES:
            repeats += step.measure(density, options.repeats)
    print_table(repeats)
    if options.raw:
        write(repeats, options.raw)
    if options.check and (sentences := complaints(repeats)):
        raise SystemExit("\n".join(sentences))


if __name__ == "__main__":
    main(sys.argv[1:])
