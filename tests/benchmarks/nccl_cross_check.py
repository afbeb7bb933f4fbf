"""Our costs of collectives beside torch's own model of NCCL: two formulas with the same links.

    python -m tests.benchmarks.nccl_cross_check --csv rows.csv

Inductor estimates collectives in `torch/_inductor/comm_analysis.py`, after NCCL's `tuning.cc`: rings
and, for all-reduces, trees, each in three protocols (LL, LL128, SIMPLE), whichever is fastest for a
size. Both are models: nothing is measured, and neither says that the other is right.

Ours is given the links of what torch takes, by the same algorithm. All from torch's module, as if
it ran on nodes of 8 H100s with NVLink and a 400 Gb/s InfiniBand port for each GPU:

alpha: `hwLat` of NVLINK within nodes and of NET between them, for the algorithm and the protocol.
beta: `get_intra_node_bw()` within nodes (370 GB/s), `get_inter_node_bw()` between them (50 GB/s, one
    port: to torch a ring over nodes has no more), of which the share in `PAYLOAD` is payload. That
    share is NCCL's; torch has it as a number within a function, where it cannot be read.

Both are given the bytes of the whole buffer. What torch's model assumes and ours does not:

- Each collective begins with `baseLat`, 6.6 to 14 us, an all-reduce once, its two halves twice.
- A ring over nodes takes the sum of its hops' latencies, of which one for each node but one is
  between nodes. Ours takes the slower link's alpha for each of the P - 1 steps.
- A hop within nodes takes at least 1 us (SIMPLE: 3) where there are several nodes.
- Between nodes 2 of them have 0.80 of the bandwidth, 8 and more all of it; at more than 2, messages
  above 50 MB have more than that, 1.33 times at 256 MiB, as they would use several ports.
- Trees have 0.92 of the bandwidth (LL: 1/3.8), less by a table for medium sizes (0.5 at least in
  SIMPLE), and caps; LL has caps of its own, LL128 is off between nodes.
- Trees over N nodes are log2(N) deep, rounded down; ours is rounded up. All N here are powers of 2.

And ours has pairwise and hierarchical collectives, of which torch's knows nothing. At 256 MiB, ours
over torch's is between 0.83 and 1.71 here; at 64 KiB between 0.40 and 2.18.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch

from lightning_dear.simulator import Link, Network

MODULE = "torch._inductor.comm_analysis"
NEEDED = ("NCCL_ALGO", "NCCL_COLL", "NCCL_HW", "NCCL_PROTO", "NVIDIA_GPU_TYPE", "_has_nvlink")
NEEDED += ("_nccl_algo_time", "get_gpu_type", "get_inter_node_bw", "get_intra_node_bw", "hwLat")

GPUS_PER_NODE = 8
"""What torch's model takes where there is no GPU."""

PAYLOAD = {"LL": 4 / 8, "LL128": 120 / 128, "SIMPLE": 1.0}
"""Protocol -> payload of the bytes that it sends; the others are flags."""

NUM_GPUS = (8, 16, 64, 256)
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "25 MiB": 25 << 20, "256 MiB": 256 << 20}

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")


class NoModelError(RuntimeError):
    """This torch has no such model."""


class Case(NamedTuple):
    """What is to be sent: `nbytes` is the whole buffer."""

    collective: Collective
    num_gpus: int
    nbytes: int


class Way(NamedTuple):
    """How NCCL may send it."""

    algorithm: Literal["ring", "tree"]
    protocol: str

    def __str__(self) -> str:
        return f"{self.algorithm} {self.protocol}"


class Row(NamedTuple):
    """Both estimates of a case.

    Attributes:
        way: What torch takes.
        torch_us: What it says of that.
        ours_us: What ours says of the same way.
        own_way: What would be taken by our estimates; each way has its own links.
        own_us: What ours says of that.
    """

    collective: Collective
    num_gpus: int
    nbytes: int
    way: Way
    torch_us: float
    ours_us: float
    own_way: Way
    own_us: float

    @property
    def ratio(self) -> float:
        """Ours over torch's, of the way that torch takes."""
        return self.ours_us / self.torch_us


