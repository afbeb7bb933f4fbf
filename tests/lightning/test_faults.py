"""A rank that raises, dies or hangs ends all ranks in time, says so, and costs no checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dear.emulation import EmulatedCluster
from tests.distributed.calls import Died, Outcome, Raised, Returned
from tests.distributed.harness import observe_ranks, run_ranks
from tests.distributed.rank import RANKS_A_HOST
from tests.lightning.faults import (
    MESSAGE,
    NUM_STEPS,
    TIMEOUT,
    Fault,
    FaultyNet,
    checkpoint_in,
    new_strategy,
    random_faults,
    train,
)
from tests.lightning.fitting import assert_same, new_trainer

NUM_RANKS = 3
HAS_NOTES = sys.version_info >= (3, 11)
LATE_S = 60.0
"""After which a rank counts as hanging. Generous: a loaded machine is not a defect."""


def outcomes_of(fault: Fault, folder: Path, num_ranks: int = NUM_RANKS) -> list[Outcome]:
    """Four ranks are on two hosts of two."""
    options = {"timeout_s": LATE_S, "init_process_group": False, "env": _env(num_ranks)}
    return observe_ranks(train, num_ranks, folder, fault, **options)


def _env(num_ranks: int) -> dict[str, str]:
    return {RANKS_A_HOST: "2"} if num_ranks == 4 else {}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return run_ranks(train, NUM_RANKS, folder, None, init_process_group=False)[0]


def assert_resumes(
    folder: Path, uninterrupted: list[list[torch.Tensor]], num_ranks: int = NUM_RANKS
) -> None:
    """What is on the disk is whole, and training goes on from it to the same bits."""
    options: dict[str, Any] = {"init_process_group": False, "env": _env(num_ranks)}
    file = checkpoint_in(folder)
    done = torch.load(file, weights_only=True)["global_step"] if file.exists() else 0
    seen = run_ranks(train, num_ranks, folder, None, file.exists(), **options)[0]
    assert len(seen) == NUM_STEPS - done + 1
    assert_same(seen, uninterrupted[done:], "weights")


def quick_or_slow(faults: list[Fault], num_quick: int) -> list[object]:
    return [
        pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] * (number >= num_quick))
        for number, fault in enumerate(faults)
    ]


@pytest.mark.parametrize("fault", quick_or_slow(random_faults(20, seed=5), 2))
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", random_faults(5, seed=7, world_size=4), ids=str)
def test_a_killed_rank_of_two_hosts_of_two(fault: Fault, tmp_path: Path) -> None:
    whole, options = tmp_path / "whole", {"init_process_group": False, "env": _env(4)}
    whole.mkdir()
    uninterrupted = run_ranks(train, 4, whole, None, **options)[0]
    outcomes = outcomes_of(fault, tmp_path, 4)
    ended = [isinstance(one, Raised) for rank, one in enumerate(outcomes) if rank != fault.rank]
    assert all(ended), outcomes
    assert_resumes(tmp_path, uninterrupted, 4)


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


class _Uneven(IterableDataset[Tensor]):
    """`numbers[rank]` batches."""

    def __init__(self, numbers: list[int]) -> None:
        self.number = numbers[int(os.environ["RANK"])]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(self.number, 1))


def _train_unevenly(numbers: list[int]) -> int:
    loader = DataLoader(_Uneven(numbers), batch_size=1)
    trainer = new_trainer(new_strategy(), max_epochs=1)
    trainer.fit(FaultyNet(), loader)
    # Rank 0 keeps what ranks report.
    time.sleep(2)
    return trainer.global_step


@pytest.mark.parametrize(
    "numbers", [[8, 5], *(pytest.param(n, marks=pytest.mark.slow) for n in ([5, 8], [8, 8, 5]))]
)
def test_one_that_has_fewer_batches_is_named(numbers: list[int]) -> None:
    outcomes = observe_ranks(_train_unevenly, len(numbers), numbers, init_process_group=False)
    for rank, outcome in enumerate(outcomes):
        if numbers[rank] == 5:
            assert isinstance(outcome, Returned), outcome
            continue
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert f"nothing from rank {numbers.index(5)} for 5 s" in outcome.message
        if HAS_NOTES:
            words = f"Rank {numbers.index(5)} has ended its training after 5 batches and 5 steps"
            assert words in outcome.traceback


class _Changing(FaultyNet):
    """Before its third step one rank alone trains with other groups."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or self.trainer.global_rank != self.rank:
            return
        (optimizer,) = self.trainer.optimizers
        optimizer.param_groups[0]["params"].pop()


def _train_changing(rank: int) -> None:
    loader = DataLoader(_Uneven([8] * NUM_RANKS), batch_size=1)
    new_trainer(new_strategy(), max_epochs=1).fit(_Changing(rank), loader)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_change_on_one_rank_is_told_to_all(rank: int) -> None:
    outcomes = observe_ranks(_train_changing, 2, rank, init_process_group=False)
    for one, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {one}: {outcome}"
        if one == rank:
            words = "Cannot follow a change of the optimizers, which all ranks must make"
            assert words in outcome.message
            assert f"only ranks [{rank}] of 2 came within 2.5 s" in outcome.message
        elif HAS_NOTES:
            assert f"Rank {rank} failed first: RuntimeError: Cannot follow" in outcome.traceback


