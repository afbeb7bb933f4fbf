"""An error on one rank is seen there as it was raised, and ends the other ranks too."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_dear import DearStrategy
from lightning_dear.planning import ThresholdFusion
from tests.distributed.calls import Raised, Returned
from tests.distributed.harness import observe_ranks
from tests.lightning.fitting import new_trainer
from tests.lightning.nets import Net, data

NUM_RANKS, FAILING_RANK, FAILING_STEP = 3, 1, 3
COLLECTIVE_TIMEOUT = timedelta(seconds=6)
HARNESS_TIMEOUT_S = 40
LINGER_S = 30


class _FailingNet(Net):
    """Raises on one rank at one step, in the hook that it is told."""

    def __init__(self, where: str) -> None:
        super().__init__("gpt", "adamw")
        self.where = where

    def _fail(self, where: str) -> None:
        is_here = self.trainer.global_step == FAILING_STEP and where == self.where
        if is_here and self.trainer.global_rank == FAILING_RANK:
            raise ZeroDivisionError("the user's own mistake")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self._fail("on_after_backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._fail("on_train_batch_end")


def _train(where: str, lingers: bool) -> None:
    fusion = ThresholdFusion(bucket_cap_mb=0.02, first_bucket_cap_mb=0.005)
    strategy = DearStrategy(fusion=fusion, timeout=COLLECTIVE_TIMEOUT)
    torch.manual_seed(0)
    try:
        new_trainer(strategy).fit(_FailingNet(where), data("gpt", 48))
    except ZeroDivisionError:
        if lingers:  # its sockets stay open: the others learn of it by the timeout alone
            with suppress(BaseException):
                time.sleep(LINGER_S)
        raise


@pytest.mark.parametrize("where", ["training_step", "on_after_backward", "on_train_batch_end"])
def test_an_exception_on_one_rank_ends_all(where: str) -> None:
    outcomes = observe_ranks(
        _train, NUM_RANKS, where, False, timeout_s=HARNESS_TIMEOUT_S, init_process_group=False
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
    assert outcomes[FAILING_RANK].message == """ZeroDivisionError("the user's own mistake")"""
    for outcome in (outcomes[0], outcomes[2]):
        assert "Error" in outcome.message
        assert outcome.time_s - outcomes[FAILING_RANK].time_s < 2 * COLLECTIVE_TIMEOUT.seconds


@pytest.mark.slow
def test_a_rank_that_fails_but_does_not_go_away() -> None:
    outcomes = observe_ranks(
        _train, NUM_RANKS, "training_step", True, timeout_s=50, init_process_group=False
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
    for rank in (0, 2):
        assert outcomes[FAILING_RANK].time_s - outcomes[rank].time_s > LINGER_S / 4


def _read_after_failure() -> bool:
    """A user who catches the exception may still look at the module."""
    net = _FailingNet("training_step")
    with suppress(Exception):
        new_trainer(DearStrategy(timeout=COLLECTIVE_TIMEOUT)).fit(net, data("gpt", 48))
    return all(bool(parameter.isfinite().all()) for parameter in net.parameters())


def test_the_module_is_readable_after_a_failure() -> None:
    outcomes = observe_ranks(
        _read_after_failure, NUM_RANKS, timeout_s=HARNESS_TIMEOUT_S, init_process_group=False
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Returned), f"rank {rank}: {outcome}"
        assert pickle.loads(outcome.value)
