"""gather="gradients" and all-reduced buckets: DDP's weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.engine.test_parity import assert_equal, assert_equal_on_all_ranks
from tests.training.delays import Delays
from tests.training.models import batch, build, distance, loss_of
from tests.training.three_ways import SMALL_BUCKETS, train_steps
from tests.training.whole_tensor import MAKE, train

GRADIENTS = ExchangeOptions("gradients")
ALL_REDUCED = ExchangeOptions("gradients", decouple=False)
LATE = Delays(before_all_gather_s=0.01, after_all_gather_s=0.005)


@distributed(world_sizes=(1, 2))
def test_every_optimizer_has_the_bits_of_ddp() -> None:
    for make in MAKE:
        print(make)
        theirs = train(None, make)
        for options in (GRADIENTS, ALL_REDUCED) if make != "muon" else (GRADIENTS,):
            ours = train(options, make)
            assert_equal(ours, theirs)
            assert_equal_on_all_ranks(ours)


@pytest.mark.parametrize("model", ["gpt", pytest.param("conv", marks=pytest.mark.slow)])
@distributed(world_sizes=(2,))
def test_the_bits_are_those_of_ddp_however_late_gathers_come(model: str) -> None:
    theirs = train(None, "adamw", model_name=model)
    for options in (GRADIENTS, ALL_REDUCED):
        ours = train(options, "adamw", model_name=model, delays=LATE)
        assert_equal(ours, theirs)
        assert ours[1] == theirs[1]


@distributed(world_sizes=(3,))
def test_three_ranks_in_double_precision() -> None:
    for make in ("lars",):
        theirs = train(None, make, dtype=torch.float64)
        for options in (GRADIENTS, ALL_REDUCED):
            ours = train(options, make, dtype=torch.float64)
            assert distance(ours[0][-1], theirs[0][-1]) <= 1e-9
            assert_equal_on_all_ranks(ours)


@distributed(world_sizes=(3,))
def test_bytes_follow_the_formula(world_size: int) -> None:
    for options in (GRADIENTS, ALL_REDUCED):
        model = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        collectives = new_collectives(torch.device("cpu"))
        pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=options)
        train_steps(pipeline, model, range(2))
        pipeline.detach()
        plan, ledger = pipeline.parts[0].plan, collectives.ledger
        share = 2 * plan.padded_numel * 4 * (world_size - 1) // world_size
        is_decoupled = options.decouple
        assert ledger["reduce_scatter"] == (share if is_decoupled else 0)
        assert ledger["all_gather"] == (share if is_decoupled else 0)
        assert ledger["all_reduce"] == (0 if is_decoupled else 2 * share)


@distributed(world_sizes=(2,))
def test_a_norm_of_all_reduced_gradients_counts_each_once(world_size: int) -> None:
    model, plain = build("mlp"), build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = new_collectives(torch.device("cpu"))
    pipeline = Pipeline(model, [optimizer], collectives, SMALL_BUCKETS, options=ALL_REDUCED)
    for step in range(2):
        with pipeline.forward():
            loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
        with pipeline.backward():
            loss.backward()
        for rank in range(world_size):
            (loss_of(plain, *batch("mlp", step, rank)) / world_size).backward()
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(pipeline.parts[0].mean.clip_by_norm(0.1), total)
        optimizer.step()
        # As under gather="parameters": what a step has used is gone, but for one rank's own.
        assert world_size == 1 or all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)
