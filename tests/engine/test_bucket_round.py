"""A round by itself: no autograd, no optimizer, some of a plan's buckets, any weights."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_dear.bucket import FlatBuffers, allocate
from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import Fp32, Signum
from lightning_dear.engine.bucket_round import LATE, UNUSED, USED, BucketRound
from lightning_dear.engine.notes import Notes, Signal
from lightning_dear.exchange import Traffic, new_exchange
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, TensorSpec
from tests.distributed.harness import distributed

NUMELS = (100, 30, 70, 5)
ENCODED = ExchangeOptions("gradients", compressor=Fp32())


class Rounds:
    """Four parameters, a bucket for each, and rounds over some of the buckets."""

    def __init__(
        self,
        numbers: Sequence[int] = range(len(NUMELS)),
        options: ExchangeOptions | None = None,
        notes: Notes | None = None,
    ) -> None:
        options = options or ExchangeOptions()
        self.collectives = new_collectives(torch.device("cpu"))
        tensors = [TensorSpec(n, f"p{n}", numel, 4, "f", n, n) for n, numel in enumerate(NUMELS)]
        plan = NoFusion().plan(tensors, self.collectives.world.size)
        self.flat = self._allocated(options, plan, self.collectives)
        traffic = Traffic(self.collectives, 0, self.flat, options.is_of_gradients)
        exchange = new_exchange(options, [None] * len(NUMELS), traffic)
        names = [tensor.name for tensor in tensors]
        order = [number for number in plan.reduce_order if number in numbers]
        waiting = lambda reason: nullcontext()  # noqa: E731
        self.round = BucketRound(self.flat, order, exchange, names, notes, waiting)
        self.numbers = order

    def _allocated(
        self, options: ExchangeOptions, plan: Any, collectives: Collectives
    ) -> FlatBuffers:
        parameters = [Parameter(torch.zeros(numel)) for numel in NUMELS]
        place = partial(options.role_of, plan), collectives.world.rank, collectives.scratch_numel
        return allocate(plan, parameters, *place, keeps_gradients=True)

    def fill(self, numbers: Sequence[int], rank: int | None = None) -> None:
        """Writes this rank's gradients into these buckets, multiplied as the round wants it."""
        rank = self.collectives.world.rank if rank is None else rank
        for number in numbers:
            scaled = gradient(number, rank) * self.round.weights.scale
            # What stands behind the last parameter fills the bucket up.
            self.flat.buckets[number].gradients[: NUMELS[number]] = scaled
            self.round.mark_full(number)

    def mean(self, number: int) -> Tensor:
        """All of a bucket's mean, from every rank's shard. Collective."""
        shards = self.collectives.all_gather_object(self.flat.buckets[number].mean.clone())
        return torch.cat(shards)[: NUMELS[number]]


def gradient(number: int, rank: int) -> Tensor:
    return torch.randn(NUMELS[number], generator=torch.Generator().manual_seed(10 * number + rank))


def weighted(number: int, weights: Sequence[float]) -> Tensor:
    """The mean over ranks in fp64."""
    parts = [gradient(number, rank).double() * own for rank, own in enumerate(weights)]
    return sum(parts[1:], parts[0]) / sum(weights)


def says(numbers: Sequence[int]) -> list[int]:
    return [USED if number in numbers else UNUSED for number in range(len(NUMELS))]


@pytest.mark.parametrize("options", [None, ENCODED], ids=["dense", "encoded"])
@distributed(world_sizes=(1, 2, 3))
def test_some_buckets_are_reduced_and_others_are_left_alone(options: Any) -> None:
    rounds = Rounds((0, 3), options)
    world = rounds.collectives.world
    others = [number for number in range(len(NUMELS)) if number not in rounds.numbers]
    for number in others:
        rounds.flat.buckets[number].gradients.fill_(7.0)
    rounds.round.expect()
    rounds.fill(rounds.numbers)
    rounds.round.launch_full()
    assert [*rounds.round.launched] == rounds.numbers
    assert not rounds.round.finish(says(rounds.numbers))
    assert rounds.round.used == [True, False, False, True]
    for number in rounds.numbers:
        expected = weighted(number, [1.0] * world.size)
        torch.testing.assert_close(rounds.mean(number).double(), expected, rtol=1e-5, atol=1e-6)
    assert all((rounds.flat.buckets[number].gradients == 7.0).all() for number in others)
    rounds.round.end_step()


@pytest.mark.parametrize("voting", [False, True])
@distributed(world_sizes=(1, 3))
def test_all_receives_are_posted_by_expect(voting: bool) -> None:
    signal = Signal()
    options = ExchangeOptions("gradients", compressor=Signum()) if voting else ExchangeOptions()
    rounds = Rounds((1, 2), options, Notes((signal,)))
    signal.ask = lambda: 1 + rounds.collectives.world.rank
    for _ in range(2):
        with mock.patch.object(dist, "irecv", wraps=dist.irecv) as posted:
            rounds.round.expect()
            num_posted = posted.call_count
            rounds.fill(rounds.numbers)
            rounds.round.launch_full()
            assert not rounds.round.finish(says(rounds.numbers))
            assert posted.call_count == num_posted == 3 * (rounds.collectives.world.size - 1)
        assert signal.heard == rounds.collectives.world.size
        rounds.round.end_step()


