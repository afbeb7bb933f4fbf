"""What hosts of several ranks gain from two hops, on links of known rate, with next to no compute.

    sudo python -m tests.benchmarks.hosts --ranks 2 --rate 100 --out hosts.csv

Trains a stack of linear layers in interleaved blocks and prints, for each way to exchange, the
median seconds of a step, the first way's step over it, what leaves host 0 (its interface's counter,
headers included) in shares of the gradients' n bytes, and the CPU time of a rank. Raw blocks go to
the CSV file. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from lightning_dear.emulation import EmulatedCluster, emulated_rig, run_on_cluster

WAYS = ("ddp", "dear", "dear/1", "int8", "int8/1", "ddp_bf16")
"""DDP, with its hook, ours without a compressor and with one; "/1": in one hop."""

FIELDS = ("rig", "way", "step_s", "left_bytes", "cpu_s")


def _left_bytes() -> int:
    """What this host's interface has sent."""
    name = os.environ["GLOO_SOCKET_IFNAME"] + ":"
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[9] for line in lines if line.split()[0] == name))


def _trained(way: str, options: argparse.Namespace) -> Callable[[], None]:
    """Makes a step of this way; returns what makes `options.steps` of them and waits for all."""
    import torch
    from torch import nn

    from lightning_dear.collectives.factory import new_collectives
    from lightning_dear.compression import resolve_compressor
    from lightning_dear.engine.pipeline import Pipeline
    from lightning_dear.exchange.options import ExchangeOptions, default_gather
    from lightning_dear.planning import ThresholdFusion
    from lightning_dear.studies import competitors

    width, name, hops = options.width, *way.partition("/")[::2]
    layers = (nn.Linear(width, width, bias=False) for _ in range(options.layers))
    model, inputs = nn.Sequential(*layers), torch.ones(1, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if name.startswith("ddp"):
        parallel = nn.parallel.DistributedDataParallel(model)
        if name == "ddp_bf16":
            parallel.register_comm_hook(None, competitors._as_bf16)

        def train() -> None:
            for _ in range(options.steps):
                optimizer.zero_grad()
                parallel(inputs).sum().backward()
                optimizer.step()

        return train
    codec = None if name == "dear" else resolve_compressor(name)
    collectives = new_collectives(torch.device("cpu"), hops=int(hops) if hops else None)
    fusion = ThresholdFusion(bucket_cap_mb=options.cap_mb, first_bucket_cap_mb=options.cap_mb)
    exchanges = ExchangeOptions(default_gather(codec), compressor=codec)
    pipeline = Pipeline(model, [optimizer], collectives, fusion, options=exchanges)

    def train_ours() -> None:
        for _ in range(options.steps):
            with pipeline.forward():
                loss = model(inputs).sum()
            optimizer.zero_grad()
            with pipeline.backward():
                loss.backward()
            optimizer.step()
        pipeline.complete_parameters()

    return train_ours


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Runs on every rank; returns a row for each block, of this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = {way: _trained(way, options) for way in options.ways}
    for train in ways.values():
        train()
    rows: list[dict[str, object]] = []
    for turn in range(options.rounds):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            before = _left_bytes(), time.perf_counter(), time.process_time()
            ways[way]()
            cpu_s = time.process_time() - before[2]
            dist.barrier()
            after = _left_bytes(), time.perf_counter()
            taken = after[1] - before[1], after[0] - before[0], cpu_s
            figures = (one / options.steps for one in taken)
            rows.append(dict(zip(FIELDS, [emulated_rig(), way, *figures], strict=True)))
    return rows


def print_table(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    """Medians of the blocks."""
    nbytes = options.layers * options.width**2 * 4
    print(f"{rows[0]['rig']}; n = {nbytes / 1e6:.1f} MB, buckets of {options.cap_mb:g} MiB")
    print(f"{'':10} {'step ms':>9} {options.ways[0] + '/it':>9} {'left, n':>9} {'CPU ms':>9}")
    first = None
    for way in options.ways:
        step_s, left, cpu_s = (
            median(float(str(row[name])) for row in rows if row["way"] == way)
            for name in FIELDS[2:]
        )
        first = first or step_s
        figures = f"{step_s * 1e3:9.1f} {first / step_s:9.2f} {left / nbytes:9.3f}"
        print(f"{way:10} {figures} {cpu_s * 1e3:9.0f}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--rate", type=float, default=100.0, help="Mb/s; 0: not shaped")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--cap-mb", type=float, default=1.0, help="of a bucket, MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--out", type=Path, default=Path("hosts.csv"))
    return parser.parse_args()


def main() -> None:
    """Starts the ranks on the cluster, or, inside it, measures."""
    options = _parse()
    if not emulated_rig():
        argv = [sys.executable, "-m", "tests.benchmarks.hosts", *sys.argv[1:]]
        with EmulatedCluster(options.hosts, options.rate or None) as cluster:
            raise SystemExit(run_on_cluster(cluster, argv, ranks_per_host=options.ranks))
    rows = measure(options)
    if os.environ["RANK"] == "0":
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
        print_table(rows, options)


if __name__ == "__main__":
    main()
