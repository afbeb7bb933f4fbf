"""Hosts of several ranks: sums are encoded within a host, and nothing is lost on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.shards import shard_of
from lightning_dear.collectives.two_hops import TwoHopCollectives
from lightning_dear.compression import (
    CODECS,
    DGC,
    Codec,
    Compressor,
    Int4,
    Int8,
    LoCo,
    PowerSGD,
    Signum,
    TopK,
    TopkA,
)
from lightning_dear.exchange.base import GradientsNotFinite
from lightning_dear.exchange.coded_bucket import CodedBucket
from lightning_dear.exchange.options import ExchangeOptions, default_gather
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts
from tests.exchange.test_coded import CONTRACTIVE
from tests.training import three_ways
from tests.training.linear import Known, Run, gradients_of
from tests.training.models import distance, weights
from tests.training.three_ways import new_pipeline

CPU = torch.device("cpu")
BY_ROWS = [kind() for kind in CODECS.values() if not kind().votes]


def same_everywhere(tensors: Any) -> None:
    """Fails unless all ranks have the same bits."""
    own = [one.detach().numpy().tobytes() for one in tensors]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    assert all(other == everyones[0] for other in everyones)


# --- dense ----------------------------------------------------------------------------------------


def in_order_of_hosts(rows: list[Tensor], size: int) -> Tensor:
    """What every exchange over gloo sums: a host's ranks in order, then the hosts in order."""
    hosts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    sums = []
    for ranks in hosts:
        total = ranks[0].float()
        for row in ranks[1:]:
            total = total + row.float()
        # What travels between hosts is as wide as what travels within.
        sums.append(total.to(rows[0].dtype) if 1 < size < len(rows) else total)
    total = sums[0].float()
    for one in sums[1:]:
        total = total + one.float()
    return total


