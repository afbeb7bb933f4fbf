"""What travels: the right sums, in rank order, and exactly the bytes that the formula says."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_dear.collectives import factory
from lightning_dear.collectives.factory import forget_process_groups, new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.collectives.nccl import NativeCollectives
from lightning_dear.collectives.shards import shard_of, sum_in_source_order
from lightning_dear.collectives.streams import Streams
from lightning_dear.collectives.two_hops import NativeTwoHopCollectives
from lightning_dear.collectives.work import reusable_groups
from tests.distributed.harness import distributed, run_ranks
from tests.distributed.rank import on_hosts

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed()
def test_reduce_scatter_sums_in_rank_order(dtype: torch.dtype, world_size: int) -> None:
    collectives = new_collectives(torch.device("cpu"))
    rank, numel = dist.get_rank(), 64 * world_size * 3
    buffer = _values(rank, numel, dtype)
    received = torch.empty(collectives.scratch_numel(numel), dtype=dtype)
    own = shard_of(buffer, rank, world_size)
    collectives.launch_reduce_scatter(buffer, received, own, 0).wait()
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = _values(0, numel, dtype).to(wide)
    for other in range(1, world_size):
        total = total + _values(other, numel, dtype).to(wide)
    assert torch.equal(
        shard_of(buffer, rank, world_size), shard_of(total.to(dtype), rank, world_size)
    )


@distributed()
def test_all_gather_fills_every_shard_in_place(world_size: int) -> None:
    collectives = new_collectives(torch.device("cpu"))
    rank, numel = dist.get_rank(), 64 * world_size
    buffer = torch.full((numel,), -1.0)
    shard_of(buffer, rank, world_size).fill_(rank)
    collectives.launch_all_gather(buffer, 0).wait()
    assert buffer.tolist() == [float(i // 64) for i in range(numel)]


@distributed()
def test_bytes_follow_the_formula(world_size: int) -> None:
    collectives = new_collectives(torch.device("cpu"))
    numel = 64 * world_size * 5
    buffer = torch.zeros(numel)
    received = torch.empty(collectives.scratch_numel(numel))
    own = shard_of(buffer, dist.get_rank(), world_size)
    assert collectives.ledger.total() == 0
    collectives.launch_reduce_scatter(buffer, received, own, 0).wait()
    collectives.launch_all_gather(buffer, 0).wait()
    share = numel * 4 * (world_size - 1) // world_size
    assert collectives.ledger["reduce_scatter"] == share
    assert collectives.ledger["all_gather"] == share


@distributed()
def test_flags_and_broadcast(world_size: int) -> None:
    collectives = new_collectives(torch.device("cpu"))
    rank = dist.get_rank()
    flags = torch.zeros(world_size + 1, dtype=torch.uint8)
    flags[rank] = 1
    collectives.launch_max(flags).wait()
    assert flags.tolist() == [1] * world_size + [0]
    buffer = torch.full((5,), float(rank))
    collectives.launch_broadcast(buffer, 0).wait()
    assert buffer.tolist() == [0.0] * 5


@distributed(world_sizes=(2, 3))
def test_collectives_in_flight_do_not_mix(world_size: int) -> None:
    collectives = new_collectives(torch.device("cpu"))
    rank = dist.get_rank()
    buffers = [torch.full((64 * world_size,), float(10 * rank + i)) for i in range(6)]
    order = range(6) if rank == 0 else reversed(range(6))
    works = {i: collectives.launch_all_gather(buffers[i], i) for i in order}
    for i in (3, 0, 5, 1, 4, 2):
        works[i].wait()
        works[i].wait()
        assert buffers[i][::64].tolist() == [10.0 * other + i for other in range(world_size)]


@distributed(world_sizes=(2,))
def test_our_traffic_leaves_the_default_group_free() -> None:
    collectives = new_collectives(torch.device("cpu"))
    buffer = torch.zeros(64 * 2)
    if dist.get_rank() == 0:
        work = collectives.launch_all_gather(buffer, 0)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        collectives.launch_all_gather(buffer, 0).wait()


@distributed(world_sizes=(2,), keeps_ranks=False)
def test_groups_with_receives_that_no_launch_has_used_are_not_used_again() -> None:
    first = new_collectives(torch.device("cpu"))
    first.end_training()
    second = new_collectives(torch.device("cpu"))
    assert second.gather_group is first.gather_group
    buffer = torch.zeros(2)
    memory = StorageWeakRef(buffer.untyped_storage())
    if dist.get_rank() == 0:
        second.expect_all_gather(buffer, 0)
    second.end_training()
    before = second.gather_group
    del buffer, first, second
    third = new_collectives(torch.device("cpu"))
    assert third.gather_group is not before
    # A message may still arrive in it.
    assert memory.expired() == (dist.get_rank() > 0)


@distributed(world_sizes=(2,))
def test_beside_groups_of_another_backend_objects_have_one_of_gloos() -> None:
    with (
        mock.patch.object(factory, "_backend_of", return_value="nccl"),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        collectives = new_collectives(torch.device("cpu"))
        again = new_collectives(torch.device("cpu"))
    assert isinstance(collectives, NativeCollectives)
    assert isinstance(again, NativeCollectives)
    # The two of the default group's backend, and made once for both.
    assert [call.kwargs.get("backend") for call in made.call_args_list] == [None, None, "gloo"]
    groups = collectives.reduce_group, collectives.gather_group, collectives.object_group
    assert len(set(groups)) == 3
    assert groups == (again.reduce_group, again.gather_group, again.object_group)
    buffer = torch.ones(2)
    if dist.get_rank() == 0:
        # What the other rank, which was interrupted, has not launched.
        work = collectives.launch_all_reduce(buffer, 0)
    assert collectives.all_gather_object(dist.get_rank()) == [0, 1]
    if dist.get_rank() == 1:
        work = collectives.launch_all_reduce(buffer, 0)
    work.wait()
    assert buffer.tolist() == [2.0, 2.0]
    forget_process_groups()
    assert collectives.object_group is None


@distributed(world_sizes=(4,))
def test_groups_within_hosts_and_between_them_are_made_once() -> None:
    cpu, rank = torch.device("cpu"), dist.get_rank()
    with (
        on_hosts(2),
        mock.patch.object(factory, "_backend_of", return_value="nccl"),
        # gloo has no all-to-all of lists.
        mock.patch.object(factory, "_connect"),
    ):
        assert new_collectives(cpu).hops == 1
        first = new_collectives(cpu, hops=2)
        again = new_collectives(cpu, hops=2)
    assert isinstance(first, NativeTwoHopCollectives)
    assert isinstance(again, NativeTwoHopCollectives)
    assert first.device_groups == again.device_groups
    subgroups = first.device_groups[2:]
    assert len({*subgroups}) == 4
    for within, across in (subgroups[:2], subgroups[2:]):
        assert dist.get_process_group_ranks(within) == [rank - rank % 2, rank - rank % 2 + 1]
        assert dist.get_process_group_ranks(across) == [rank % 2, rank % 2 + 2]


def test_waits_that_block_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "True", "yes"):
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
        with pytest.raises(ValueError, match="TORCH_NCCL_BLOCKING_WAIT is set. Remove it"):
            factory._check_backend("nccl", torch.device("cuda"))
        factory._check_backend("gloo", torch.device("cpu"))
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    factory._check_backend("nccl", torch.device("cuda"))


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_the_default_group_is_asked_which_backend_serves_a_device(backend: str | None) -> None:
    run_ranks(_ask_which_backend_serves, 2, backend, init_process_group=False)


def _ask_which_backend_serves(backend: str | None) -> None:
    dist.init_process_group(*([backend] if backend else []))
    assert isinstance(new_collectives(torch.device("cpu")), PairwiseCollectives)
    # Groups of gloo alone would send them through the host's memory.
    if backend == "gloo":
        return
    with pytest.raises(ValueError, match="no backend for.*process_group_backend='nccl'"):
        new_collectives(torch.device("cuda"))


@distributed(world_sizes=(2,))
def test_connections_for_rows_are_opened_where_a_compressor_needs_them() -> None:
    with (
        mock.patch.object(factory, "_backend_of", return_value="nccl"),
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as opened,
        mock.patch.object(Streams, "synchronize") as waited,
    ):
        new_collectives(torch.device("cpu"))
        assert opened.call_count == 0
        collectives = new_collectives(torch.device("cpu"), sends_rows=True)
        assert opened.call_count == 1
    # Else the first backward would wait until they are open.
    assert waited.call_count == 2
    assert collectives.ledger.total() == 0


@given(st.integers(1, 5), st.integers(0, 4), st.sampled_from(DTYPES))
def test_sum_writes_into_the_given_row(num_rows: int, own: int, dtype: torch.dtype) -> None:
    own %= num_rows
    rows = [_values(number, 65, dtype) for number in range(num_rows)]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    expected = rows[0].to(wide)
    for row in rows[1:]:
        expected = expected + row.to(wide)
    out = rows[own]
    sum_in_source_order(rows, out)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("has_failed", [False, True])
@distributed(world_sizes=(2,), keeps_ranks=False)
def test_a_default_group_that_is_destroyed_is_let_go(has_failed: bool) -> None:
    """Otherwise the next group would find this one's addresses in the store."""
    collectives = new_collectives(torch.device("cpu"))
    if has_failed:
        collectives.discard()
    default = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    assert default() is None
    assert collectives.reduce_group is None
    assert not reusable_groups
