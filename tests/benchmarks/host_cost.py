"""What a step costs the host where a model has many modules: the engine's own bookkeeping.

    python -m tests.benchmarks.host_cost --modules 1000 --steps 14

Trains a chain of small modules, of three parameters each, on two ranks over gloo. Prints how many
microseconds of a step each part of the bookkeeping takes, medians over steps of rank 0.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear.bucket import FlatBuffers
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.engine.module_tree import ModuleTree
from lightning_dear.engine.notes import SharedOptions
from lightning_dear.engine.parameter_gatherer import ParameterGatherer, _Reader
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.plan_lifecycle import PlanLifecycle
from lightning_dear.engine.trained_parameters import TrainedParameters
from lightning_dear.engine.training import BufferBroadcast
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import run_ranks

PARTS: dict[str, list[tuple[type, str]]] = {
    "parameters and hooks that were replaced": [
        (ModuleTree, "look"),
        (PlanLifecycle, "follow_parameters"),
    ],
    "writes to parameters": [(TrainedParameters, "have_changed")],
    "buffers": [(BufferBroadcast, "launch")],
    "options of the optimizer": [(SharedOptions, "say")],
    "parameters that were assigned": [(FlatBuffers, "adopt_writes")],
    "gates: beginning a step": [(ParameterGatherer, "begin_step")],
    "gates: closing": [(ParameterGatherer, "close_gates")],
    "gates: opening": [(_Reader, "open")],
}
NUM_WARM_UP_STEPS = 4


class Leaf(nn.Module):
    """Three parameters, and no more work than that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale + self.bias


class _Clock:
    """Adds up the seconds in outermost calls of what is timed."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()
        self._depth = 0
        for part, methods in PARTS.items():
            for owner, name in methods:
                setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, method: Any, part: str) -> Any:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s, self._depth = time.perf_counter(), self._depth + 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent_s[part] += time.perf_counter() - begin_s

        return timed


def train(num_modules: int, num_steps: int) -> list[dict[str, float]]:
    """Microseconds of each part in each step, of the whole step under "step"."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Leaf() for _ in range(num_modules)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    fusion = ThresholdFusion(bucket_cap_mb=0.02)
    pipeline = Pipeline(model, [optimizer], new_collectives(torch.device("cpu")), fusion)
    clock, rows = _Clock(), []
    for _ in range(num_steps):
        clock.spent_s.clear()
        begin_s = time.perf_counter()
        with pipeline.forward():
            loss = model(torch.randn(8)).square().mean()
        optimizer.zero_grad()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        rows.append({**clock.spent_s, "step": time.perf_counter() - begin_s})
    pipeline.complete_parameters()
    pipeline.detach()
    return [{part: 1e6 * spent_s for part, spent_s in row.items()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=14)
    asked = parser.parse_args()
    rows = run_ranks(train, 2, asked.modules, asked.steps, timeout_s=600)[0][NUM_WARM_UP_STEPS:]
    of_parts = {part: median(row.get(part, 0.0) for row in rows) for part in PARTS}
    of_parts["all of these"] = sum(of_parts.values())
    of_parts["the whole step"] = median(row["step"] for row in rows)
    print(f"{asked.modules} modules, {3 * asked.modules} parameters, 2 ranks over gloo:")
    for part, spent_us in of_parts.items():
        print(f"  {part:40} {spent_us:>10.0f} us")


if __name__ == "__main__":
    # Ranks find what they call in a module, and this one would have another name.
    from tests.benchmarks import host_cost

    host_cost.main()
