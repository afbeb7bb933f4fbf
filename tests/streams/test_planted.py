"""Faults that are planted under the real engine are found, each by what it should be found by."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_dear.collectives.nccl import ALL_GATHER, NativeCollectives
from lightning_dear.collectives.shards import shard_of
from lightning_dear.collectives.work import Work
from tests.streams.device import Cuda
from tests.streams.ranks import Found, on_simulated_cuda
from tests.streams.test_trainings import LONG_PAST
from tests.streams.trainings import OnDevice, Training, reference, train

CUDA: Any = Cuda()


def _unawaited(work: Work) -> Work:
    return work.inside(lambda arrive: None)


class _NoGatherWait(NativeCollectives):
    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        return _unawaited(super().launch_all_gather(buffer, bucket))


class _NoLastGatherWait(NativeCollectives):
    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        work = super().launch_all_gather(buffer, bucket)
        return work if bucket else _unawaited(work)


class _NoReduceScatterWait(NativeCollectives):
    @override
    def launch_reduce_scatter(self, *args: Any) -> Work:
        return _unawaited(super().launch_reduce_scatter(*args))


class _NoReduceWait(_NoReduceScatterWait):
    @override
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        return _unawaited(super().launch_max(flags, tag))


class _CopiesAfterLaunch(NativeCollectives):
    @override
    def launch_reduce_scatter(self, buffer: Tensor, *args: Any) -> Work:
        gradients = buffer.clone()
        buffer.zero_()
        work = super().launch_reduce_scatter(buffer, *args)
        buffer.copy_(gradients)
        return work


class _GathersBeside(NativeCollectives):
    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        with CUDA.stream(CUDA.Stream()):
            return super().launch_all_gather(buffer, bucket)


class _FreesEarly(NativeCollectives):
    @override
    def launch_all_gather(self, buffer: Tensor, bucket: int) -> Work:
        own = shard_of(buffer, self.world.rank, self.world.size).clone()
        # Without what is to be held.
        waits = [one[:2] for one in self.start(ALL_GATHER, self.gather_group, buffer, own)]
        work = self.new_work("all_gather", f"bucket {bucket}", waits)
        with CUDA.stream(CUDA.Stream()):
            for _, torchs_own in waits:
                torchs_own.wait()
        return work


class _BroadcastsLate(NativeCollectives):
    """Behind the flags, on all ranks but the first."""

    @override
    def launch_broadcast(self, buffer: Tensor, index: int) -> Work:
        # No flags follow the broadcast before the first forward.
        if self.world.rank == 0 or not hasattr(self, "_launched"):
            return super().launch_broadcast(buffer, index)
        held = self.__dict__.setdefault("_held", {})
        held[index] = partial(super().launch_broadcast, buffer, index)
        return Work(lambda: self._launched[index].wait())

    @override
    def launch_max(self, flags: Tensor, tag: int = -1) -> Work:
        work = super().launch_max(flags, tag)
        held = self.__dict__.pop("_held", {})
        self._launched = {index: launch() for index, launch in held.items()}
        return work


def _reads_loss(trained: OnDevice, step: int) -> None:
    float(trained.loss(step))


def _run(
    kind: type[NativeCollectives], model: str = "mlp", hook: Any = None
) -> tuple[Found[list[Tensor]], bool]:
    """What was found, and whether all the same the numbers are right."""
    training = Training(model=model)
    hooks = {} if hook is None else {"hook": hook}
    found = on_simulated_cuda(
        lambda rank: train(training, rank, rank.collectives(kind), **hooks), 2
    )
    right = reference(training, 2)
    return found, all(map(torch.equal, found.results[0], right))


@pytest.mark.parametrize(
    ("kind", "is_right"),
    [
        (_NoGatherWait, False),
        (_NoLastGatherWait, False),
        (_NoReduceWait, False),
        # Read as late as possible, and so what was copied in the end.
        (_CopiesAfterLaunch, True),
        # Nothing but the order of streams tells.
        (_GathersBeside, True),
    ],
)
def test_what_is_in_no_order_is_found(kind: type[NativeCollectives], is_right: bool) -> None:
    found, was_right = _run(kind)
    assert found.races
    assert not found.frees
    assert was_right == is_right
    if kind is _NoReduceWait:
        assert "reduce-scatter" in str(found.races)


def test_flags_are_behind_the_reduce_scatters_and_their_wait_is_enough() -> None:
    found, is_right = _run(_NoReduceScatterWait)
    found.check()
    assert is_right


def test_what_is_free_too_early_is_found() -> None:
    found, _ = _run(_FreesEarly)
    assert found.frees
    assert "test_planted.py:launch_all_gather" in str(found.frees)


def test_another_order_on_one_rank_is_found() -> None:
    with pytest.raises(RuntimeError, match="have launched different messages.* is broadcast of"):
        _run(_BroadcastsLate, "conv")


def test_a_wait_of_the_host_in_a_step_is_found() -> None:
    found, _ = _run(NativeCollectives, hook=_reads_loss)
    syncs = [one for one in found.syncs if LONG_PAST not in one]
    assert syncs
    assert all("test_planted.py:_reads_loss:" in one for one in syncs)
    found.check()
