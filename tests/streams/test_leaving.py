"""A rank that fails leaves no kernel behind that waits for other ranks, on simulated NCCL."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest

from lightning_dear.collectives import work
from lightning_dear.strategy.failure_watch import FailureWatch
from lightning_dear.strategy.failures import FailureBoard
from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.trainings import OnDevice, Training


def _fail(rank: Rank, ahead: tuple[int, ...]) -> bool:
    """Trains, and fails on all ranks. Returns whether this rank has aborted.

    Args:
        rank: This rank.
        ahead: Ranks that run one more backward before they fail.
    """
    trained = OnDevice(Training(), rank)
    collectives = trained.pipeline.collectives
    groups = collectives.device_groups

    def synchronize() -> None:
        while not all(group.is_idle for group in groups):
            time.sleep(0.01)

    collectives.streams.synchronize = synchronize  # type: ignore[method-assign]
    watch = FailureWatch(FailureBoard(), timedelta(seconds=40))
    watch.follow(collectives)
    for step in range(3):
        trained.step(step)
    if rank.number in ahead:
        trained.zero_grad()
        with trained.pipeline.forward():
            loss = trained.loss(3)
        with trained.pipeline.backward():
            loss.backward()
    watch.handle(ValueError("the user's"))
    trained.pipeline.abandon()
    trained.pipeline.detach()
    # Lets the other rank get as far.
    collectives.all_gather_object(None)
    watch.close()
    for group in groups:
        group.destroy()
    return collectives.was_aborted


@pytest.mark.parametrize("ahead", [(), (0,), (1,), (0, 1)])
def test_a_failing_rank_aborts_what_other_ranks_never_launch(
    ahead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LEAVE_S", 0.5)
    aborts = [len(ahead) == 1 and rank in ahead for rank in range(2)]
    assert on_simulated_cuda(partial(_fail, ahead=ahead), 2).results == aborts
