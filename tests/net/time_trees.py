"""How long steps take in two trees, in turn, on a machine that others use too.

    python -m tests.net.time_trees --before 7283dee --pairs 30 --csv steps.csv
    python -m tests.net.time_trees --pairs 30 --case digits

A round is three trainings in processes of their own: before, now, and before once more; every other
round goes the other way. Of a round come a pair now/before, in which now is first as often as last,
and a pair of the old tree with itself (A/A). One training is the median of its
steps. Cases: `one` (one rank, a small network), `digits` (two ranks, the default job's network),
`bert` (four ranks that replay BERT), `bert-2x2` (the same on two pretended hosts of two ranks).
"""

from __future__ import annotations

import argparse
import csv
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.net.trees import BEFORE, ROOT, start, tree_of

SCRIPT = Path(__file__).parent / "time_steps.py"
WORLD_SIZES = {"one": 1, "digits": 2, "bert": 4, "bert-2x2": 4}
ORDER = ("before", "now", "again")
TIMEOUT_S = 900


def step_s(case: str, tree: Path) -> float:
    """Median step of one training in `tree`, seconds. Blocks.

    Raises:
        RuntimeError: If a rank fails.
    """
    world_size = WORLD_SIZES[case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # What torchrun sets, by which Lightning knows that ranks were started.
        "TORCHELASTIC_RUN_ID": "net",
        "GROUP_RANK": "0",
    }
    arguments = ["--case", case, "--tree", str(tree)]
    ranks = [
        start(
            SCRIPT,
            tree,
            arguments,
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=TIMEOUT_S)
        codes = [rank.wait(TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"Ranks of {case} in {tree} ended with {codes}.")
    return median(json.loads(said.splitlines()[-1]))


def round_of(case: str, number: int, before: Path, now: Path) -> dict[str, float]:
    """Steps of the three trainings of round `number`, seconds."""
    order = ORDER if number % 2 == 0 else ORDER[::-1]
    return {name: step_s(case, now if name == "now" else before) for name in order}


def ratios_of(rounds: Sequence[dict[str, float]]) -> tuple[list[float], list[float]]:
    """(now over before, before over itself) of every round.

    Each now is compared with the training that came just before it, or just after it, in turn.
    """
    own, same = [], []
    for number, one in enumerate(rounds):
        first, last = ("before", "again") if number % 2 == 0 else ("again", "before")
        own.append(one["now"] / one[first if number % 4 < 2 else last])
        same.append(one["again"] / one["before"])
    return own, same


def summary(case: str, rounds: Sequence[dict[str, float]]) -> str:
    """One line: medians, and how far ratios of a tree with itself are from 1."""
    own, same = ratios_of(rounds)
    off = median(abs(one - 1) for one in same)
    before_ms, now_ms = (1e3 * median(one[name] for one in rounds) for name in ("before", "now"))
    return (
        f"{case}: now/before {median(own):.4f} in {len(rounds)} pairs ({before_ms:.3f} ms before,"
        f" {now_ms:.3f} ms now); A/A {median(same):.4f}, usually off by {off:.2%}"
    )


def main() -> None:
    """Measures and prints; a case's line comes when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="a commit or a folder")
    parser.add_argument("--after", default=str(ROOT), help="a commit or a folder")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--case", choices=tuple(WORLD_SIZES), action="append")
    parser.add_argument("--csv", type=Path, help="where raw rows go")
    options = parser.parse_args()
    rows: list[tuple[str, int, str, float]] = []
    with ExitStack() as stack:
        before, now = (stack.enter_context(tree_of(one)) for one in (options.before, options.after))
        for case in options.case or WORLD_SIZES:
            rounds = []
            for number in range(options.pairs):
                rounds.append(round_of(case, number, before, now))
                rows += [(case, number, name, taken) for name, taken in rounds[-1].items()]
                if options.csv is not None:
                    _write(options.csv, rows)
            print(summary(case, rounds), flush=True)


def _write(path: Path, rows: Sequence[tuple[str, int, str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "round", "training", "median_step_s"])
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