def _reduced_and_gathered(hops: int | None, numbers: Tensor, *, expects: bool) -> Tensor:
    collectives = new_collectives(CPU, hops=hops)
    rank, size = dist.get_rank(), dist.get_world_size()
    rounds = [numbers * 2.0**number for number in range(3)]
    received = [one.new_empty(collectives.scratch_numel(one.numel())) for one in rounds]
    means = [torch.empty(numbers.numel() // size) for _ in rounds]
    for number in range(3) if expects else ():
        collectives.expect_reduce_scatter(received[number], number)
    works = [
        collectives.launch_reduce_scatter(rounds[number], received[number], means[number], number)
        for number in range(3)
    ]
    for work in works:
        work.wait()
    wholes = [torch.zeros(numbers.numel()) for _ in rounds]
    for number in range(3):
        shard_of(wholes[number], rank, size).copy_(means[number])
        if expects:
            collectives.expect_all_gather(wholes[number], number)
    for work in [collectives.launch_all_gather(one, at) for at, one in enumerate(wholes)]:
        work.wait()
    return torch.cat(wholes)


@pytest.mark.parametrize("ranks_a_host", [1, 2, 4])
@distributed(world_sizes=(4,))
def test_sums_have_the_bits_of_the_layout_in_any_number_of_hops(ranks_a_host: int) -> None:
    with on_hosts(ranks_a_host):
        for dtype in (torch.float32, torch.bfloat16):
            everyones = [
                torch.randn(4 * 1001, generator=torch.Generator().manual_seed(rank)).to(dtype)
                for rank in range(4)
            ]
            expected = in_order_of_hosts(everyones, ranks_a_host)
            for hops in (None, 1):
                own = everyones[dist.get_rank()]
                for expects in (False, True):
                    seen = _reduced_and_gathered(hops, own, expects=expects)
                    assert torch.equal(seen[: len(expected)], expected)
                    same_everywhere([seen])


@distributed(world_sizes=(6,))
def test_three_ranks_of_a_host_are_summed_in_order() -> None:
    with on_hosts(3):
        everyones = [
            torch.randn(6 * 101, generator=torch.Generator().manual_seed(rank)) for rank in range(6)
        ]
        seen = _reduced_and_gathered(None, everyones[dist.get_rank()], expects=False)
        assert torch.equal(seen[: 6 * 101], in_order_of_hosts(everyones, 3))


@distributed(world_sizes=(4,))
def test_a_host_may_gather_long_before_the_other() -> None:
    with on_hosts(2):
        collectives = new_collectives(CPU)
        assert isinstance(collectives, TwoHopCollectives)
        buffers = [torch.full((8,), float(dist.get_rank())) for _ in range(2)]
        sums, mean = torch.ones(8), torch.empty(2)
        received = torch.empty(collectives.scratch_numel(8))
        is_early, works = dist.get_rank() < 2, []
        if is_early:
            works.append(collectives.launch_all_gather(buffers[0], 0))
        # The other host gathers only once it has this sum.
        collectives.launch_reduce_scatter(sums, received, mean, 7).wait()
        assert mean.tolist() == [4.0, 4.0]
        if not is_early:
            works.append(collectives.launch_all_gather(buffers[0], 0))
        works.append(collectives.launch_all_gather(buffers[1], 1))
        for one in works:
            one.wait()
        for buffer in buffers:
            assert buffer.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(("hops", "ranks_a_host"), [(2, 1), (2, 4)])
@distributed(world_sizes=(4,))
def test_two_hops_that_cannot_be_are_one_and_said(hops: int, ranks_a_host: int) -> None:
    with on_hosts(ranks_a_host):
        if dist.get_rank():
            collectives = new_collectives(CPU, hops=hops)
        else:
            with pytest.warns(UserWarning, match="hops=2 has no effect here"):
                collectives = new_collectives(CPU, hops=hops)
        assert collectives.hops == 1


@distributed(world_sizes=(4,))
def test_ranks_must_want_as_many_hops() -> None:
    with on_hosts(2), pytest.raises(ValueError, match="hops must be the same on all ranks"):
        new_collectives(CPU, hops=1 if dist.get_rank() else None)


@pytest.mark.slow
@distributed(world_sizes=(4,), keeps_ranks=False)
def test_who_waits_for_a_rank_that_is_silent_ends_within_the_timeout() -> None:
    timeout_s = 3.0
    with on_hosts(2):
        collectives = new_collectives(CPU, timedelta(seconds=timeout_s))
    # One that does nothing lets both hops of all others wait, within its host and between hosts.
    if dist.get_rank() == 3:
        time.sleep(2.5 * timeout_s)
        return
    begin_s = time.monotonic()
    sums, mean = torch.ones(8), torch.empty(2)
    received = torch.empty(collectives.scratch_numel(8))
    work = collectives.launch_reduce_scatter(sums, received, mean, 0)
    says = r"bucket 0 (within|between).*(nothing from|closed by) rank"
    with pytest.raises(RuntimeError, match=says):
        work.wait()
    assert time.monotonic() - begin_s < 2 * timeout_s


# --- coded ----------------------------------------------------------------------------------------


@distributed(world_sizes=(6,))
def test_what_is_lost_arrives_later() -> None:
    """sum of what arrives + residuals = sum of the mean gradients, through another plan as well."""
    _check_law("parameters", [Int4(block_size=64, halves="reduce")])
    _check_law("gradients", [LoCo(block_size=64), TopK(density=0.05)])


@pytest.mark.slow
@distributed(world_sizes=(6,), timeout_s=120)
def test_what_is_lost_arrives_later_with_every_codec() -> None:
    _check_law("gradients", CONTRACTIVE)


def _check_law(gather: str, codecs: Sequence[Compressor]) -> None:
    with on_hosts(3):
        for codec in codecs:
            run = Run(ExchangeOptions(gather, compressor=codec))
            assert run.together == 3
            for step in range(9):
                run.step(leaves_out=step % 5 == 3)
                if step == 4:
                    run.part.replan(SingleFusion().plan(run.part.tensors, 6))
                if step == 6:
                    run.part.replan(NoFusion().plan(run.part.tensors, 6))
            rate = codec.rate if isinstance(codec, LoCo) else 1.0
            assert run.error(rate) <= 1e-5, codec
            assert max(run.errors(rate)) <= 1e-4, codec


@distributed(world_sizes=(4,), timeout_s=120)
def test_ranks_agree_to_the_bit_with_every_codec() -> None:
    with on_hosts(2):
        for codec in BY_ROWS:
            options = ExchangeOptions(default_gather(codec), compressor=codec)
            run = Run(options, momentum=0.0 if isinstance(codec, DGC) else 0.9)
            for step in range(4):
                run.step(leaves_out=step == 2)
                run.pipeline.complete_parameters()
                same_everywhere(run.model.weights)


def _late_compensate(self: CodedBucket, rows: Tensor, scale: Tensor | None) -> None:
    time.sleep(0.3)
    self.worker.compensate(rows, scale)


@distributed(world_sizes=(4,))
def test_nan_of_one_rank_is_noticed_by_all_in_the_same_step() -> None:
    with on_hosts(2):
        run = Run(ExchangeOptions("gradients", compressor=Int8()))
        run.step()
        before = weights(run.model)
        # Found long after backward has ended.
        with mock.patch.object(CodedBucket, "compensate", _late_compensate):
            run.backward(scale=math.nan if dist.get_rank() == 3 else 1.0)
            with pytest.raises(GradientsNotFinite):
                run.optimizer.step()
        run.optimizer.zero_grad()
        assert all(map(torch.equal, weights(run.model), before))
        run.step()
        assert run.error() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_sizes=(4,))
def test_training_has_the_same_bits_in_one_hop_and_in_two(dtype: torch.dtype) -> None:
    def train(hops: int | None) -> list[list[Tensor]]:
        with mock.patch.object(three_ways, "new_collectives", partial(new_collectives, hops=hops)):
            return three_ways.train_dear("mlp", "adamw", 4, dtype=dtype)[0]

    with on_hosts(2):
        for left, right in zip(train(1), train(None), strict=True):
            assert all(map(torch.equal, left, right))


@distributed(world_sizes=(4,))
def test_residuals_take_half_of_the_memory_between_two_ranks_of_a_host() -> None:
    sizes = []
    for ranks_a_host in (1, 2):
        with on_hosts(ranks_a_host):
            run = Run(ExchangeOptions("gradients", compressor=Int8()))
            run.step()
            coded = run.part.plans.active.exchange.coded  # type: ignore[union-attr]
            sizes.append(sum(one.worker.kept["residual"].numel() for one in coded))
    assert sizes[0] == 2 * sizes[1]


def _two_optimizers(codec: Codec | None) -> list[Tensor]:
    """Trained with one backward for both, which reaches a parameter of one on some ranks alone."""
    rank, model = dist.get_rank(), Known()
    own = list(model.weights)
    first, second = (torch.optim.SGD(part, lr=1.0) for part in (own[:2], own[2:]))
    options = ExchangeOptions("gradients", compressor=codec)
    pipeline = new_pipeline(model, first, NoFusion(), more=[second], options=options)
    for step in range(4):
        leaves_out = step > 1 and rank in (1, 2)
        with pipeline.forward():
            loss = model(gradients_of(step, rank, leaves_out=leaves_out))
        for one in (first, second):
            one.zero_grad()
        with pipeline.backward():
            loss.backward()
        for one in (first, second):
            one.step()
            pipeline.complete_parameters()
    return weights(model)


@distributed(world_sizes=(4,))
def test_two_optimizers_may_launch_in_another_order_on_each_rank() -> None:
    for codec in (None, Int8()):
        with on_hosts(2):
            ours = _two_optimizers(codec)
        theirs = _two_optimizers(codec)
        same_everywhere(ours)
        for left, right in zip(ours, theirs, strict=True):
            assert distance([left], [right]) < (1e-5 if codec is None else 0.02)


@distributed(world_sizes=(4,))
def test_what_ranks_keep_alone_stays_theirs() -> None:
    alone: list[Compressor] = [PowerSGD(rank=1, min_saving=1.0), TopkA(density=0.05), Signum()]
    for codec in alone:
        gather = "gradients"
        with on_hosts(2):
            run = Run(ExchangeOptions(gather, compressor=codec))
            assert run.together == 1
            for step in range(4):
                run.step()
                if step == 1:
                    before = kept_of(run)
                    run.part.replan(SingleFusion().plan(run.part.tensors, 4))
                    assert all(map(torch.equal, kept_of(run), before))
            if not isinstance(codec, Signum):
                assert run.error() <= 1e-5, codec


def kept_of(run: Run) -> list[Tensor]:
    """What this rank keeps of each parameter."""
    kept = run.part.plans.residuals.taken().kept
    of_ranks = [own for kind, own in kept.items() if kind[0] == "worker"]
    return [own[one] for own in of_ranks for one in run.model.weights if one in own]


# --- saved and loaded -----------------------------------------------------------------------------


def _layouts(world_size: int) -> tuple[int, ...]:
    return (2, 1, 2, 4, 2, 2) if world_size == 4 else (3, 2, 6, 3)


@distributed(world_sizes=(4,))
def test_residuals_go_on_in_every_layout(world_size: int) -> None:
    _check_layouts(world_size, [LoCo(block_size=64), DGC(density=0.05, momentum=0.0)])


@pytest.mark.slow
@distributed(world_sizes=(4, 6), timeout_s=120)
def test_residuals_of_more_codecs_go_on_in_every_layout(world_size: int) -> None:
    _check_layouts(world_size, [Int8(block_size=64), LoCo(block_size=64), TopK(density=0.05)])


def _check_layouts(world_size: int, codecs: Sequence[Codec]) -> None:
    for codec in codecs:
        before: Run | None = None
        for ranks_a_host in _layouts(world_size):
            with on_hosts(ranks_a_host):
                run = Run(ExchangeOptions("gradients", compressor=codec))
                if before is not None:
                    run.resume(before)
                    run.optimizer.load_state_dict(before.part.optimizer_state_dict())
                for step in range(4):
                    run.step(leaves_out=step == 2)
                    if step == 0:
                        run.part.replan(SingleFusion().plan(run.part.tensors, world_size))
                rate = codec.rate if isinstance(codec, LoCo) else 1.0
                assert max(run.errors(rate)) <= 1e-4, (codec, ranks_a_host)
                before = run
