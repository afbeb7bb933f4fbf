"""Our costs of collectives beside torch's own model of NCCL: two formulas with the same links.

    python -m tests.benchmarks.nccl_cross_check --csv rows.csv

`torch/_inductor/comm_analysis.py` estimates them after NCCL's `tuning.cc`: rings and, for
all-reduces, trees, in three protocols (LL, LL128, SIMPLE); the fastest for a size is taken. Both
are models: nothing is measured, and neither shows that the other is right.

Ours has the links of the way that torch takes, and both have the bytes of the whole buffer. All
constants are those of torch's module for nodes of 8 H100s with NVLink and InfiniBand:

- alpha: `hwLat` of NVLINK within nodes, of NET between them, by algorithm and protocol.
- beta: `get_intra_node_bw()` within nodes, 370 GB/s; `get_inter_node_bw()` between them, 50 GB/s,
  which is the port of one GPU: to torch a ring has no more. `PAYLOAD` is the protocol's share of
  it, which torch has as a number within a function, where it cannot be read.

What torch's model assumes and ours does not:

- A collective begins with `baseLat`, 6.6 to 14 us: an all-reduce once, its two halves twice.
- A hop within nodes takes 1 us or more (SIMPLE: 3) where there are several nodes.
- Two nodes have 0.80 of the bandwidth between them, 8 and more all of it. More than two have more
  for messages above 50 MB, 1.33 times at 256 MiB, as if several ports took part.
- Trees have 0.92 of the bandwidth (LL: 1 / 3.8), and 0.4 to 1 of that by a table of sizes. There
  are caps as well, and LL128 is off between nodes of InfiniBand.
- Trees over N nodes are log2(N) deep, rounded down; ours rounds up. N is a power of 2 here.

Torch's knows no pairwise collectives. Ours over torch's is 0.83 to 1.71 here at
256 MiB, and 0.40 to 2.18 at 64 KiB, where base latencies and rings over nodes count most.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch

import torch

from lightning_dear.simulator import Link, Network

MODULE = "torch._inductor.comm_analysis"
NEEDED = (
    *("NCCL_ALGO", "NCCL_COLL", "NCCL_HW", "NCCL_PROTO", "NVIDIA_GPU_TYPE", "_has_nvlink"),
    *("_nccl_algo_time", "get_gpu_type", "get_inter_node_bw", "get_intra_node_bw", "hwLat"),
)

PAYLOAD = {"LL": 4 / 8, "LL128": 120 / 128, "SIMPLE": 1.0}
"""Protocol -> payload of the bytes that it sends; the others are flags."""

GPUS_PER_NODE = 8
NUM_GPUS = (8, 16, 64, 256)
SIZES = {1 << 16: "64 KiB", 1 << 20: "1 MiB", 25 << 20: "25 MiB", 256 << 20: "256 MiB"}

Algorithm = Literal["ring", "tree"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class NoModelError(RuntimeError):
    """This torch has no such model."""


class Case(NamedTuple):
    """What is to be sent."""

    collective: Collective
    num_gpus: int
    nbytes: int


class Way(NamedTuple):
    """How NCCL may send it."""

    algorithm: Algorithm
    protocol: str


class Row(NamedTuple):
    """Both estimates, of the way that torch takes, and of the best of ours in its protocol."""

    collective: Collective
    num_gpus: int
    nbytes: int
    algorithm: Algorithm
    protocol: str
    torch_us: float
    ours_us: float
    best: Algorithm
    best_us: float

    @property
    def ratio(self) -> float:
        """Ours over torch's, of the same way."""
        return self.ours_us / self.torch_us


@contextmanager
def torch_model() -> Iterator[Any]:
    """torch's module, on H100s whatever is in this machine; it is as it was afterwards."""
    try:
        model = import_module(MODULE)
    except ImportError as error:
        raise NoModelError(f"torch {torch.__version__} has no {MODULE}.") from error
    if missing := ", ".join(name for name in NEEDED if not hasattr(model, name)):
        raise NoModelError(f"{MODULE} of torch {torch.__version__} has no {missing}; 2.13's has.")
    gpu = model.NVIDIA_GPU_TYPE.HOPPER
    with (
        patch.object(model, "get_gpu_type", lambda: gpu),
        patch.object(model, "_has_nvlink", lambda: True),
        # With GPUs here, a node would have as many as this machine; without, it has 8.
        patch("torch.cuda.is_available", lambda: False),
    ):
        yield model


def torch_us(model: Any, case: Case, way: Way) -> float | None:
    """Microseconds by torch's model; None where NCCL does not do that."""
    collective = model.NCCL_COLL[case.collective.upper()]
    algorithm, protocol = model.NCCL_ALGO[way.algorithm.upper()], model.NCCL_PROTO[way.protocol]
    us = model._nccl_algo_time(case.nbytes, case.num_gpus, collective, algorithm, protocol)
    return float(us) if us >= 0 else None


def network(model: Any, num_gpus: int, way: Way) -> Network:
    """Ours, of torch's constants for this algorithm and protocol."""
    algorithm, protocol = model.NCCL_ALGO[way.algorithm.upper()], model.NCCL_PROTO[way.protocol]

    def link(hardware: str, gb_per_s: float) -> Link:
        alpha_us = model.hwLat[model.NCCL_HW[hardware]][algorithm][protocol]
        return Link(alpha_us / 1e6, 1 / (gb_per_s * 1e9 * PAYLOAD[way.protocol]))

    between = link("NET", model.get_inter_node_bw())
    within = link("NVLINK", model.get_intra_node_bw())
    return Network(between, num_gpus, GPUS_PER_NODE, within, way.algorithm)


def ours_us(model: Any, case: Case, way: Way) -> float:
    """Microseconds by our formulas."""
    of_way = network(model, case.num_gpus, way)
    cost_s = of_way.all_reduce_s if case.collective == "all_reduce" else of_way.half_s
    return cost_s(case.nbytes) * 1e6


def compared(case: Case) -> Row:
    """What torch takes of all that NCCL has for the case, and both estimates of it."""
    algorithms: Sequence[Algorithm] = ("ring",)
    if case.collective == "all_reduce":
        algorithms = ("ring", "tree")
    with torch_model() as model:
        ways = [Way(*each) for each in product(algorithms, PAYLOAD)]
        said = {way: us for way in ways if (us := torch_us(model, case, way)) is not None}
        taken = min(said, key=said.__getitem__)
        ours = {one: ours_us(model, case, Way(one, taken.protocol)) for one in algorithms}
    best = min(ours, key=ours.__getitem__)
    return Row(*case, *taken, said[taken], ours[taken.algorithm], best, ours[best])


def table() -> list[Row]:
    """A row for each case."""
    return [compared(Case(*each)) for each in product(COLLECTIVES, NUM_GPUS, SIZES)]


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: the table, and the ratios of each collective."""
    yield "| collective | GPUs | bytes | torch takes | torch, us | ours, us | ratio | our `best` |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        case = f"| {row.collective} | {row.num_gpus} | {SIZES[row.nbytes]} |"
        taken = f" {row.algorithm} {row.protocol} | {row.torch_us:.1f} | {row.ours_us:.1f} |"
        yield f"{case}{taken} {row.ratio:.2f} | {row.best}, {row.best_us:.1f} |"
    yield ""
    for collective in COLLECTIVES:
        ratios = [row.ratio for row in rows if row.collective == collective]
        yield f"{collective}: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="file for the rows")
    options = parser.parse_args(arguments)
    rows = table()
    print("\n".join(markdown(rows)))
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    main()
