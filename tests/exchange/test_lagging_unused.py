"""gather="parameters" with encoded differences, where a step uses some parameters nowhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dear.compression import Codec, Fp32, Int4
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner, SingleFusion
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal_on_all_ranks
from tests.exchange.test_lagging import masters_of
from tests.training.lagging import LaggingEFSignSGD, LaggingOneBit, LaggingTopK
from tests.training.linear import SOMETIMES, Run
from tests.training.models import weights
from tests.training.three_ways import SMALL_BUCKETS
from tests.training.wire import Wire

# Blocks of these hold parts of several parameters: zeros there decode to the others' mean.
CODECS: tuple[Codec, ...] = (
    LaggingEFSignSGD(),
    LaggingOneBit(),
    Int4(block_size=64),
    LaggingTopK(density=0.1),
)


def _begun(codec: Codec, fusion: FusionPlanner = SMALL_BUCKETS) -> Run:
    run = Run(ExchangeOptions("parameters", compressor=codec), fusion, momentum=0.5)
    for _ in range(3):
        run.step()
    run.pipeline.complete_parameters()
    return run


def _lag(run: Run) -> Tensor:
    """Of the parameter that some steps leave out. Collective."""
    run.pipeline.complete_parameters()
    return masters_of(run.part)[SOMETIMES] - run.model.weights[SOMETIMES].detach()


@pytest.mark.parametrize("is_frozen", [True, False])
@distributed(world_sizes=(1, 2))
def test_what_nobody_uses_stays_where_it_is(is_frozen: bool) -> None:
    for codec in CODECS:
        for fusion in (SMALL_BUCKETS, SingleFusion()):
            run = _begun(codec, fusion)
            weight, others = run.model.weights[SOMETIMES], run.model.weights[-1]
            weight.requires_grad_(not is_frozen)
            before, lag, was_elsewhere = weight.detach().clone(), _lag(run), others.detach().clone()
            assert lag.any()
            for _ in range(4):
                run.step(leaves_out=True)
                assert torch.equal(_lag(run), lag), codec
                assert torch.equal(weight, before), codec
            assert not torch.equal(others, was_elsewhere)
            assert_equal_on_all_ranks(([weights(run.model)], []))


@distributed(world_sizes=(2,))
def test_steps_go_by_their_own_use() -> None:
    """What is gathered of one step arrives once the next one has begun."""
    for codec in CODECS:
        run = _begun(codec)
        weight = run.model.weights[SOMETIMES]
        for leaves_out in (True, False, True, False):
            before = weight.detach().clone()
            run.step(leaves_out=leaves_out)
            # The forward of another step, of other use, waits for what it reads.
            run.backward(leaves_out=not leaves_out)
            run.optimizer.zero_grad()
            assert torch.equal(weight, before) is leaves_out, codec
            assert_equal_on_all_ranks(([weights(run.model)], []))


@distributed(world_sizes=(1, 2))
def test_what_nobody_uses_takes_nothing_of_a_message() -> None:
    """Neither a slot of those that are sent, nor a part in a block's scale."""
    for codec in (Int4(block_size=64), LaggingTopK(density=0.1)):
        run = _begun(codec)
        assert _lag(run).any()
        wire = Wire(run)
        for leaves_out in (True, False):
            run.step(leaves_out=leaves_out)
            sent = wire.take_differences(codec)[SOMETIMES]
            assert bool(sent.any()) is not leaves_out, codec


@distributed(world_sizes=(2,))
def test_what_one_rank_uses_is_sent() -> None:
    for codec in CODECS:
        run = _begun(codec)
        before = run.model.weights[SOMETIMES].detach().clone()
        run.step(leaves_out=dist.get_rank() == 1)
        run.pipeline.complete_parameters()
        assert not torch.equal(run.model.weights[SOMETIMES], before), codec
        assert_equal_on_all_ranks(([weights(run.model)], []))


@distributed(world_sizes=(2,))
def test_dense_steps_and_syncing_bring_it_all_the_same() -> None:
    for codec in CODECS:
        synced, dense = _begun(codec), _begun(codec)
        synced.step(leaves_out=True)
        assert _lag(synced).any()
        synced.part.sync_replicas()
        dense.pipeline.use_compressor(Fp32())
        dense.step(leaves_out=True)
        for run in (synced, dense):
            assert not _lag(run).any(), codec


@distributed(world_sizes=(2, 3))
def test_a_gradient_that_a_hook_clears_on_one_rank_is_stepped_on_all() -> None:
    """Or ranks would follow some differences, and others not."""
    for options in (
        ExchangeOptions("parameters", compressor=LaggingEFSignSGD()),
        ExchangeOptions("gradients", compressor=Int4(block_size=64)),
        ExchangeOptions("parameters"),
    ):
        cleared, plain = Run(options), Run(options)
        for run in (cleared, plain):
            run.step()
            run.backward()
            run.part.mean.expose()
            if run is cleared and dist.get_rank() == 1:
                for weight in run.model.weights:
                    weight.grad = None
            run.optimizer.step()
            run.pipeline.complete_parameters()
        for left, right in zip(weights(cleared.model), weights(plain.model), strict=True):
            assert torch.equal(left, right)
        assert_equal_on_all_ranks(([weights(cleared.model)], []))
