"""All-gathers that go round a ring: which ones, with which bytes, and what is left in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dear import pairwise
from lightning_dear.collectives import forget_process_groups, new_collectives
from lightning_dear.gathering import Gathering
from lightning_dear.groups import reusable_groups
from lightning_dear.pairwise import PairwiseCollectives
from lightning_dear.pipeline import Pipeline
from lightning_dear.planning import ThresholdFusion
from lightning_dear.summing import shard_of
from lightning_dear.work import GRADIENT_NUMBERS, PROBE_NUMBERS, STATE_NUMBERS
from tests.distributed.harness import distributed

LEAST = 1 << 16


def _collectives() -> PairwiseCollectives:
    # Each rank of a test is a process of its own.
    pairwise.LEAST_RING_BYTES = LEAST
    collectives = new_collectives(torch.device("cpu"))
    assert isinstance(collectives, PairwiseCollectives)
    assert not collectives.has_one_order
    collectives.has_one_order = True
    return collectives


def _gathered(collectives: PairwiseCollectives, buffer: torch.Tensor, number: int) -> bool:
    """Gathers ranks' numbers, and tells whether messages went straight."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard_of(buffer, rank, world_size).fill_(rank + 1)
    sent: list[int] = []
    exchange = PairwiseCollectives._exchange

    def note(self: PairwiseCollectives, *args: object) -> object:
        sent.append(number)
        return exchange(self, *args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairwiseCollectives, "_exchange", note)
        collectives.expect_all_gather(buffer, number)
        work = collectives.launch_all_gather(buffer, number)
        work.wait()
    for source in range(world_size):
        assert (shard_of(buffer, source, world_size) == source + 1).all()
    return bool(sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@distributed(world_sizes=(2, 3, 4))
def test_large_buckets_go_round_a_ring(dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    collectives = _collectives()
    least = world_size * LEAST // dtype.itemsize
    for numel, number, is_large in (
        (least, 5, True),
        (least, PROBE_NUMBERS, True),
        (least - world_size, 5, False),
        # Perhaps launched by some ranks only, and then never matched with another one.
        (least, GRADIENT_NUMBERS, False),
        (least, STATE_NUMBERS + 1, False),
    ):
        buffer = torch.zeros(numel, dtype=dtype)
        before = collectives.ledger.all_gather_bytes
        goes_straight = _gathered(collectives, buffer, number)
        assert goes_straight is (world_size == 2 or not is_large), (numel, number)
        sent_bytes = collectives.ledger.all_gather_bytes - before
        assert sent_bytes == numel * dtype.itemsize // world_size * (world_size - 1)


@distributed(world_sizes=(3,))
def test_a_ring_does_not_meet_what_only_some_ranks_have_sent() -> None:
    collectives = _collectives()
    buffers = [torch.zeros(3 * LEAST // 4) for _ in range(2)]
    rank = dist.get_rank()
    for buffer in buffers:
        shard_of(buffer, rank, 3).fill_(rank + 1)
    # Rank 1 is late with both, and has told the others something in between.
    works = [collectives.launch_all_gather(buffers[0], 0)] if rank != 1 else []
    assert collectives.all_gather_object(rank) == [0, 1, 2]
    works += [collectives.launch_all_gather(buffers[0], 0)] if rank == 1 else []
    works.append(collectives.launch_all_gather(buffers[1], 1))
    for work in reversed(works):
        work.wait()
    for buffer in buffers:
        assert [shard_of(buffer, source, 3)[0].item() for source in range(3)] == [1, 2, 3]


@distributed(world_sizes=(4,))
def test_a_rank_that_waits_alone_needs_nobody_to_wait() -> None:
    collectives = _collectives()
    buffers = [torch.full((4 * LEAST // 4,), float(dist.get_rank())) for _ in range(6)]
    works = [collectives.launch_all_gather(buffer, i) for i, buffer in enumerate(buffers)]
    if dist.get_rank() == 2:
        for work in works:
            work.wait()
    # The others first wait for rank 2's word that it has everything.
    assert collectives.all_gather_object("here")[2] == "here"
    for work in works:
        work.wait()


@distributed(world_sizes=(3,))
def test_rings_are_for_one_pipeline_with_one_optimizer_and_no_depth() -> None:
    def has_one_order(num_optimizers: int = 1, **options: Any) -> bool:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        collectives = new_collectives(torch.device("cpu"))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        if num_optimizers == 1:
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        Pipeline(model, optimizers, collectives, ThresholdFusion(), **options).detach()
        return collectives.has_one_order

    assert has_one_order()
    assert has_one_order(gathering=Gathering("gradients"))
    assert not has_one_order(num_optimizers=2)
    assert not has_one_order(first_number=1)
    assert not has_one_order(gathering=Gathering("parameters", 2))


@distributed(world_sizes=(3,))
def test_groups_are_kept_for_the_next_fit_and_forgotten_at_the_end() -> None:
    first, again = _collectives(), _collectives()
    assert first._ring_group is again._ring_group is not None
    ((_, groups),) = reusable_groups.values()
    assert len(groups) == len(set(map(id, groups))) == 3
    del groups
    forget_process_groups()
    assert first._ring_group is None
    assert first.reduce_group is first.gather_group is None