@distributed(world_sizes=(2, 3))
def test_a_rank_without_a_batch_counts_nothing_whatever_its_buckets_hold() -> None:
    rounds = Rounds()
    world = rounds.collectives.world
    own = [3.0, 0.0, 5.0][: world.size]
    rounds.round.weights.is_on = True
    rounds.round.weights.weigh(own[world.rank])
    rounds.round.weights.launch()
    if world.rank == 1:
        for bucket in rounds.flat.buckets:
            bucket.gradients.fill_(math.nan)
    else:
        rounds.fill(rounds.numbers)
    rounds.round.launch_all()
    rounds.round.finish(says(()) if world.rank == 1 else says(rounds.numbers))
    assert rounds.round.used == [True] * len(NUMELS)
    for number in rounds.numbers:
        expected = weighted(number, own)
        torch.testing.assert_close(rounds.mean(number).double(), expected, rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(1, 2, 3))
def test_equal_weights_scale_as_ddp_does_whatever_they_are() -> None:
    weights = Rounds().round.weights
    weights.is_on = True
    for own in (1.0, 3.0, 48.0, 1e-3):
        weights.weigh(own)
        assert weights.scale == 1.0 / dist.get_world_size()
        weights.reset()
    # No rank has a batch.
    weights.weigh(0.0)
    assert weights.scale == 0.0


@distributed(world_sizes=(2,))
def test_a_bucket_is_launched_then_on_the_host_then_it_has_arrived() -> None:
    rounds = Rounds()
    bucket_round, (first, *others) = rounds.round, rounds.numbers
    bucket_round.watch((first,))
    assert not bucket_round.launched
    if rounds.collectives.world.rank == 0:
        rounds.fill((first,))
        bucket_round.launch_full()
        # Rank 1 has sent nothing.
        assert not bucket_round.launched[first].is_on_host
    rounds.collectives.all_gather_object(None)
    if rounds.collectives.world.rank == 1:
        rounds.fill((first,))
        bucket_round.launch_full()
    end_s = time.monotonic() + 60
    while not bucket_round.launched[first].is_on_host and time.monotonic() < end_s:
        time.sleep(0.001)
    work = bucket_round.launched[first]
    assert work.is_on_host
    assert not work.is_done
    work.wait()
    assert work.is_done
    assert [*bucket_round.launched] == [first]
    rounds.fill(others)
    bucket_round.launch_all()
    bucket_round.finish(says(rounds.numbers))
    bucket_round.release()


@distributed(world_sizes=(2, 3))
def test_what_one_rank_has_late_is_added_by_another_round_of_all() -> None:
    rounds = Rounds()
    bucket_round, world = rounds.round, rounds.collectives.world
    rounds.fill(rounds.numbers)
    bucket_round.launch_all()
    told = says(rounds.numbers)
    if world.rank == 0:
        told[2] = LATE
    assert bucket_round.finish(told)
    assert [*bucket_round.late] == [2]
    first = rounds.mean(2)
    bucket_round.set_means_aside()
    for bucket in rounds.flat.buckets:
        bucket.gradients.zero_()
    if world.rank == 0:
        rounds.fill((2,), rank=9)
    bucket_round.launch_all()
    assert not bucket_round.finish(says((2,) if world.rank == 0 else ()))
    more = gradient(2, 9) / world.size
    torch.testing.assert_close(rounds.mean(2), first + more)
    assert bucket_round.used == [True] * len(NUMELS)


class _Said:
    """A note that keeps what it hears."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.heard: list[tuple[list[int], bool]] = []

    @property
    def num_bytes(self) -> int:
        return 2

    def say(self) -> bytes:
        return bytes([self.number, 255 - self.number])

    def hear(self, told: Sequence[int], *, is_of_round_before: bool) -> None:
        self.heard.append(([*told], is_of_round_before))


@pytest.mark.parametrize("blocks", [True, False], ids=["heard at once", "heard a round later"])
@distributed(world_sizes=(3,))
def test_all_hear_the_largest_that_any_says(blocks: bool) -> None:
    note = _Said(dist.get_rank())
    rounds = Rounds(notes=Notes([note]))
    rounds.collectives.wait_blocks_host = blocks
    for number in (0, 40):
        note.number = number + dist.get_rank()
        rounds.fill(rounds.numbers)
        rounds.round.launch_all()
        rounds.round.finish(says(rounds.numbers))
        rounds.round.end_step()
    said = [[2, 255], [42, 215]]
    heard = said if blocks else [[0, 0], said[0]]
    assert note.heard == [(one, not blocks) for one in heard]


@distributed(world_sizes=(1, 2))
def test_the_example_averages() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    lines = [line for line in str(BucketRound.__doc__).splitlines() if line.startswith(" " * 8)]
    start = next(place for place, line in enumerate(lines) if "new_collectives" in line)
    end = next(place for place, line in enumerate(lines) if "end_step" in line)
    names = {**globals(), "values": torch.full((8,), rank + 1.0)}
    exec(textwrap.dedent("\n".join(lines[start : end + 1])), names)
    assert names["mean"].tolist() == [(1 + num_ranks) / 2] * 8


def test_what_was_not_launched_is_named_and_so_are_wrong_arguments() -> None:
    rounds = Rounds((0, 3))
    with pytest.raises(RuntimeError, match=r"Buckets \[0, 3\] were not launched. Call launch_all"):
        rounds.round.finish(says([0, 3]))
    with pytest.raises(KeyError, match="2"):
        rounds.round.mark_full(2)
    rounds.round.launch_all()
    with pytest.raises(ValueError, match="1 flags for 4 parameters"):
        rounds.round.finish([USED])
    assert not rounds.round.finish(says([0, 3]))
