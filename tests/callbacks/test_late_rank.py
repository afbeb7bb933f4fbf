"""Which rank is late: what `DearMonitor` and `TimelineCallback` say of it, on which ranks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dear.callbacks import DearMonitor, TimelineCallback, monitor, timeline
from lightning_dear.planning import ThresholdFusion
from lightning_dear.strategy import connections
from lightning_dear.telemetry.statistics import Latest, latest_rank
from lightning_dear.telemetry.timeline import Timeline
from tests.distributed.harness import run_ranks
from tests.distributed.rank import RANKS_A_HOST
from tests.lightning.fitting import dear, fit
from tests.lightning.nets import Net

NUM_STEPS, SLEPT_S = 12, 0.1


@pytest.mark.parametrize(
    ("waits_s", "error_s", "late"),
    [
        pytest.param((0.5, 0.5, 0.0), 0.0, Latest(2, 0.5), id="the last"),
        pytest.param((0.0, 0.25, 0.75), 0.0, Latest(0, 0.5), id="the first"),
        pytest.param((0.25, 0.0), 0.0, Latest(1, 0.25), id="two ranks"),
        pytest.param((0.5, 0.5, 0.5), 0.0, Latest(None, 0.0), id="a slow link, where all wait"),
        pytest.param((0.125, 0.0), 0.0, Latest(1, 0.125), id="more than a tenth of a step"),
        pytest.param((0.0625, 0.0), 0.0, Latest(None, 0.0625), id="less than a tenth"),
        pytest.param((0.5, 0.0), 0.25, Latest(None, 0.5), id="too little to tell"),
        pytest.param((0.5, *(0.0,) * 4), 0.0, Latest(1, 0.125), id="two late ones: the lower"),
        pytest.param((0.5, *(0.0,) * 8), 0.0, Latest(None, 0.0625), id="one rank that is early"),
    ],
)
def test_the_rank_that_waits_least_is_late(
    waits_s: Sequence[float], error_s: float, late: Latest
) -> None:
    # The longest step and the largest error count.
    assert (
        latest_rank([(one, error_s / (1 + n), 1 - n / 9) for n, one in enumerate(waits_s)]) == late
    )


# --- in fits ------------------------------------------------------------------------------------


class Sleepy(Net):
    """The last rank is late."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == self.trainer.world_size - 1:
            time.sleep(SLEPT_S)
        return super().training_step(batch, batch_idx)


