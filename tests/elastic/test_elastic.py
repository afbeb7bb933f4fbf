"""SIGTERM to some hosts: torchrun goes on with the others, from the very step of the stop."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_dear import DearStrategy
from lightning_dear.strategy import starting
from lightning_dear.strategy.connections import RESTART, StopRequest
from tests.distributed.harness import run_ranks
from tests.elastic import agents
from tests.lightning.fitting import dear, fit, new_trainer
from tests.lightning.nets import Net, data


class _Strikes(Callback):
    """Sends a signal to its own process in the third batch."""

    def __init__(self, number: int) -> None:
        self.number = number

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), self.number)


def _fit(hosts: list[int], asked: list[int], restarts: list[int], number: int) -> Any:
    rank = int(os.environ["RANK"])
    os.environ |= {
        "GROUP_RANK": str(hosts[rank]),
        "TORCHELASTIC_RESTART_COUNT": str(restarts[hosts[rank]]),
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with mock.patch.object(starting, "check_elastic"):
        callbacks = [_Strikes(number)] if rank in asked else []
        trainer = new_trainer(dear(elastic=True), *callbacks)
    try:
        trainer.fit(Net("mlp"), data("mlp", 96), ckpt_path="last")
    except SystemExit as end:
        return end.code, trainer.global_step
    return "nothing", trainer.global_step


@pytest.mark.parametrize(
    ("hosts", "asked", "restarts", "codes"),
    [
        ([0, 0, 1], [1], [0, 2], [None, None, RESTART]),
        ([0, 0, 1], [2], [2, 0], [RESTART, RESTART, None]),
        # The largest count is that of all.
        ([0, 0, 1], [1], [3, 0], [None] * 3),
        ([0, 1], [0, 1], [0, 0], [None] * 2),
    ],
)
def test_hosts_without_the_signal_are_started_again_if_restarts_are_left(
    hosts: list[int], asked: list[int], restarts: list[int], codes: list[Any]
) -> None:
    arguments = hosts, asked, restarts, signal.SIGTERM
    seen = run_ranks(_fit, len(hosts), *arguments, init_process_group=False)
    assert seen == [(code, 4) for code in codes]


@pytest.mark.parametrize(
    ("got_sigterm", "count", "code"), [(False, 2, RESTART), (False, 3, None), (True, 0, None)]
)
def test_ranks_that_hear_nothing_in_time_decide_alone(
    got_sigterm: bool, count: int, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("GROUP_RANK", 1), ("TORCHELASTIC_RESTART_COUNT", count)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    request: Any = object.__new__(StopRequest)
    request.board = mock.Mock(**{"end_with.return_value": []})
    request._is_elastic, request._got_sigterm = True, got_sigterm
    assert request._code == code


def test_after_ctrl_c_nothing_is_started_again() -> None:
    seen = run_ranks(_fit, 2, [0, 1], [0], [0, 0], signal.SIGINT, init_process_group=False)
    assert seen == [(1, 4)] * 2


def test_without_torchrun_and_its_restarts_it_is_refused() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x"}
    torchrun |= {name: "0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")} | {"WORLD_SIZE": "1"}
    for variables in ({}, torchrun, {"TORCHELASTIC_MAX_RESTARTS": "3"}):
        with (
            mock.patch.dict(os.environ, variables),
            pytest.raises(ValueError, match="elastic=True needs a launcher .* --max-restarts=3"),
        ):
            Trainer(strategy=DearStrategy(elastic=True), accelerator="cpu", devices=1)


def _warned(ckpt_path: str | None) -> int:
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if ckpt_path is None:
            fit(dear(), Net("mlp"), max_epochs=1)
        else:
            new_trainer(dear()).fit(Net("mlp"), data("mlp", 96), ckpt_path=ckpt_path)
    return sum("it would begin anew" in str(one.message) for one in said)


def test_restarts_without_a_checkpoint_are_warned_of() -> None:
    assert run_ranks(_warned, 2, None) == [1, 0]
    assert run_ranks(_warned, 2, "last") == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_goes_on_with_the_other_hosts(tmp_path: Path) -> None:
    found = agents.stopped(tmp_path / "job", 3, 1, [1], 20)
    assert found["worlds"] == [2]
    assert found["first"] == [found["stop"] + 1]
    assert found["equal"]
    assert [found["codes"][0], found["codes"][2]] == [0, 0]