@contextmanager
def torch_model() -> Iterator[Any]:
    """torch's module, on H100s whatever is in this machine; it is as it was afterwards."""
    try:
        model = import_module(MODULE)
    except ImportError as error:
        raise NoModelError(f"torch {torch.__version__} has no {MODULE}.") from error
    if missing := [name for name in NEEDED if not hasattr(model, name)]:
        raise NoModelError(
            f"{MODULE} of torch {torch.__version__} has no {', '.join(missing)}. These names are"
            " private; torch 2.13 has them."
        )
    gpu = model.NVIDIA_GPU_TYPE.HOPPER
    ours = {"get_gpu_type": lambda: gpu, "_has_nvlink": lambda: True}
    # With a GPU here, a node would have as many GPUs as this machine.
    with patch.multiple(model, **ours), patch("torch.cuda.is_available", lambda: False):
        yield model


def torch_us(model: Any, case: Case, way: Way) -> float | None:
    """Microseconds by torch's model; None where NCCL does not do that."""
    estimate = model._nccl_algo_time(
        case.nbytes,
        case.num_gpus,
        model.NCCL_COLL[case.collective.upper()],
        model.NCCL_ALGO[way.algorithm.upper()],
        model.NCCL_PROTO[way.protocol],
    )
    return float(estimate) if estimate >= 0 else None


def network(model: Any, num_gpus: int, way: Way) -> Network:
    """Ours, of torch's constants for this algorithm and protocol."""

    def link(hardware: str, gb_per_s: float) -> Link:
        of_algorithm = model.hwLat[model.NCCL_HW[hardware]][model.NCCL_ALGO[way.algorithm.upper()]]
        alpha_us = of_algorithm[model.NCCL_PROTO[way.protocol]]
        return Link(alpha_us / 1e6, 1 / (gb_per_s * 1e9 * PAYLOAD[way.protocol]))

    return Network(
        between=link("NET", model.get_inter_node_bw()),
        world_size=num_gpus,
        ranks_per_node=GPUS_PER_NODE,
        within=link("NVLINK", model.get_intra_node_bw()),
        algorithm=way.algorithm,
    )


def ours_us(model: Any, case: Case, way: Way) -> float:
    """Microseconds by our formulas."""
    of_way = network(model, case.num_gpus, way)
    cost_s = of_way.all_reduce_s if case.collective == "all_reduce" else of_way.half_s
    return cost_s(case.nbytes) * 1e6


def compared(model: Any, case: Case) -> Row:
    """The ways that NCCL has, the one that torch takes of them, and the one that ours would."""
    ways = [Way("ring", protocol) for protocol in PAYLOAD]
    if case.collective == "all_reduce":
        ways += [Way("tree", protocol) for protocol in PAYLOAD]
    said = {way: us for way in ways if (us := torch_us(model, case, way)) is not None}
    ours = {way: ours_us(model, case, way) for way in said}
    way, own_way = min(said, key=said.__getitem__), min(ours, key=ours.__getitem__)
    return Row(*case, way, said[way], ours[way], own_way, ours[own_way])


def table() -> list[Row]:
    """All cases."""
    with torch_model() as model:
        return [
            compared(model, Case(collective, num_gpus, nbytes))
            for collective in COLLECTIVES
            for num_gpus in NUM_GPUS
            for nbytes in SIZES.values()
        ]


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Lines: a row for each case, and the ratios of each collective."""
    names = {nbytes: name for name, nbytes in SIZES.items()}
    yield "| collective | GPUs | bytes | torch takes | torch, us | ours, us | ratio | ours takes |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.collective} | {row.num_gpus} | {names[row.nbytes]} | {row.way} |"
            f" {row.torch_us:.1f} | {row.ours_us:.1f} | {row.ratio:.2f} |"
            f" {row.own_way}, {row.own_us:.1f} |"
        )
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
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
