"""The same loops under ours and under Fabric's "ddp", at 1, 2 and 3 ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision

from tests.distributed.harness import run_ranks
from tests.fabric import loops
from tests.fabric.running import Loop, Run, assert_alike, ddp, dear, run_loop
from tests.lightning.fitting import assert_differ

ALL = ("sgd", "adamw")


def _scaler() -> Any:
    return MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    )


def _skipped(run: Run) -> None:
    before, at = run.series["weights"][loops.OVERFLOW_STEP - 1 : loops.OVERFLOW_STEP + 1]
    assert all(map(torch.equal, before, at))
    scales = list(map(float, run.series["scales"]))
    assert scales[loops.OVERFLOW_STEP] == scales[loops.OVERFLOW_STEP - 1] / 2


@dataclass(frozen=True)
class Row:
    """A loop, and how it is compared.

    Attributes:
        loop: What runs.
        optimizers: Names of optimizers.
        options: Fabric's.
        plugins: New ones for Fabric.
        reference: What runs under DDP, if another loop.
        distance: How far series may be apart for a reason of their own: name -> distance.
        check: Raises unless the run showed what the row is about.
    """

    loop: Loop
    optimizers: tuple[str, ...] = ("adamw",)
    options: Mapping[str, Any] = field(default_factory=dict)
    plugins: Callable[[], tuple[Any, ...]] = tuple
    reference: Loop | None = None
    distance: float = 0.0
    check: Callable[[Run], None] = lambda run: None

    def limit(self, world_size: int) -> float:
        """At 3 ranks DDP sums in another order; rows run in float64, but for the 16-bit ones."""
        rounding = 1e-9 if not (self.options or self.plugins()) else 1e-2
        return max(self.distance, rounding if world_size == 3 else 0.0)


NORM_ORDER = 1e-6
"""A norm is summed up over shards, not over whole tensors."""

ROWS = {
    "plain": Row(loops.mlp, ALL),
    "buffers": Row(loops.conv, ALL),
    "buffers written between steps": Row(loops.writes_buffers, ALL),
    "optimizer state reset and changed": Row(loops.uses_state, ALL),
    "shared weight": Row(loops.gpt, ALL),
    "accumulation": Row(loops.accumulates, ALL),
    "clipping by norm": Row(loops.clips_norm, ALL, distance=NORM_ORDER),
    "clipping by the largest": Row(loops.clips_largest),
    "clipping by value": Row(loops.clips_value, ALL),
    # DDP adds the second gradient to the first one's mean before it averages again.
    "two backwards": Row(loops.backward_twice, ("sgd",), distance=1e-6),
    "hooks that clip": Row(loops.hooks, ALL),
    "hooks of steps that clip": Row(loops.clips_in_hooks, ALL),
    "an optimizer that is not set up": Row(loops.steps_apart),
    "two forwards": Row(loops.forward_twice),
    "dropped gradients": Row(loops.drops, ALL),
    "closure": Row(loops.closure),
    "evaluation": Row(loops.evaluates),
    "training in eval mode": Row(loops.trains_in_eval_mode),
    "GAN": Row(loops.gan, ALL, distance=NORM_ORDER),
    "GAN, naming models": Row(loops.gan_naming_models, distance=NORM_ORDER),
    "two optimizers": Row(loops.two_optimizers),
    "LightningModule": Row(loops.lightning_module),
    "bf16-mixed": Row(loops.mlp, options={"precision": "bf16-mixed"}),
    "bf16-true": Row(loops.mlp, ALL, {"precision": "bf16-true"}, reference=loops.masters),
    "16-mixed with an overflow": Row(
        loops.overflows, ALL, plugins=lambda: (_scaler(),), check=_skipped
    ),
    "16-mixed with clipping": Row(loops.clips_norm, plugins=lambda: (_scaler(),), distance=1e-3),
}


def _run(name: str, optimizer: str) -> None:
    row = ROWS[name]
    world_size = int(os.environ["WORLD_SIZE"])
    options = dict(row.options)
    if world_size == 3 and not (options or row.plugins()):
        options = {"precision": "64-true"}
    theirs = run_loop(
        row.reference or row.loop,
        optimizer,
        ddp(),
        *row.plugins(),
        **options,
    )
    for watches in (True, False):
        ours = run_loop(row.loop, optimizer, dear(), *row.plugins(), watches=watches, **options)
        assert_alike(ours, theirs, lambda name: row.limit(world_size))
        if watches:
            row.check(ours)
            if "weights" in ours.series:
                assert_differ(ours.series["weights"][0], ours.series["weights"][-1])


CASES = [
    pytest.param(
        name,
        optimizer,
        world_size,
        id=f"{name}-{optimizer}-{world_size}",
        # In every test run each row is run once, on two ranks or on three.
        marks=()
        if (optimizer, world_size) == (row.optimizers[-1], 2 + number % 2)
        else pytest.mark.slow,
    )
    for number, (name, row) in enumerate(ROWS.items())
    for optimizer in row.optimizers
    for world_size in ((1, 2, 3) if optimizer == row.optimizers[-1] else (2,))
]


@pytest.mark.parametrize(("name", "optimizer", "world_size"), CASES)
def test_row(name: str, optimizer: str, world_size: int) -> None:
    run_ranks(_run, world_size, name, optimizer, keeps_ranks=True)
