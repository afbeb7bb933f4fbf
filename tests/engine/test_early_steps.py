"""Buckets stepped and gathered during backward: the same bits, and refused where they cannot be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import BucketPlan, TensorSpec
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS, new_pipeline, train_dear, train_steps

NUM_STEPS = 6


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.flatten() for one in weights(model)])


class EarlyFusion:
    """Small buckets, all but the last reduced of which may go early."""

    def plan(self, tensors: Sequence[TensorSpec], world_size: int) -> BucketPlan:
        plan = SMALL_BUCKETS.plan(tensors, world_size)
        early = plan.reduce_order[:-1] if world_size > 1 else ()
        return replace(plan, name="early", early=tuple(early))


class Run:
    """One training whose backward is slow enough for reductions to arrive in it."""

    def __init__(
        self,
        optimizer_name: str,
        dtype: torch.dtype = torch.float32,
        options: ExchangeOptions | None = None,
    ) -> None:
        self.model = build("deep_mlp", dtype=dtype)
        self.dtype = dtype
        self.optimizer = optimizer_for(optimizer_name, self.model)
        self.pipeline = new_pipeline(self.model, self.optimizer, EarlyFusion(), options=options)
        self.part = self.pipeline.parts[0]
        self.num_early: list[int] = []
        self.in_backward = lambda model: None
        self.losses: list[Tensor] = []
        if dist.get_world_size() > 1:
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.01))

    def closure(self, step: int) -> Tensor:
        with self.pipeline.forward():
            loss = loss_of(self.model, *batch("deep_mlp", step, dist.get_rank(), self.dtype))
        self.optimizer.zero_grad()
        with self.pipeline.backward():
            loss.backward()
            self.in_backward(self.model)
        self.num_early.append(len(self.part.stepper.stepped_early))
        self.losses.append(loss.detach())
        return loss

    def step(self, step: int) -> None:
        with self.pipeline.stepping_early():
            self.optimizer.step(lambda: self.closure(step))


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_early_steps_change_no_bit(optimizer_name: str, dtype: torch.dtype) -> None:
    run = Run(optimizer_name, dtype)
    seen = []
    for step in range(NUM_STEPS):
        run.step(step)
        if step == 3:
            seen.append(flat(run.model))
    state = run.part.optimizer_state_dict()
    run.pipeline.detach()
    if dist.get_world_size() > 1:
        assert sum(run.num_early) >= NUM_STEPS - 1
        assert all(one < len(run.part.plan.buckets) for one in run.num_early)
    expected, losses = train_dear("deep_mlp", optimizer_name, NUM_STEPS, dtype=dtype)
    assert all(torch.equal(one, other) for one, other in zip(run.losses, losses, strict=True))
    assert torch.equal(flat(run.model), torch.cat([one.flatten() for one in expected[-1]]))
    assert torch.equal(seen[0], torch.cat([one.flatten() for one in expected[3]]))
    assert state["state"]


@distributed(world_sizes=(3,))
def test_ranks_may_step_different_buckets_early() -> None:
    run = Run("adamw")
    run.step(0)
    if dist.get_rank() == 1:
        # Notices nothing but the first arrival of each backward.
        bucket_round = run.part.plans.active.round
        is_here, first = bucket_round.is_on_host, run.part.plan.early[0]
        bucket_round.is_on_host = lambda number: number == first and is_here(number)
    for step in range(1, NUM_STEPS):
        run.step(step)
    run.pipeline.complete_parameters("comparing")
    assert max(run.num_early) == 1 if dist.get_rank() == 1 else max(run.num_early) > 1
    run.pipeline.detach()
    expected, _ = train_dear("deep_mlp", "adamw", NUM_STEPS)
    assert torch.equal(flat(run.model), torch.cat([one.flatten() for one in expected[-1]]))


@distributed(world_sizes=(2,))
def test_ranks_may_gather_an_early_bucket_before_or_after_a_late_round() -> None:
    run = Run("sgd")
    run.step(0)
    last = run.part.plan.buckets[run.part.plan.reduce_order[-1]].slices[0].tensor
    if dist.get_rank() == 1:
        run.part._step_early = lambda: None

    def read_again(model: nn.Module) -> None:
        [*model.parameters()][last].square().sum().backward()

    run.in_backward = read_again
    for step in range(1, NUM_STEPS):
        run.step(step)
    run.pipeline.complete_parameters("comparing")
    assert (max(run.num_early) > 0) == (dist.get_rank() == 0)
    found = [torch.empty(0)] * 2
    dist.all_gather_object(found, flat(run.model))
    assert torch.equal(*found)
    run.pipeline.detach()


@distributed(world_sizes=(2,))
def test_a_backward_in_progress_still_reads_the_old_weights() -> None:
    run = Run("sgd")
    run.step(0)
    before = flat(run.model)

    def read(model: nn.Module) -> None:
        time.sleep(0.2)  # so that what is gathered has arrived
        run.losses.append(flat(model))

    run.in_backward = read
    run.step(1)
    assert run.num_early[-1] > 0
    assert torch.equal(run.losses[1], before)
    assert not torch.equal(flat(run.model), before)
    run.pipeline.detach()


@distributed(world_sizes=(2,))
def test_writes_between_steps_reach_early_buckets() -> None:
    run, plain = Run("adamw"), build("deep_mlp")
    pipeline = new_pipeline(plain, optimizer_for("adamw", plain))

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(0.5)

    for step in range(4):
        run.step(step)
        train_steps(pipeline, plain, [step], "deep_mlp")
        write(run.model)
        write(plain)
    assert run.num_early[-1] > 0
    assert torch.equal(flat(run.model), flat(plain))


@distributed(world_sizes=(2,))
def test_without_permission_nothing_is_stepped_early() -> None:
    run = Run("sgd")
    for step in range(3):
        run.optimizer.step(lambda step=step: run.closure(step))
    assert run.num_early == [0, 0, 0]


@distributed(world_sizes=(2,))
def test_a_second_backward_for_what_has_been_stepped_is_refused_on_all_ranks() -> None:
    run = Run("sgd")
    run.step(0)
    run.step(1)

    def again(model: nn.Module) -> None:
        loss_of(model, *batch("deep_mlp", 7, dist.get_rank())).backward()

    run.in_backward = again
    with pytest.raises(RuntimeError, match="came after its first had been used"):
        run.step(2)


@distributed(world_sizes=(2,))
def test_dropping_or_clipping_gradients_that_have_been_used_is_refused() -> None:
    run = Run("sgd")
    run.step(0)

    def late(action: object) -> None:
        with run.pipeline.stepping_early():
            run.closure(1)
            action()

    with pytest.raises(RuntimeError, match="Call it before backward"):
        late(run.optimizer.zero_grad)
    run.pipeline.abandon()
    run = Run("sgd")
    run.step(0)
    with pytest.raises(RuntimeError, match="Gradients cannot be changed"):
        late(lambda: run.part.mean.clip_by_norm(1.0))
    run.pipeline.abandon()


@distributed(world_sizes=(2,))
def test_no_state_is_saved_after_a_backward_that_raised_half_way() -> None:
    run = Run("adamw")
    run.step(0)
    before = flat(run.model)

    def fail(model: nn.Module) -> None:
        raise ZeroDivisionError

    run.in_backward = fail
    with pytest.raises(ZeroDivisionError):
        run.step(1)
    assert run.part.stepper.stepped_early
    run.pipeline.abandon()
    assert torch.equal(flat(run.model), before)
    with pytest.raises(RuntimeError, match="no consistent state"):
        run.part.optimizer_state_dict()


@distributed(world_sizes=(2,))
def test_new_values_arrive_wherever_they_are_first_read() -> None:
    run = Run("sgd")
    run.step(0)
    run.step(1)
    assert run.num_early[-1] > 0
    total = torch.func.grad(lambda x: x * sum(p.sum() for p in run.model.parameters()))(
        torch.ones(())
    )
    assert torch.equal(total, sum(one.sum() for one in weights(run.model)))
