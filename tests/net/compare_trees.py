"""Trains the same cases in two trees and compares every bit and byte.

    python -m tests.net.compare_trees                          # against 7283dee: some minutes
    python -m tests.net.compare_trees --before FOLDER --only int8 plain

A case is a compressor, a gather and a variant (`train_cases.py`), on two gloo ranks. Compared are
hashes of weights, of the whole optimizer state and of residuals, losses and norms of every step,
what encoding says of itself, and bytes sent, by kind. Of what is refused, the kind of error;
another message is named, and counts as equal. Status 1 if a case differs that is not `MEANT` to.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.net.trees import BEFORE, ROOT, start, tree_of

SCRIPT = Path(__file__).parent / "train_cases.py"
WORLD_SIZE = 2
TIMEOUT_S = 1800
MEANT = {
    "randomk": "both halves of a step draw the same places, and every number has its turn",
}
"""Beginning of the names of cases that differ from `BEFORE` on purpose -> why."""

Results = dict[str, dict[str, Any]]
"""`case, rank` -> what came out."""


def results_of(tree: Path, only: list[str], perturb: str | None = None) -> Results:
    """Trains all cases in `tree`. Blocks.

    Raises:
        RuntimeError: If a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}.json" for rank in range(WORLD_SIZE)]
        common = ["--rendezvous", str(Path(folder) / "rendezvous"), "--tree", str(tree)]
        common += ["--perturb", perturb] if perturb else []
        common += ["--only", *only] if only else []
        ranks = [
            start(
                SCRIPT,
                tree,
                ["--out", str(out), *common],
                {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)},
            )
            for rank, out in enumerate(outs)
        ]
        try:
            codes = [rank.wait(TIMEOUT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"Ranks in {tree} took more than {TIMEOUT_S} s.") from None
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"Ranks in {tree} ended with {codes}.")
        found = [json.loads(out.read_text()) for out in outs]
    return {f"{case}, rank {rank}": one[case] for rank, one in enumerate(found) for case in one}


def differences(before: Results, now: Results) -> list[str]:
    """One line for each case that differs, with what of it does."""
    lines = []
    for case in sorted({*before, *now}):
        ours, theirs = now.get(case), before.get(case)
        if ours is None or theirs is None:
            lines.append(f"{case}: only {'before' if ours is None else 'now'}")
            continue
        keys = [key for key in {**theirs, **ours} if key != "message"]
        changed = [key for key in keys if ours.get(key) != theirs.get(key)]
        if changed:
            said = "; ".join(
                f"{k} {_short(theirs.get(k))} -> {_short(ours.get(k))}" for k in changed
            )
            lines.append(f"{case}: {said}")
    return lines


def meant(lines: Sequence[str]) -> list[str]:
    """Those of `differences` that are there on purpose."""
    return [line for line in lines if line.startswith(tuple(MEANT))]


def notes(before: Results, now: Results) -> list[str]:
    """Cases that are refused, or fail, with other words than before."""
    return [
        f"note: {case} says: {now[case]['message']}"
        for case in sorted(before.keys() & now.keys())
        if "refused" in now[case]
        and before[case].get("message") != now[case]["message"]
        and case.endswith("rank 0")
    ]


def counts(results: Results) -> str:
    """How many cases trained, were refused, and failed."""
    kinds = {"refused": 0, "error": 0}
    for found in results.values():
        for kind in kinds:
            kinds[kind] += kind in found
    trained = len(results) - sum(kinds.values())
    numbers = (one // WORLD_SIZE for one in (len(results), trained, *kinds.values()))
    return "{} cases: {} trained, {} refused, {} failed".format(*numbers)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:10]}..{text[-10:]}"


def main() -> int:
    """Trains in both, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default=BEFORE, help="a commit or a folder")
    parser.add_argument("--after", default=str(ROOT), help="a commit or a folder")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must have")
    parser.add_argument("--perturb", help=argparse.SUPPRESS)
    options = parser.parse_args()
    trees = tree_of(options.before), tree_of(options.after)
    with trees[0] as before, trees[1] as after, ThreadPoolExecutor() as pool:
        both = [
            pool.submit(results_of, before, options.only),
            pool.submit(results_of, after, options.only, options.perturb),
        ]
        theirs, ours = (one.result() for one in both)
    lines = differences(theirs, ours)
    failed = [f"{case}: {one['message']}" for case, one in ours.items() if "error" in one]
    intended = meant(lines) if options.before == BEFORE else []
    lines = [line for line in lines if line not in intended]
    for begin, why in MEANT.items() if intended else ():
        print(f"meant: {begin} differs, since {why}")
    for line in (*notes(theirs, ours), *failed[:3], *lines):
        print(line)
    num_different, num_meant = (
        len({line.split(", rank ")[0] for line in own}) for own in (lines, intended)
    )
    equal = len(ours) // WORLD_SIZE - num_different - num_meant
    also = f", {num_meant} are meant to" if num_meant else ""
    print(f"{counts(ours)}; {equal} equal, {num_different} differ{also}")
    return 1 if lines or not ours else 0


if __name__ == "__main__":
    sys.exit(main())
