"""`python -m tests.mutations [NAME ...]`: every mutation, or those whose names contain a NAME."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutations.mutation import copy_tree, judge
from tests.mutations.mutations import MUTATIONS


def main(names: list[str]) -> int:
    """Prints a line per mutation; returns how many no test noticed."""
    chosen = [one for one in MUTATIONS if not names or any(name in one.name for name in names)]
    num_unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        for number, mutation in enumerate(chosen, start=1):
            verdict = judge(mutation, tree)
            num_unnoticed += verdict.failed is None
            noticed = verdict.failed or "NOTICED BY NO TEST"
            counted = f"[{number}/{len(chosen)}]"
            print(f"{counted} {mutation.name}: {noticed} ({verdict.seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - num_unnoticed} of {len(chosen)} mutations noticed")
    return num_unnoticed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
