"""How a small classifier ends under a usual SGD where most numbers of a gradient wait.

    python -m tests.benchmarks.waiting
    python -m tests.benchmarks.waiting --ranks 2 --codecs none randomk --seeds 0

Ranks are processes that train over gloo with SGD (lr=0.05), in batches of 16 a rank. The classifier
has two LayerNorms. Its data are five clouds of points ("clouds"), what a random linear layer says
of points ("teacher"), or scikit-learn's digits ("digits"). Prints the loss of all samples before
and after the training, for each seed.
"""

from __future__ import annotations

import argparse
from itertools import product

from tests.distributed.harness import run_ranks
from tests.training.waiting import CODECS, DATA, train_all


def main() -> None:
    """Trains, and prints a line for each codec, number of ranks and data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--codecs", nargs="+", default=[*CODECS], choices=[*CODECS])
    parser.add_argument("--data", nargs="+", default=[*DATA], choices=[*DATA])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    for name, num_ranks, data in product(chosen.codecs, chosen.ranks, chosen.data):
        losses = run_ranks(train_all, num_ranks, name, data, chosen.seeds, timeout_s=500)[0]
        shown = ", ".join(f"{before:.2f} -> {after:.3g}" for before, after in losses)
        print(f"{name:30} {num_ranks} ranks  {data:8} {shown}", flush=True)


if __name__ == "__main__":
    main()
