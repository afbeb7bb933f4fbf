"""What a spawned rank does with an error before the process that started it hears of it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_dear import DearStrategy
from lightning_dear.strategy import failures
from lightning_dear.strategy.launchers import ReportingLauncher, _reporting, configure_launcher

WAIT_S = 0.3


class _Handling:
    """In the place of a strategy."""

    def __init__(self) -> None:
        self.told: list[BaseException] = []

    def report_failure(self, exception: BaseException) -> None:
        self.told.append(exception)


def fail(error: BaseException, *, also: int) -> None:
    assert also == 1
    raise error


@pytest.mark.parametrize(
    ("error", "waits"),
    [(ZeroDivisionError("own"), False), (RuntimeError("Connection closed by peer"), True)],
)
def test_an_error_is_reported_and_only_a_consequence_waits(
    error: Exception, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "REPORT_WAIT_S", WAIT_S)
    strategy: Any = _Handling()
    begin_s = time.monotonic()
    with pytest.raises(type(error)):
        _reporting(strategy.report_failure, fail, error, also=1)
    assert strategy.told == [error]
    assert (time.monotonic() - begin_s >= WAIT_S) == waits


def test_a_result_comes_back() -> None:
    assert _reporting(Any, partial(divmod, 7), 2) == (3, 1)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ours_gets_the_launcher_that_reports_and_others_keep_theirs(start_method: str) -> None:
    for kind, is_ours in ((DearStrategy, True), (DDPStrategy, False)):
        strategy = kind(start_method=start_method)
        Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
        configure_launcher(strategy)
        assert isinstance(strategy.launcher, ReportingLauncher) == is_ours
        assert strategy.launcher._start_method == start_method
