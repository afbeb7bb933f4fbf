"""Fifty steps, and four ranks; everything else that equals DDP is a row of the matrix."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    WeightRecorder,
    assert_differ,
    assert_ranks_agree,
    assert_same,
    buffers,
    dear,
    fit,
    fit_both,
)
from tests.lightning.nets import BATCH_SIZE, Net
from tests.training.models import distance

NUM_STEPS = 50
QUICK = {("conv", "sgd"), ("mlp", "sgd"), ("mlp", "adamw"), ("gpt", "adamw")}
CASES = [
    pytest.param(model, optimizer, marks=() if (model, optimizer) in QUICK else pytest.mark.slow)
    for model in ("conv", "mlp", "gpt")
    for optimizer in ("sgd", "adamw")
]


@pytest.mark.parametrize(("model", "optimizer"), CASES)
@distributed(world_sizes=[2])
def test_fifty_steps_equal_ddp(model: str, optimizer: str) -> None:
    num_samples = 2 * BATCH_SIZE * NUM_STEPS // 2
    fits = fit_both(model, optimizer, num_samples=num_samples, max_epochs=2, validates=True)
    (theirs, seen_theirs), (ours, seen_ours) = fits["ddp"], fits["dear"]
    assert len(seen_ours.seen) == NUM_STEPS
    assert_same(seen_ours.seen, seen_theirs.seen, "weights")
    assert_same(ours.losses, theirs.losses, "loss")
    assert_same(ours.validated, theirs.validated, "weights in validation")
    assert_same(buffers(ours), buffers(theirs), "buffers")
    assert_ranks_agree(seen_ours.seen)
    assert_differ(seen_ours.seen[0], seen_ours.seen[-1])


@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd")])
@distributed(world_sizes=[4])
def test_all_ranks_agree_in_every_step(model: str, optimizer: str) -> None:
    net, recorder = Net(model, optimizer), WeightRecorder()
    fit(dear(), net, recorder, model=model, num_samples=48, limit_train_batches=6, validates=True)
    assert len(recorder.seen) == 6
    assert_ranks_agree(recorder.seen)
    assert_ranks_agree([buffers(net)])


@pytest.mark.parametrize(("model", "optimizer"), [("conv", "adamw"), ("gpt", "sgd")])
@distributed(world_sizes=[4])
def test_float64_is_near_ddp_at_more_ranks(model: str, optimizer: str) -> None:
    """DDP adds up in an order of its own there, so that no bits are promised."""
    fits = fit_both(model, optimizer, num_samples=48, limit_train_batches=6, precision="64-true")
    (_, theirs), (_, ours) = fits["ddp"], fits["dear"]
    for left, right in zip(ours.seen, theirs.seen, strict=True):
        assert distance(left, right) < 1e-8
    assert ours.seen[0][0].dtype == torch.float64
