"""Steps whose messages are copied, as between a device and gloo, beside steps of plain gloo.

    python -m tests.net.time_staged 1000 100

As root, on Linux: two emulated hosts of one rank, 50 MB of gradients, and both ways by turns. The
arguments are rates in Mb/s. Device and host are both the host's memory; copies and threads are
real. Prints what a step of the slower rank takes, and the medians of five ratios.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.emulation import EmulatedCluster
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import run_ranks
from tests.distributed.rank import staged

WIDTH, NUM_LAYERS, BATCH_SIZE = 1024, 12, 128
NUM_ROUNDS = 5


class Steps:
    """A stack of layers that is trained in one of both ways.

    Args:
        is_staged: Whether all that travels is copied.
    """

    def __init__(self, *, is_staged: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        self.model = nn.Sequential(*(part for one in layers for part in (one, nn.ReLU())))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        with staged() if is_staged else nullcontext():
            # Another timeout: groups of its own.
            collectives = new_collectives(torch.device("cpu"), timedelta(seconds=90 + is_staged))
        fusion = ThresholdFusion(bucket_cap_mb=8, first_bucket_cap_mb=4)
        self._pipeline = Pipeline(self.model, [self._optimizer], collectives, fusion)
        self._inputs = torch.randn(BATCH_SIZE, WIDTH)

    def seconds(self, count: int) -> float:
        """Median of so many steps. Collective."""
        dist.barrier()
        spent = []
        for _ in range(count):
            begin_s = time.perf_counter()
            self._optimizer.zero_grad()
            with self._pipeline.forward():
                loss = self.model(self._inputs).square().mean()
            with self._pipeline.backward():
                loss.backward()
            self._optimizer.step()
            spent.append(time.perf_counter() - begin_s)
        return median(spent)


def measure(num_steps: int) -> tuple[list[tuple[float, float]], bool]:
    """Seconds of plain and copied steps in each round, and whether the bits are the same."""
    ways = [Steps(is_staged=is_staged) for is_staged in (False, True)]
    for way in ways:
        way.seconds(3)
    rounds = []
    for number in range(NUM_ROUNDS):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        spent = {way: ways[way].seconds(num_steps) for way in order}
        rounds.append((spent[0], spent[1]))
    weights = (list(way.model.parameters()) for way in ways)
    return rounds, all(torch.equal(left, right) for left, right in zip(*weights, strict=True))


def main() -> None:
    """Prints a line for each rate."""
    for rate_mbit in map(float, sys.argv[1:]):
        num_steps = 6 if rate_mbit > 200 else 2
        with EmulatedCluster(num_hosts=2, rate_mbit=rate_mbit) as cluster:
            found = run_ranks(measure, 2, num_steps, hosts=cluster.hosts, timeout_s=500)
        both = zip(*(rounds for rounds, _ in found), strict=True)
        slower = [tuple(map(max, zip(*ranks, strict=True))) for ranks in both]
        ratios = sorted(copied / plain for plain, copied in slower)
        print(
            f"{rate_mbit:g} Mb/s: plain {median(plain for plain, _ in slower) * 1e3:.0f} ms, copied"
            f" {median(ratios):.3f} of it ({ratios[0]:.3f} to {ratios[-1]:.3f}),"
            f" {'same' if all(same for _, same in found) else 'OTHER'} bits",
            flush=True,
        )


if __name__ == "__main__":
    from tests.net import time_staged

    # Ranks find functions by the module's name.
    time_staged.main()
