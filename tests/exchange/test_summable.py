"""Bytes that add up are summed on their way, and what comes out is the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Generator, Tensor

from lightning_dear.collectives.shards import sum_in_source_order
from lightning_dear.compression import CODECS, Codec, Fp32, Int4, Int8, RandomK
from lightning_dear.compression.groups import VECTORS
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import SingleFusion
from lightning_dear.tuning import codec_cost
from lightning_dear.tuning.codec_cost import measure_codecs
from tests.compression.battery import check_all
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.exchange.test_coded_failures import _assert_kept, _kept
from tests.training import three_ways as training
from tests.training.linear import Run, gradients_of, unscale
from tests.training.models import weights
from tests.training.three_ways import train_steps
from tests.tuning.test_codec_probe import CLOCK, _line, _pipeline

SUMMED = {"expect_reduce_scatter", "launch_reduce_scatter"}
DECODED = {"expect_messages", "launch_all_to_all"}


class _DecodedFirst(RandomK):
    """Travels as any codec does."""

    is_summable: ClassVar[bool] = False


class _Lying(Int8):
    is_summable: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class _Timed(RandomK):
    """Encoding takes 1 s and 2 us an element, decoding half of it."""

    def encode(self, rows: Tensor, wire: Tensor, generator: Generator | None = None) -> None:
        CLOCK.now_s += 1 + 2e-6 * rows.numel()
        super().encode(rows, wire, generator)

    def decode(self, wire: Tensor, rows: Tensor, generator: Generator | None = None) -> None:
        CLOCK.now_s += 0.5 + 1e-6 * rows.numel()
        super().decode(wire, rows, generator)


def _options(codec: Codec) -> ExchangeOptions:
    return ExchangeOptions("gradients", compressor=codec)


# --- what adds up ---------------------------------------------------------------------------------


def test_of_ours_random_k_adds_up() -> None:
    assert [name for name, codec in CODECS.items() if codec.is_summable] == ["randomk"]


def test_a_codec_whose_bytes_do_not_add_up_is_found_out() -> None:
    some = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="do not add up"):
        check_all(_Lying(), some)


# --- how it travels -------------------------------------------------------------------------------


def _used_by_a_step(run: Run) -> set[str]:
    """Names of the collectives with which it reduces."""
    collectives = run.pipeline.collectives
    with ExitStack() as stack:
        spies = {
            name: stack.enter_context(
                mock.patch.object(collectives, name, wraps=getattr(collectives, name))
            )
            for name in SUMMED | DECODED
        }
        run.step()
    return {name for name, spy in spies.items() if spy.called}


@distributed(world_sizes=(2,))
def test_only_bytes_that_add_up_are_summed_on_their_way() -> None:
    for codec in (*(make() for make in CODECS.values()), _DecodedFirst()):
        run = Run(_options(codec))
        run.step()
        assert _used_by_a_step(run) == (SUMMED if codec.is_summable else DECODED), codec


@distributed(world_sizes=(2,))
def test_each_bucket_travels_as_its_codec_does() -> None:
    groups = (("weights.2", RandomK(density=0.3, decay=1.0)), (VECTORS, Fp32()))
    run = Run(ExchangeOptions("gradients", compressor=Int4(block_size=64), groups=groups))
    for step in range(6):
        run.step(leaves_out=step == 3)
    assert _used_by_a_step(run) == SUMMED | DECODED
    assert run.error() <= 1e-5


# --- what comes out -------------------------------------------------------------------------------


def _flat(run: Run, tensors: list[Tensor]) -> Tensor:
    """Numbers of all tensors where they lie in the only bucket; elsewhere 0."""
    assert run.part.plan is not None
    (bucket,) = run.part.plan.buckets
    flat = torch.zeros(bucket.padded_numel)
    for piece in bucket.slices:
        flat[piece.offset : piece.offset + piece.numel] = tensors[piece.tensor].flatten()
    return flat


def _strata(world_size: int, numel: int) -> Iterator[slice]:
    """Of a bucket, of which each shard has a tenth as many, rounded up."""
    size = numel // world_size
    count = -(-size // 10)
    for shard in range(world_size):
        for i in range(count):
            yield slice(*(shard * size + j * size // count for j in (i, i + 1)))


@distributed()
def test_the_mean_has_one_number_of_each_stratum(world_size: int) -> None:
    """sum over ranks, in their order, of g / world_size."""
    run = Run(_options(RandomK(density=0.1, halves="reduce", decay=1.0)), SingleFusion())
    run.step()
    run.pipeline.complete_parameters()
    arrived = -_flat(run, [weight.detach() for weight in run.model.weights])
    everyones = [
        _flat(run, [one * (1 / world_size) for one in gradients_of(0, rank) if one is not None])
        for rank in range(world_size)
    ]
    for part in _strata(world_size, len(arrived)):
        total = functools.reduce(torch.add, [own[part] for own in everyones])
        is_sent = arrived[part] != 0
        # Between parameters there is nothing.
        assert is_sent.sum() == 1 or (is_sent.sum() == 0 and (total == 0).any())
        assert torch.equal(arrived[part], torch.where(is_sent, total, 0.0))


def _eventful_step(run: Run, codec: RandomK, number: int) -> None:
    """Something else happens before each step but the first."""
    scale = 2.0**number
    run.part.plans.loss_scale = lambda: torch.full((1,), scale)
    if number == 1:
        run.backward(step=100, scale=scale)
    elif number == 2:
        run.backward(step=101)
        run.optimizer.zero_grad()
    elif number == 3:
        run.part.use_compressor(Fp32())
    elif number == 4:
        run.part.use_compressor(codec.at_density(0.2))
    elif number == 5:
        run.part.replan(SingleFusion().plan(run.part.tensors, dist.get_world_size()))
    run.step(leaves_out=number == 2, before=lambda: unscale(run, scale), scale=scale)


@distributed(world_sizes=(1, 3))
def test_where_bytes_are_summed_changes_no_bit() -> None:
    """Decoded rows are summed in rank order, too."""
    for more in ({}, {"halves": "reduce"}):
        runs = []
        for kind in (RandomK, _DecodedFirst):
            codec = kind(density=0.1, **more)
            run = Run(_options(codec))
            for number in range(6):
                _eventful_step(run, codec, number)
            run.pipeline.complete_parameters()
            runs.append(run)
        summed, decoded = runs
        assert_equal_on_all_ranks(([weights(summed.model)], []))
        assert all(map(torch.equal, weights(summed.model), weights(decoded.model))), more
        _assert_kept(summed, _kept(decoded))


@distributed(world_sizes=(3,))
def test_a_backend_that_sums_itself_loses_nothing() -> None:
    """As NCCL does, here gloo's own reduce-scatter."""
    with mock.patch.object(training, "new_collectives", training.new_native):
        run = Run(_options(RandomK(density=0.1, decay=1.0)))
    for step in range(6):
        run.step(leaves_out=step == 3)
    assert run.error() <= 1e-5
    assert_equal_on_all_ranks(([weights(run.model)], []))
    assert _used_by_a_step(run) == SUMMED


