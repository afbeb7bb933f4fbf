"""What `DearMonitor` and `TimelineCallback` show of local steps in a fit."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_dear.callbacks import DearMonitor, TimelineCallback
from lightning_dear.local_steps import LocalSteps
from tests.distributed.harness import distributed, run_ranks
from tests.lightning.fitting import dear, new_trainer

WIDTH, SLEPT_S = 160, 0.1
NORMS = {"pseudo_gradient_norm", "agreement"}
NAMES = {"exchanges", "exchange_exposed_s", "exchange_wire_bytes"}


class Wide(LightningModule):
    """Layers so wide that padding and flags hardly count. The last rank may sleep in each step."""

    def __init__(self, *, sleeps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.sleeps = sleeps

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        if self.sleeps and self.global_rank == self.trainer.world_size - 1:
            time.sleep(SLEPT_S)
        loss: Tensor = self.net(batch + self.global_rank).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Seen(Callback):
    """Figures after each step, as `DearMonitor` logs them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        logged = trainer.callback_metrics.items()
        self.steps.append({name.removeprefix("dear/"): float(one) for name, one in logged})

    @override
    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def watched(
    steps: LocalSteps | None,
    num_batches: int,
    *callbacks: Callback,
    sleeps: bool = False,
    **options: Any,
) -> list[dict[str, float]]:
    """Fits, and returns what is logged in each step; in the last one also of the late rank."""
    seen = Seen()
    strategy = dear(local_steps=steps, fusion="threshold", **options)
    how = {"use_distributed_sampler": False, "log_every_n_steps": 2}
    trainer = new_trainer(strategy, *callbacks, seen, **how)
    data: Any = [torch.randn(4, WIDTH) for _ in range(num_batches)]
    batches: Any = DataLoader(data, batch_size=None)
    trainer.fit(Wide(sleeps=sleeps), batches)
    *steps, at_end = seen.steps
    steps[-1] = {**steps[-1], **{name: at_end[name] for name in at_end if "late" in name}}
    return steps


@distributed(world_sizes=(2, 3))
def test_figures_are_logged_from_the_step_of_a_merge_on() -> None:
    monitor = DearMonitor()
    logged = watched(LocalSteps(every=4, fragments=2, delay=1), 24, monitor)
    assert NAMES.isdisjoint(logged[0])
    # Behind the last step all that is left is exchanged.
    for number, found in enumerate(logged[1:-1], 2):
        # Sent after steps 1, 3, ... and merged after 2, 4, .... Norms are measured from the second
        # exchange on, and travel with the third.
        assert found["exchanges"] == number // 2
        assert (found.keys() >= NORMS) == (number >= 6), number
        assert found["drift"] > 0
    for name in ("exchange_wire_bytes", "exchange_exposed_s", "agreement", "pseudo_gradient_norm"):
        assert monitor.summary()[name] > 0
    assert "exchanges" not in monitor.summary()
    size = int(os.environ["WORLD_SIZE"])
    num_bytes = 4 * 4 * WIDTH * (WIDTH + 1)
    # 2 (P - 1) / P n / H in a step; an exchange every 2 steps.
    formula = 2 * (size - 1) / size * num_bytes / 4
    assert formula <= logged[-2]["exchange_wire_bytes"] / 2 < 1.02 * formula
    # The results of an exchange are sent in the step in which all sums are there, which may be the
    # step of its send.
    of_steps = [one["wire_bytes"] for one in logged[12:-1]]
    assert sum(of_steps) / len(of_steps) == pytest.approx(formula, rel=0.1)
    assert 0 < logged[-1]["agreement"] <= 1


@distributed(world_sizes=(2,))
def test_without_local_steps_nothing_of_exchanges_is_logged() -> None:
    logged = watched(None, 4, DearMonitor())
    assert "exposed_s" in logged[-1]
    assert (NAMES | NORMS | {"drift"}).isdisjoint(logged[-1])


@distributed(world_sizes=(2,))
def test_figures_of_the_compressor() -> None:
    logged = watched(LocalSteps(every=4, fragments=2), 8, DearMonitor(), compressor="int8")
    assert 3.5 < logged[-1]["compression_ratio"] <= 4
    assert logged[-1]["residual_norm"] > 0


@distributed(world_sizes=(2,))
def test_figures_begin_with_local_steps() -> None:
    logged = watched(LocalSteps(every=2, fragments=1, dense_steps=6), 16, DearMonitor())
    assert NAMES.isdisjoint(logged[5])
    assert logged[-2]["exchanges"] == 4
    assert logged[-1].keys() >= NORMS


def _on_some(ranks: str) -> dict[str, float]:
    has = os.environ["RANK"] in ranks
    found = watched(LocalSteps(every=2, fragments=1), 8, *([DearMonitor()] if has else []))
    return found[-1]


def test_ranks_without_the_monitor_are_not_asked_for_norms() -> None:
    first, second = run_ranks(_on_some, 2, "0")
    assert first.keys() >= NAMES
    assert NORMS.isdisjoint(first)
    assert not second


def _sleepy() -> list[dict[str, float]]:
    return watched(LocalSteps(every=4, fragments=1, delay=0), 24, DearMonitor(), sleeps=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_late_rank_exposes_the_exchanges_of_the_others(num_ranks: int) -> None:
    *others, last = run_ranks(_sleepy, num_ranks)
    for logged in others:
        for number in (7, 11, 15):
            # Computing of ranks that share cores takes a part of what the last one sleeps.
            assert 0.25 * 4 * SLEPT_S < logged[number]["exchange_exposed_s"] < 2.0
            assert last[number]["exchange_exposed_s"] < 0.5 * logged[number]["exchange_exposed_s"]
            # Of the step before.
            assert logged[number]["exposed_s"] < 0.5 * SLEPT_S
        assert logged[-1]["late_rank"] == num_ranks - 1
        assert logged[-1]["late_s"] > 0.25 * 4 * SLEPT_S


@pytest.mark.parametrize("delay", [0, 1, 5])
@distributed(world_sizes=(2, 3))
def test_the_timeline_has_whole_exchanges(delay: int, tmp_path: Path) -> None:
    recording = TimelineCallback(7, str(tmp_path))
    watched(LocalSteps(every=6, fragments=3, delay=delay), 24, recording)
    if os.environ["RANK"] != "0":
        return
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    found = Counter(one["name"] for one in events if one.get("cat") == "exchange")
    assert found
    assert found.keys() <= {f"fragment {number}" for number in range(3)}
    forwards = [one["ts"] for one in events if one.get("cat") == "forward"]
    assert len(forwards) == max(2, 2 + delay)
    for one in events:
        if one.get("cat") == "exchange":
            inside = [ts for ts in forwards if one["ts"] < ts < one["ts"] + one["dur"]]
            assert len(inside) == delay
    lanes = {one.get("cat") for one in events}
    assert {"reduce_scatter", "all_gather", "wait"} <= lanes
