"""Schedules of compressors that would be ignored, or do what is refused without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dear import DearStrategy
from lightning_dear.callbacks import CompressionSchedule, DearMonitor
from lightning_dear.compression import DGC, Compressor, SignSGD, Signum, TopK
from lightning_dear.strategy.connections import append_callbacks
from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net


@pytest.mark.parametrize(
    ("codec", "schedule", "message"),
    [
        (SignSGD(), {"dense_steps": 1}, "Leave dense_steps out.*different learning rates"),
        (Signum(), {"dense_steps": 1}, "Leave dense_steps out.*different learning rates"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(
    codec: Compressor, schedule: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DearStrategy(compressor=codec, compression_schedule=CompressionSchedule(**schedule))


@pytest.mark.parametrize(
    ("codec", "schedule"),
    [
        (TopK(), {"densities": {0: 0.5}}),
        (DGC(), {"dense_steps": 5, "densities": {15: 0.1}}),
        (SignSGD(), {}),
    ],
)
def test_what_it_can_do_is_not(codec: Compressor, schedule: dict[str, Any]) -> None:
    DearStrategy(compressor=codec, compression_schedule=CompressionSchedule(**schedule))


@pytest.mark.parametrize("wrong", [{"dense_steps": 1e3}, {"densities": {1e3: 0.1, "5": 0.2}}])
def test_steps_are_integers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Steps must be integers .*1000\.0"):
        CompressionSchedule(**wrong)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be CompressionSchedule or None, got \{0: 0\.1\}"):
        DearStrategy(compressor="topk", compression_schedule={0: 0.1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a dict, such as"):
        CompressionSchedule(densities=[0.1])  # type: ignore[arg-type]


def test_a_density_that_no_step_would_have_is_refused() -> None:
    CompressionSchedule(dense_steps=9, densities={0: 0.5, 10: 0.1})
    message = "density from step 0 on would never be used.* dense_steps=9 .* from step 9 on"
    with pytest.raises(ValueError, match=message):
        CompressionSchedule(dense_steps=9, densities={0: 0.5, 9: 0.1})


def test_a_schedule_that_no_strategy_knows_is_refused() -> None:
    schedule = CompressionSchedule(dense_steps=1)
    trainer: Any = SimpleNamespace(strategy=DearStrategy(compressor="int8"))
    schedule.setup(trainer, LightningModule(), "validate")
    with pytest.raises(ValueError, match=r"DearStrategy\(compression_schedule=\.\.\.\)"):
        schedule.setup(trainer, LightningModule(), "fit")


def test_a_schedule_that_is_a_callback_as_well_is_connected_once() -> None:
    schedule = CompressionSchedule(dense_steps=1)
    strategy: Any = DearStrategy(compressor="int8", compression_schedule=schedule)
    trainer: Any = SimpleNamespace(
        callbacks=[schedule], state=SimpleNamespace(fn=TrainerFn.FITTING), strategy=strategy
    )
    append_callbacks(trainer, strategy._fusion, schedule)
    assert trainer.callbacks == [schedule]
    schedule.setup(trainer, LightningModule(), "fit")


@distributed(world_sizes=(1,))
def test_a_schedule_is_driven_for_one_fit() -> None:
    schedule = CompressionSchedule(dense_steps=1)
    strategy = dear(compressor="int8", compression_schedule=schedule)
    fit(strategy, Net("mlp", "sgd"))
    with pytest.raises(ValueError, match="changes nothing by itself"):
        fit(dear(compressor="int8"), Net("mlp", "sgd"), schedule)


def test_the_monitor_reads_nothing_where_nothing_is_logged() -> None:
    strategy = SimpleNamespace(encoding_figures=lambda: {"lag": 1.0})
    for interval, figures in ((0, {}), (1, {"lag": 1.0})):
        trainer: Any = SimpleNamespace(log_every_n_steps=interval, global_step=3, strategy=strategy)
        monitor = DearMonitor()
        monitor.on_before_zero_grad(trainer, LightningModule(), None)
        assert monitor._encoding == figures
