"""How many bytes sparse all-reduces send and receive in real steps, beside what they promise.

    python -m tests.benchmarks.sparse_volumes
    python -m tests.benchmarks.sparse_volumes --ranks 2 4 --gradients skewed ties --raw volumes.csv
    python -m tests.benchmarks.sparse_volumes --compressors oktopk --check

Ranks are processes that train one bucket over gloo. What each hands to torch.distributed is
counted by step and by the rank that it is for. A step's payload is the larger of what is sent and
what is received, of the rank where that is most: places and numbers, or a bucket as it is.
Lengths, counts and histograms are metadata; flags of used parameters and module buffers are left
out of both. The bound is 6 k (P - 1) / P words of 4 bytes for Ok-Topk, what the others say of
themselves, and 2 n (P - 1) / P for what travels as it is.

Gradients are of a ResNet ("digits"), of a GPT on Python's own source ("gpt"), or made to be hard
to send: large in one hundredth of the bucket only ("skewed"), not 0 on one rank only ("one_rank"),
equal in size ("ties"), 0 ("zeros"), too few to be sent sparsely ("short").

Prints the payload's median and largest share of the bound over the steps, the most bytes, the
largest share of metadata in the payload, and how many steps were above the bound. All steps go to
the CSV file. In each run all ranks must end with the same weights, and the engine's own ledger must
say the same as the wire. With --check the command fails, naming the rows, if a step of Ok-Topk is
above its bound, or its metadata above 5 % of the payload where k is at least 10,000.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from lightning_dear.compression import SparseAllReduce
from lightning_dear.emulation import EmulatedCluster
from tests.benchmarks.given_gradients import NAMES
from tests.benchmarks.volumes import METADATA, PAYLOAD, Bucket, Sent, codec_of, train
from tests.distributed.harness import run_ranks, start_server

COMPRESSORS = ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "none")

CHECKED = "oktopk"

MOST_METADATA = 0.05
"""Of the payload, in steps of at least `MANY` numbers."""

MANY = 10_000

HOSTS = ("local", "emulated")

WORD_BYTES = 4


class Case(NamedTuple):
    """A training: a line of the table."""

    compressor: str
    gradients: str
    num_ranks: int
    density: float

    @property
    def label(self) -> str:
        """For a sentence."""
        return (
            f"{self.compressor}, {self.gradients} gradients, {self.num_ranks} ranks, density"
            f" {self.density:g}"
        )


class Step(NamedTuple):
    """One step, in bytes.

    Attributes:
        k: How many numbers are wanted of a rank; 0 if all travel.
        sent: Payload, of the rank whose larger of both is largest.
        received: Payload, of the same rank.
        metadata: The most that a rank sends or receives.
        bound: Of payload.
    """

    compressor: str
    gradients: str
    num_ranks: int
    density: float
    step: int
    k: int
    sent: int
    received: int
    metadata: int
    bound: float

    @property
    def payload(self) -> int:
        """The larger direction."""
        return max(self.sent, self.received)

    @property
    def of_bound(self) -> float:
        """Payload as a share of the bound."""
        return self.payload / self.bound

    @property
    def of_payload(self) -> float | None:
        """Metadata as a share of the payload; None where there is none of that."""
        return self.metadata / self.payload if self.payload else None


# --- measuring ------------------------------------------------------------------------------------


def k_of(case: Case, buckets: Sequence[Bucket]) -> int:
    """How many numbers are wanted of a rank, of all buckets that travel sparsely."""
    codec = codec_of(case.compressor, case.density)
    if not isinstance(codec, SparseAllReduce):
        return 0
    sparse = [one for one in buckets if codec.saves(one.numel, case.num_ranks)]
    return sum(codec.entries(one.numel) for one in sparse)


def bound_of(case: Case, buckets: Sequence[Bucket]) -> float:
    """Most bytes of payload that a rank may send, or receive, in a step."""
    codec, num_ranks = codec_of(case.compressor, case.density), case.num_ranks
    words = 0.0
    for one in buckets:
        if isinstance(codec, SparseAllReduce) and codec.saves(one.numel, num_ranks):
            words += codec.most_words(one.numel, num_ranks)
        else:
            words += 2 * one.padded_numel * (num_ranks - 1) / num_ranks
    return WORD_BYTES * words


def measure(case: Case, options: argparse.Namespace) -> list[Step]:
    """All steps of a training.

    Raises:
        AssertionError: If ranks end with other weights, or the ledger differs from the wire.
    """
    what = case.compressor, case.gradients, case.density, options.numel, options.steps
    timeout_s = 120 + options.steps
    with ExitStack() as stack:
        hosts = None
        if options.hosts == "emulated":
            cluster = EmulatedCluster(num_hosts=case.num_ranks, rate_mbit=None)
            hosts = stack.enter_context(cluster).hosts
        results = run_ranks(train, case.num_ranks, *what, timeout_s=timeout_s, hosts=hosts)
    digests = {one.digest for one in results}
    assert len(digests) == 1, f"{case.label}: ranks end with different weights"
    return _steps(case, results)


def _steps(case: Case, results: Sequence[Sent]) -> list[Step]:
    buckets = results[0].buckets
    k, bound = k_of(case, buckets), bound_of(case, buckets)
    # [rank that sends, step, kind, rank that receives]
    whole = torch.stack([one.to_ranks for one in results])
    sent, received = whole.sum(dim=3), whole.sum(dim=0).permute(2, 0, 1)
    larger = torch.maximum(sent, received)
    worst = larger[:, :, PAYLOAD].argmax(dim=0).tolist()
    steps = []
    for step, rank in enumerate(worst):
        payload = int(sent[rank, step, PAYLOAD]), int(received[rank, step, PAYLOAD])
        metadata = int(larger[:, step, METADATA].max())
        steps.append(Step(*case, step, k, *payload, metadata, bound))
    return steps


# --- telling --------------------------------------------------------------------------------------


def print_head() -> None:
    """Names of the columns."""
    print(
        f"{'compressor':11}{'gradients':10}{'ranks':>5}{'density':>9}{'k':>8}{'median':>9}"
        f"{'largest':>9}{'bytes':>11}{'metadata':>10}{'over':>6}"
    )


def print_row(case: Case, steps: Sequence[Step]) -> None:
    """One line of the table."""
    of_bound = [each.of_bound for each in steps]
    shares = [each.of_payload for each in steps if each.of_payload is not None]
    metadata = f"{max(shares):.2%}" if shares else "-"
    print(
        f"{case.compressor:11}{case.gradients:10}{case.num_ranks:>5}{case.density:>9g}"
        f"{steps[0].k:>8}{median(of_bound):>9.1%}{max(of_bound):>9.1%}"
        f"{max(each.payload for each in steps):>11,}{metadata:>10}{_num_over(steps):>6}",
        flush=True,
    )


def _num_over(steps: Sequence[Step]) -> int:
    return sum(each.payload > each.bound for each in steps)


def print_foot(steps: Sequence[Step]) -> None:
    """What the columns mean, and how many steps --check looks at."""
    num_many = sum(each.k >= MANY for each in steps)
    print(
        "median, largest: payload of a step over the bound; bytes: most payload; metadata: largest"
        " share of the payload"
    )
    print(f"{len(steps)} steps, in {num_many} of them k is at least {MANY:,}")


def complaints(case: Case, steps: Sequence[Step]) -> list[str]:
    """Sentences on a training that sends more than it may."""
    if case.compressor != CHECKED:
        return []
    found = []
    if num_over := _num_over(steps):
        most = max(each.of_bound for each in steps)
        found.append(
            f"{case.label}: {num_over} of {len(steps)} steps above the bound, up to {most:.1%}."
        )
    shares = [each.of_payload or 0.0 for each in steps if each.k >= MANY]
    if shares and max(shares) > MOST_METADATA:
        found.append(
            f"{case.label}: metadata of {max(shares):.2%} of the payload, more than"
            f" {MOST_METADATA:.0%}."
        )
    return found


@contextmanager
def written_to(path: Path | None) -> Iterator[Callable[[Sequence[Step]], object]]:
    """Adds steps to a CSV file, if there is to be one."""
    if path is None:
        yield lambda steps: None
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Step._fields)
        yield writer.writerows


# --- the command line -----------------------------------------------------------------------------


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.02])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--compressors", nargs="+", choices=COMPRESSORS, default=COMPRESSORS)
    parser.add_argument("--gradients", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--numel", type=int, default=200_000, help="of gradients of no model")
    parser.add_argument(
        "--hosts", choices=HOSTS, default="local", help="emulated: one for each rank; needs root"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail if a step of {CHECKED} is above the bound, or its metadata above"
        f" {MOST_METADATA:.0%} of the payload where k is at least {MANY:,}".replace("%", "%%"),
    )
    parser.add_argument("--raw", type=Path, help="CSV file to write")
    options = parser.parse_args(arguments)
    for name, least in (("ranks", 2), ("steps", 1), ("numel", 100)):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < least:
            parser.error(f"--{name} must be at least {least}, got {value}.")
    if not all(0 < density <= 1 for density in options.densities):
        parser.error(f"--densities must be in (0, 1], got {options.densities}.")
    if options.check and CHECKED not in options.compressors:
        parser.error(f"--check looks at {CHECKED} only: name it.")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """All combinations; what has no density is trained once."""
    return [
        Case(compressor, gradients, num_ranks, density)
        for compressor in options.compressors
        for gradients in options.gradients
        for num_ranks in options.ranks
        for density in options.densities[: 1 if compressor == "none" else None]
    ]


def main(arguments: Sequence[str]) -> None:
    """Trains, counts and prints.

    Raises:
        SystemExit: For arguments that cannot be, and with --check if there are complaints.
    """
    options = _options(arguments)
    start_server()
    print_head()
    everything: list[Step] = []
    sentences: list[str] = []
    with written_to(options.raw) as write:
        for case in cases_of(options):
            steps = measure(case, options)
            print_row(case, steps)
            write(steps)
            everything += steps
            sentences += complaints(case, steps)
    print_foot(everything)
    if options.check and sentences:
        raise SystemExit("\n".join(sentences))


if __name__ == "__main__":
    main(sys.argv[1:])
