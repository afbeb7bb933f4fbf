"""How fast one bucket, or several at once, can be exchanged over gloo on links of known rate.

    sudo python -m tests.benchmarks.exchanges --out exchanges.csv
    sudo python -m tests.benchmarks.exchanges --world-sizes 4 --rates 1000 --sizes-kib 4096

Prints, for each way to exchange, the median of interleaved repeats as a ratio to bytes / rate
(in ms where the links are not shaped) and the CPU time of a process per MiB of the bucket. Raw
rows go to the CSV file. Nothing else should run on the machine, or the ranks should go ahead of it
(--realtime). Ratios below 1 are the burst of 64 KiB that the emulated links let through at once.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lightning_dear.emulation import EmulatedCluster, emulated_rig, run_on_cluster

_LEAD_S = 0.004


class Row(NamedTuple):
    """One exchange: `seconds` until the last rank was done, `cpu_s` of the average process."""

    world_size: int
    rate_mbit: float
    kind: str
    method: str
    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def bound_s(self) -> float:
        """Payload bytes that each rank must send, over the rate of its link."""
        passes = 2 if self.kind == "all_reduce" else 1
        share = passes * (self.world_size - 1) / self.world_size
        return share * self.nbytes * 8 / (self.rate_mbit * 1e6)


def measure(options: argparse.Namespace, rate_mbit: float) -> list[Row]:
    """Runs on every rank; rank 0 returns all rows."""
    import torch.distributed as dist

    from tests.benchmarks.exchange_methods import Exchanges

    if options.realtime:
        # Before gloo starts its threads, which inherit it; after the long work of importing torch.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    dist.init_process_group("gloo")
    rows = []
    for size_kib in options.sizes_kib:
        one = Exchanges(size_kib * 256)
        cases = [
            (kind, name, _single(launch))
            for kind in ("reduce_scatter", "all_gather", "all_reduce")
            for name, launch in one.methods(kind).items()
        ]
        for kind, _, action in cases:
            one.fill()
            action()
            one.check(kind)
        rows += _interleaved(cases, size_kib << 10, options.repeats, rate_mbit)
    buckets = [Exchanges(256 << 10, number) for number in range(8)]
    cases = [
        (kind, f"8x1MiB {name} {depth} in flight", _several(launches, depth))
        for kind in ("reduce_scatter", "all_gather")
        for name in ("pairwise", "pairwise_stream", "ring_thread")
        for launches in [[bucket.methods(kind)[name] for bucket in buckets]]
        for depth in (1, 2, 8)
    ]
    rows += _interleaved(cases, 8 << 20, options.repeats, rate_mbit)
    dist.destroy_process_group()
    return rows


def _single(launch: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    return lambda: launch()()


def _several(
    launches: list[Callable[[], Callable[[], object]]], depth: int
) -> Callable[[], object]:
    def exchange() -> None:
        pending = []
        for launch in launches:
            if len(pending) == depth:
                pending.pop(0)()
            pending.append(launch())
        for wait in pending:
            wait()

    return exchange


def _interleaved(
    cases: Iterable[tuple[str, str, Callable[[], object]]],
    nbytes: int,
    repeats: int,
    rate_mbit: float,
) -> list[Row]:
    import torch.distributed as dist

    world_size, rows = dist.get_world_size(), []
    for repeat in range(repeats + 1):
        for kind, name, action in cases:
            seconds, cpu_s = _timed(action)
            if repeat:  # the first warms up
                rows.append(Row(world_size, rate_mbit, kind, name, nbytes, seconds, cpu_s))
    return rows


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds from a common start to the last rank's end; hosts share this machine's clock."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = torch.tensor([time.monotonic() + _LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    cpu_s = time.process_time()
    action()
    ends = torch.tensor([time.monotonic(), 0.0], dtype=torch.float64)
    spent = torch.tensor([time.process_time() - cpu_s], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return ends[0].item() - start.item(), spent.item() / dist.get_world_size()


def write(rows: list[Row], path: Path) -> None:
    """Append to a CSV file, with a header if it is new."""
    is_new = not path.exists()
    with path.open("a") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(Row._fields)
        writer.writerows(rows)


def print_table(rows: list[Row]) -> None:
    """One line per way to exchange, one column per size."""

    def place(row: Row) -> tuple[int, float]:
        return row.world_size, row.rate_mbit

    for (world_size, _), found in itertools.groupby(rows, place):
        group = list(found)
        sizes = sorted({row.nbytes for row in group if "8x" not in row.method})
        print(f"\nP = {world_size}, {emulated_rig()}")
        print(f"{'':42}" + "".join(f"{size >> 10:>7} KiB" for size in sizes) + "  CPU ms/MiB")
        for key in dict.fromkeys((row.kind, row.method) for row in group):
            mine = [row for row in group if (row.kind, row.method) == key]
            cells = [
                _cell([row for row in mine if row.nbytes == size])
                for size in (sizes if "8x" not in key[1] else [8 << 20])
            ]
            cpu = median(row.cpu_s * 1e3 / (row.nbytes / (1 << 20)) for row in mine)
            print(f"{key[0]:15}{key[1]:27}" + "".join(cells) + f"{cpu:12.2f}", flush=True)


def _cell(rows: list[Row]) -> str:
    if not rows:
        return f"{'-':>11}"
    seconds = median(row.seconds for row in rows)
    if not rows[0].rate_mbit:
        return f"{seconds * 1e3:8.2f} ms"
    return f"{seconds / rows[0].bound_s:11.3f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[200, 1000, 0], help="Mb/s; 0: no limit"
    )
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--realtime", action="store_true", help="ahead of all other processes of the machine"
    )
    parser.add_argument("--out", type=Path, default=Path("exchanges.csv"))
    return parser.parse_args()


def main() -> None:
    """Start the ranks on every cluster, or, inside one, measure."""
    options = _parse()
    if "EXCHANGES_RATE" in os.environ:
        rows = measure(options, float(os.environ["EXCHANGES_RATE"]))
        if os.environ["RANK"] == "0":
            write(rows, options.out)
            print_table(rows)
        return
    for world_size, rate in itertools.product(options.world_sizes, options.rates):
        argv = [sys.executable, "-m", "tests.benchmarks.exchanges", *sys.argv[1:]]
        with EmulatedCluster(world_size, rate or None) as cluster:
            code = run_on_cluster(cluster, argv, env={"EXCHANGES_RATE": str(rate)})
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
