"""The hop within hosts is one kernel for all hosts' shards, on simulated NCCL."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lightning_dear import private_names
from lightning_dear.private_names import PrivateName
from tests.streams.communicators import Calls, Communicator
from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.trainings import NUM_STEPS, OnDevice, Training, reference, run, train


def _counts(size: int) -> Counter[str]:
    """Trains on hosts of two ranks. Returns communicator -> launches of one rank."""
    found = run(Training(), size, ranks_a_host=2)
    found.check()
    assert all(map(torch.equal, found.results[0], reference(Training(), size, 2)))
    launches = found.devices[0].launches
    return Counter(launch.rsplit("'", 2)[1] for launch in launches if " to " in launch)


def test_the_number_of_launches_does_not_grow_with_the_hosts() -> None:
    counts = _counts(4)
    assert counts == _counts(6)
    assert {*counts} == {f"{how} to {half}" for how in WAYS for half in ("reduce", "gather")}
    for half in ("reduce", "gather"):
        assert counts[f"within to {half}"] == counts[f"across to {half}"] >= NUM_STEPS


WAYS = ("within", "across")


def _give_up(trained: OnDevice, step: int) -> None:
    trained.pipeline.collectives.has_given_up = step > 0


def test_after_a_failure_its_wait_ends_like_all_others() -> None:
    """From then on waits get a time limit, which torch's own class does not take."""
    found = on_simulated_cuda(
        lambda rank: train(Training(), rank, hook=_give_up), 4, ranks_a_host=2
    )
    found.check()
    assert len(found.results) == 4


def test_a_torch_without_coalescing_launches_once_for_each_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = _counts(6)
    monkeypatch.setattr(private_names, "COALESCING", PrivateName("torch.distributed", "_none"))
    apart = _counts(6)
    for half in ("reduce", "gather"):
        assert apart[f"within to {half}"] == 3 * together[f"within to {half}"]
        assert apart[f"across to {half}"] == together[f"across to {half}"]


def _wait_for_a_part(rank: Rank) -> None:
    calls, group = Calls(), Communicator(rank.network, "all", rank.device)
    buffer = torch.zeros(4)
    rank.device.put(buffer)
    with calls._coalescing_manager(group, async_ops=True) as together:
        part = calls.all_gather_into_tensor(buffer, buffer[:2], group=group, async_op=True)
    together.wait()
    part.wait()


def test_the_simulation_refuses_to_wait_for_a_part() -> None:
    with pytest.raises(AssertionError, match="no work of its own"):
        on_simulated_cuda(_wait_for_a_part, 2)