class _Manual(FaultyNet):
    """Steps by itself; one rank leaves out what it is told to, in its third batch."""

    def __init__(self, left_out: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left_out = left_out

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        is_left_out = batch_idx == 2 and self.trainer.global_rank == 1
        if not (is_left_out and self.left_out == "both"):
            self.manual_backward(loss)
        if not is_left_out:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def _train_by_hand(left_out: str) -> None:
    loader = DataLoader(_Uneven([8] * NUM_RANKS), batch_size=1)
    new_trainer(new_strategy(), max_epochs=1).fit(_Manual(left_out), loader)


@pytest.mark.parametrize("left_out", ["step", pytest.param("both", marks=pytest.mark.slow)])
def test_one_that_leaves_out_a_step_is_named(left_out: str) -> None:
    outcomes = observe_ranks(_train_by_hand, 2, left_out, init_process_group=False)
    assert isinstance(outcomes[0], Raised), outcomes[0]
    if HAS_NOTES:
        words = "Rank 1 says: RuntimeError: Other ranks do not answer this rank before"
        assert words in outcomes[0].traceback


class _Stand(Callback):
    """One rank's process stands still in the third step, another's is killed."""

    def __init__(self, path: Path, numbers: dict[int, signal.Signals]) -> None:
        self.path, self.numbers = path, numbers

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank in self.numbers:
            self.path.write_text(str(time.monotonic()))
            os.kill(os.getpid(), self.numbers[trainer.global_rank])


def _train_and_stand(folder: Path, numbers: dict[int, signal.Signals], hangs: list[int]) -> None:
    fault = Fault("hang", "forward", hangs[0], 3) if hangs else None
    train(folder, fault, False, _Stand(folder / "struck", numbers))


def late_s(folder: Path, outcome: Raised | Died) -> float:
    """Seconds from the fault to the end, beyond the timeout."""
    return outcome.time_s - float((folder / "struck").read_text()) - TIMEOUT.total_seconds()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_stands_still_is_not_called_dead(rank: int, tmp_path: Path) -> None:
    outcomes = observe_ranks(
        _train_and_stand,
        3,
        tmp_path,
        {rank: signal.SIGSTOP},
        [],
        timeout_s=30,
        init_process_group=False,
    )
    reasons = []
    for other in {0, 1, 2} - {rank}:
        outcome = outcomes[other]
        assert isinstance(outcome, Raised), f"rank {other}: {outcome}"
        assert late_s(tmp_path, outcome) < 2
        assert "killed" not in outcome.traceback
        if HAS_NOTES:
            words = "is gone, stopped or out of" if rank == 0 else "Ranks [1] neither send nor"
            assert words in outcome.traceback
        reasons.append(outcome.message)
    assert any(f"nothing from rank {rank} for 5 s: link or rank" in one for one in reasons), reasons


@pytest.mark.slow
def test_a_rank_that_hangs_ends_when_rank_0_is_gone(tmp_path: Path) -> None:
    outcomes = observe_ranks(
        _train_and_stand,
        2,
        tmp_path,
        {0: signal.SIGKILL},
        [1],
        timeout_s=40,
        init_process_group=False,
    )
    assert isinstance(outcomes[1], Died), outcomes[1]
    assert outcomes[1].exit_code == 1
    assert late_s(tmp_path, outcomes[1]) < 2


class _Cut(Callback):
    """In the third step each host does something to its link."""

    def __init__(self, path: Path, commands: dict[int, str]) -> None:
        self.path, self.commands = path, commands

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        command = self.commands.get(trainer.global_rank)
        if trainer.global_step == 3 and command is not None:
            self.path.write_text(str(time.monotonic()))
            subprocess.Popen(["sh", "-c", command])


def _train_and_cut(folder: Path, commands: dict[int, str]) -> None:
    train(folder, None, False, _Cut(folder / "struck", commands))


def _cut(folder: Path, commands: dict[int, str]) -> list[Outcome]:
    with EmulatedCluster(num_hosts=2, rate_mbit=1000) as cluster:
        return observe_ranks(
            _train_and_cut,
            2,
            folder,
            commands,
            timeout_s=40,
            hosts=cluster.hosts,
            init_process_group=False,
        )


SHORT_PACKETS = "ip link set eth0 gso_max_segs 1"
LASTING = {
    "down": {1: "ip link set eth0 down"},
    "blackhole": {1: "ip route replace blackhole 10.0.0.1/32"},
    # Packets of more bytes are dropped, and nobody tells who sends them.
    "mtu": {0: SHORT_PACKETS, 1: f"{SHORT_PACKETS}; ip link set eth0 mtu 200"},
}
PASSING = {
    "down for 3 s": {1: "ip link set eth0 down; sleep 3; ip link set eth0 up"},
    "1 Mb/s": {1: "tc qdisc change dev eth0 root handle 1: tbf rate 1mbit burst 64kb limit 16mb"},
}


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("what", LASTING)
def test_a_link_that_goes_down(what: str, tmp_path: Path) -> None:
    outcomes = _cut(tmp_path, LASTING[what])
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), f"rank {rank}: {outcome}"
        assert late_s(tmp_path, outcome) < 2
        assert f"rank {1 - rank}" in outcome.message
        assert "killed" not in outcome.traceback


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("what", PASSING)
def test_a_link_that_is_slow_or_comes_back(what: str, tmp_path: Path) -> None:
    outcomes = _cut(tmp_path, PASSING[what])
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Returned), f"rank {rank}: {outcome}"