# --- what it costs --------------------------------------------------------------------------------


def _timed_sum(rows: list[Tensor], out: Tensor) -> None:
    """Takes 1 us a number."""
    CLOCK.now_s += 1e-6 * sum(row.numel() for row in rows)
    sum_in_source_order(rows, out)


@distributed(world_sizes=(2,))
def test_the_cost_is_that_of_a_sum_and_of_decoding_one_row() -> None:
    """Of n elements: 2 rows of n / 2 / 4 numbers are summed, n / 2 elements decoded."""
    model, pipeline = _pipeline(_Timed(density=0.25))
    train_steps(pipeline, model, [0])
    with (
        mock.patch.object(codec_cost, "clock_of", return_value=CLOCK),
        mock.patch.object(codec_cost, "launch_seconds", return_value=(0.0, 0.0)),
        mock.patch.object(codec_cost, "sum_in_source_order", _timed_sum),
    ):
        cost = measure_codecs(pipeline).compressed
    # What is not sent is found by decoding.
    assert (cost.encode.alpha, cost.encode.beta) == _line(1.5, 3e-6)
    assert (cost.decode_sum.alpha, cost.decode_sum.beta) == _line(0.5, 0.75e-6)
    assert (cost.decode.alpha, cost.decode.beta) == _line(0.5, 1e-6)
    pipeline.detach()
