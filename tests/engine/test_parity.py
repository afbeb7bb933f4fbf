"""The same model at the end: DDP's bits at two ranks, a rank-order reference's at more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dear.planning import FusionPlanner, NoFusion, SingleFusion, ThresholdFusion
from tests.distributed.harness import distributed
from tests.training.models import OPTIMIZERS, distance
from tests.training.three_ways import (
    SMALL_BUCKETS,
    Trace,
    train_ddp,
    train_dear,
    train_reference,
)

NUM_STEPS = 50
FUSIONS = {"threshold": SMALL_BUCKETS, "none": NoFusion(), "single": SingleFusion()}


def assert_equal(ours: Trace, theirs: Trace) -> None:
    for step, (left, right) in enumerate(zip(ours[0], theirs[0], strict=True)):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(a, b), f"step {step}, parameter {index}: {(a - b).abs().max()}"


def assert_equal_on_all_ranks(trace: Trace) -> None:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [[t.numpy().tobytes() for t in step] for step in trace[0]])
    assert all(other == everyone[0] for other in everyone)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["conv", "gpt", "mlp"])
@distributed(world_sizes=(1, 2))
def test_fifty_steps_have_the_bits_of_ddp(model: str, optimizer: str) -> None:
    ours = train_dear(model, optimizer, NUM_STEPS)
    theirs = train_ddp(model, optimizer, NUM_STEPS)
    assert_equal(ours, theirs)
    assert ours[1] == theirs[1]
    assert_equal_on_all_ranks(ours)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["conv", "gpt", "mlp"])
@distributed(world_sizes=(3, 4))
def test_fifty_steps_have_the_bits_of_a_rank_order_sum(
    model: str, optimizer: str, world_size: int
) -> None:
    ours = train_dear(model, optimizer, NUM_STEPS)
    assert_equal_on_all_ranks(ours)
    assert_equal(ours, train_reference(model, optimizer, NUM_STEPS, world_size))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["conv", "gpt", "mlp"])
@distributed(world_sizes=(3, 4))
def test_fifty_steps_in_double_precision_are_those_of_ddp(model: str, optimizer: str) -> None:
    ours = train_dear(model, optimizer, NUM_STEPS, dtype=torch.float64)[0][-1]
    theirs = train_ddp(model, optimizer, NUM_STEPS, dtype=torch.float64)[0][-1]
    assert distance(ours, theirs) <= 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["wide_conv", "wide_gpt", "wide_mlp"])
@distributed(world_sizes=(3, 4), timeout_s=240)
def test_fifty_steps_are_as_near_to_ddp_as_ddp_to_itself(model: str, optimizer: str) -> None:
    ours = train_dear(model, optimizer, NUM_STEPS, fusion=ThresholdFusion(bucket_cap_mb=1))[0][-1]
    large = train_ddp(model, optimizer, NUM_STEPS, bucket_cap_mb=25)[0][-1]
    small = train_ddp(model, optimizer, NUM_STEPS, bucket_cap_mb=1)[0][-1]
    own_distance, ddp_distance = distance(ours, large), distance(small, large)
    if dist.get_rank() == 0:
        print(f"{model} {optimizer}: ours {own_distance:.2e}, DDP from itself {ddp_distance:.2e}")
    # Chaos, as AdamW makes whole steps of rounding noise: 4.3 times has been seen. What is wrong
    # shows in double precision.
    assert own_distance <= 10 * ddp_distance


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@distributed(world_sizes=(1, 2))
def test_every_optimizer_has_the_bits_of_ddp(optimizer: str) -> None:
    ours = train_dear("mlp", optimizer, 6)
    assert_equal(ours, train_ddp("mlp", optimizer, 6))


@pytest.mark.parametrize("fusion", sorted(FUSIONS))
@distributed(world_sizes=(2, 3))
def test_bits_do_not_depend_on_the_plan(fusion: str, world_size: int) -> None:
    planner: FusionPlanner = FUSIONS[fusion]
    ours = train_dear("gpt", "adamw", 4, fusion=planner)
    assert_equal(ours, train_reference("gpt", "adamw", 4, world_size))
