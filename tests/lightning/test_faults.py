"""A rank that raises, dies or hangs ends all ranks in time, says so, and costs no checkpoint."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.calls import Died, Outcome, Raised
from tests.distributed.harness import observe_ranks, run_ranks
from tests.lightning.faults import (
    MESSAGE,
    NUM_STEPS,
    TIMEOUT,
    Fault,
    checkpoint_in,
    random_faults,
    train,
)
from tests.lightning.fitting import assert_same

NUM_RANKS = 3
HAS_NOTES = sys.version_info >= (3, 11)
LATE_S = 60.0
"""After which a rank counts as hanging. Generous: a loaded machine is not a defect."""


def outcomes_of(fault: Fault, folder: Path) -> list[Outcome]:
    return observe_ranks(
        train, NUM_RANKS, folder, fault, timeout_s=LATE_S, init_process_group=False
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run_ranks(train, NUM_RANKS, folder, None, init_process_group=False)[0]


def assert_resumes(folder: Path, uninterrupted: list[list[torch.Tensor]]) -> None:
    """What is on the disk is whole, and training goes on from it to the same bits."""
    file = checkpoint_in(folder)
    done = torch.load(file, weights_only=True)["global_step"] if file.exists() else 0
    seen = run_ranks(train, NUM_RANKS, folder, None, file.exists(), init_process_group=False)[0]
    assert len(seen) == NUM_STEPS - done + 1
    assert_same(seen, uninterrupted[done:], "weights")


def quick_or_slow(faults: list[Fault], num_quick: int) -> list[object]:
    return [
        pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] * (number >= num_quick))
        for number, fault in enumerate(faults)
    ]


@pytest.mark.parametrize("fault", quick_or_slow(random_faults(20, seed=5), 3))
def test_a_killed_rank(fault: Fault, tmp_path: Path, uninterrupted: object) -> None:
    outcomes = outcomes_of(fault, tmp_path)
    for rank, outcome in enumerate(outcomes):
        if rank == fault.rank:
            assert isinstance(outcome, Died), outcome
            assert outcome.exit_code == -9
        else:
            assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
            if HAS_NOTES:
                expected = "rank 0" if fault.rank == 0 else f"[{fault.rank}] are gone"
                assert expected in outcome.traceback
    assert_resumes(tmp_path, uninterrupted)


@pytest.mark.parametrize("fault", quick_or_slow(random_faults(12, seed=1, kind="raise"), 2))
def test_a_rank_that_raises(fault: Fault, tmp_path: Path) -> None:
    start_s = time.monotonic()
    outcomes = outcomes_of(fault, tmp_path)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert outcome.time_s - start_s < LATE_S / 2
        if rank != fault.rank and HAS_NOTES:
            cause = f"Rank {fault.rank} failed first: ZeroDivisionError: {MESSAGE}"
            assert cause in outcome.traceback
    assert outcomes[fault.rank].message == f'ZeroDivisionError("{MESSAGE}")'


@pytest.mark.parametrize("fault", quick_or_slow(random_faults(6, seed=2, kind="hang"), 1))
def test_a_rank_that_hangs_in_python(fault: Fault, tmp_path: Path) -> None:
    """It swallows every exception; nobody but its own watch can end it here."""
    outcomes = outcomes_of(fault, tmp_path)
    first_s = min(outcome.time_s for outcome in outcomes if isinstance(outcome, Raised))
    for rank, outcome in enumerate(outcomes):
        if rank == fault.rank:
            assert isinstance(outcome, Died), f"rank {rank}: {outcome}"
            assert outcome.exit_code == 1
            assert outcome.time_s - first_s < 2 * TIMEOUT.total_seconds()
        else:
            assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
            if HAS_NOTES:
                assert f"Ranks [{fault.rank}] did not come" in outcome.traceback


@pytest.mark.parametrize(
    "fault",
    quick_or_slow(random_faults(6, seed=3, kind="collective"), 0),
)
def test_a_rank_that_hangs_in_a_collective(fault: Fault, tmp_path: Path) -> None:
    start_s = time.monotonic()
    for rank, outcome in enumerate(outcomes_of(fault, tmp_path)):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert outcome.time_s - start_s < LATE_S / 2