def _sleepy(
    folder: Path, watches: str, **options: Any
) -> tuple[dict[str, float], list[str], list[str]]:
    """Fits; returns what is logged of late ranks, the titles of pictures, and warnings of it.

    Args:
        folder: Of the pictures.
        watches: The ranks that have the callbacks.
        **options: Of the strategy.
    """
    titles: list[str] = []
    timeline.plot_timeline = lambda *given: titles.append(given[2])  # type: ignore[assignment]
    has = os.environ["RANK"] in watches
    callbacks: list[Callback] = [DearMonitor(), TimelineCallback(5, str(folder))] if has else []
    num_samples = 2 * NUM_STEPS * int(os.environ["WORLD_SIZE"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net = Sleepy("mlp", "adamw")
        trainer = fit(dear(**options), net, *callbacks, num_samples=num_samples)
    assert trainer.global_step == NUM_STEPS
    logged = {name: float(one) for name, one in trainer.callback_metrics.items() if "late" in name}
    return logged, titles, [str(one.message) for one in seen if "named as late" in str(one.message)]


@pytest.mark.parametrize(
    ("num_ranks", "ranks_a_host", "weights"),
    [
        (2, "1", None),
        (3, "1", None),
        pytest.param(4, "2", None, id="two hops"),
        # Ranks meet before backward already.
        pytest.param(3, "1", "samples", id="weights"),
    ],
)
def test_the_rank_that_sleeps_is_named(
    tmp_path: Path, num_ranks: int, ranks_a_host: str, weights: str | None
) -> None:
    env = {RANKS_A_HOST: ranks_a_host}
    of_ranks = run_ranks(_sleepy, num_ranks, tmp_path, "0123", env=env, weights=weights)
    first, titles, _ = of_ranks[0]
    assert first["dear/late_rank"] == num_ranks - 1
    assert 0.7 * SLEPT_S < first["dear/late_s"] < 2 * SLEPT_S
    assert [one[0] for one in of_ranks] == [first] * num_ranks
    assert [one[1:] for one in of_ranks[1:]] == [([], [])] * (num_ranks - 1)
    (title,) = titles
    assert title.startswith(f"Rank {num_ranks - 1} is late: the others wait ")
    assert 70 < float(title.split("wait ")[1].split(" ms")[0]) < 200


def test_one_rank_is_not_late(tmp_path: Path) -> None:
    assert run_ranks(_sleepy, 1, tmp_path, "0") == [({}, [""], [])]


def test_ranks_do_not_wait_for_a_rank_without_the_callbacks(tmp_path: Path) -> None:
    (first, warned), *others = [
        ((logged, titles), said) for logged, titles, said in run_ranks(_sleepy, 2, tmp_path, "0")
    ]
    assert first == ({}, [""])
    assert "[['DearMonitor()', 'TimelineCallback(5)'], []]" in warned[0]
    assert others == [(({}, []), [])]


def test_callbacks_that_differ_between_ranks_exchange_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = [DearMonitor(), TimelineCallback(step=7)]
    trainer: Any = SimpleNamespace(callbacks=ours, state=SimpleNamespace(fn=TrainerFn.FITTING))

    def begin(*others: list[str]) -> list[bool]:
        monkeypatch.setattr(connections, "from_all_ranks", lambda own: [own, *others])
        connections.append_callbacks(trainer, ThresholdFusion(), None)
        return [one.is_on_all_ranks for one in ours]

    same = ["DearMonitor()", "TimelineCallback(7)"]
    assert begin(same, same) == [True, True]
    with pytest.warns(UserWarning, match="No rank is named as late"):
        # The recordings end before different batches, in which ranks would wait for each other.
        assert begin(same, ["DearMonitor()", "TimelineCallback(8)"]) == [False, False]
    assert begin() == [False, False]


# --- what ranks tell each other -----------------------------------------------------------------


def _told(
    monkeypatch: pytest.MonkeyPatch, *epochs: Sequence[float]
) -> list[tuple[float, float, float]]:
    """What a rank with these waits tells the others at the end of each epoch."""
    told: list[tuple[float, float, float]] = []
    monkeypatch.setattr(monitor, "from_all_ranks", lambda own: told.append(own) or [own, own])
    one, module = DearMonitor(), SimpleNamespace(log_dict=lambda figures, **how: None)
    one.is_on_all_ranks = True
    for waits_s in epochs:
        for wait_s in waits_s:
            one._note({"exposed_s": wait_s, "step_s": 10 * wait_s})
        one.on_train_epoch_end(SimpleNamespace(), module)  # type: ignore[arg-type]
    return told


def test_an_epoch_counts_without_its_stalls_and_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _told(monkeypatch, [50.0] * 3 + [2.0] * 30 + [99.0], [3.0] * 30 + [99.0])
    assert first == (2.0, 0.0, 20.0)
    assert second == (3.0, 0.0, 30.0)


def test_epochs_of_few_steps_count_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _told(monkeypatch, [1.0, 3.0], [5.0, 5.0, 5.0])
    assert first == (2.0, 1.0, 20.0)
    assert second == (5.0, 0.0, 50.0)


def test_waits_that_vary_have_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    ((median_s, few_s, _),) = _told(monkeypatch, [50.0] * 3 + [1.0, 2.0] * 8)
    assert (median_s, few_s) == (1.5, 0.5)
    ramp = [n / 400 for n in range(400)]
    ((_, many_s, _),) = _told(monkeypatch, [50.0] * 3 + ramp)
    # 20 of 400 steps to each side of the median.
    assert 0.04 < many_s < 0.06


def test_a_rank_without_a_step_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _told(monkeypatch, []) == []


def test_what_a_timeline_tells_is_of_a_batch(tmp_path: Path) -> None:
    recorded = Timeline()
    for begin_s in (5.0, 6.0):
        recorded.record("forward", "forward", begin_s, begin_s + 0.25)
        recorded.record("wait", "gradients", begin_s + 0.25, begin_s + 0.5)
        recorded.record("wait", "net.0", begin_s + 0.5, begin_s + 0.75)
        recorded.record("all_gather", "bucket 0", begin_s + 0.25, begin_s + 1)
    assert recorded.waited == (0.5, 0.0, 1.0)
    assert Timeline().waited == (0.0, 0.0, 0.0)
