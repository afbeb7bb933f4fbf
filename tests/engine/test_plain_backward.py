"""Backwards that the strategy was not told of: they send nothing, and stay in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.engine.step_state import StepState
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import new_pipeline

MODEL, NUM_STEPS, EXTRA = "mlp", 4, 50
OPTIONS = [ExchangeOptions(), ExchangeOptions("gradients")]
PLACES = ["before the forward", "before the backward", "behind the backward", "behind the step"]

Probe = Callable[[nn.Module, int], None]
"""(model, step) -> None: what the user does with gradients of their own."""


def _loss(model: nn.Module, number: int, rank: int) -> Tensor:
    return loss_of(model, *batch(MODEL, number, rank, torch.float64))


def _train(options: ExchangeOptions, probes: dict[str, Probe], *, tells: bool = True) -> Pipeline:
    """Trains with a probe at each place of a step; `tells` the pipeline of backwards, or not."""
    model = build(MODEL, dtype=torch.float64)
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer, options=options)
    own = {place: probes.get(place, lambda *_: None) for place in PLACES}
    for step in range(NUM_STEPS):
        own["before the forward"](model, step)
        with pipeline.forward():
            loss = _loss(model, step, dist.get_rank())
        own["before the backward"](model, step)
        with pipeline.backward() if tells else nullcontext():
            loss.backward()
        own["behind the backward"](model, step)
        optimizer.step()
        own["behind the step"](model, step)
        optimizer.zero_grad()
    pipeline.detach()
    return pipeline


def _reference(extra: Callable[[int, int], Sequence[int]]) -> list[Tensor]:
    """The mean over ranks of their own batch and of `extra(step, rank)`; at one process."""
    model = build(MODEL, dtype=torch.float64)
    optimizer = optimizer_for("adamw", model)
    for step in range(NUM_STEPS):
        for rank in range(dist.get_world_size()):
            for number in (step, *extra(step, rank)):
                (_loss(model, number, rank) / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def _check(pipeline: Pipeline, extra: Callable[[int, int], Sequence[int]]) -> None:
    ours = weights(pipeline.training.module)
    for left, right in zip(ours, _reference(extra), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ours)
    assert all(map(torch.equal, everyone[0], ours))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("place", [one for one in PLACES if one != "behind the backward"])
@distributed(world_sizes=(1, 2, 3))
def test_on_one_rank_alone_and_cleared_it_changes_nothing(
    place: str, options: ExchangeOptions
) -> None:
    def look(model: nn.Module, step: int) -> None:
        """As often as this rank likes, another number of times than others."""
        for _ in range(step % 3 if dist.get_rank() == 0 else 0):
            model.zero_grad()
            _loss(model, EXTRA, 0).backward()
            found = [parameter.grad for parameter in model.parameters()]
            wanted = torch.autograd.grad(_loss(model, EXTRA, 0), [*model.parameters()])
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
            model.zero_grad()

    _check(_train(options, {place: look}), lambda step, rank: ())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("place", [one for one in PLACES if one != "behind the step"])
@distributed(world_sizes=(1, 2, 3))
def test_what_it_leaves_in_grad_counts_in_the_step(place: str, options: ExchangeOptions) -> None:
    """On rank 0 in each second step, on the others in all."""

    def counts(step: int, rank: int) -> bool:
        return rank > 0 or step % 2 == 1

    def add(model: nn.Module, step: int) -> None:
        if counts(step, dist.get_rank()):
            _loss(model, EXTRA + step, dist.get_rank()).backward()

    if place == "behind the backward":
        # The recorded step has reduced by then, and refuses what only some ranks might have.
        probe: Probe = lambda model, step: add(model, step) if step else None  # noqa: E731
    else:
        probe = add
    first = 1 if place == "behind the backward" else 0
    pipeline = _train(options, {place: probe})
    _check(
        pipeline,
        lambda step, rank: (EXTRA + step,) if step >= first and counts(step, rank) else (),
    )


@pytest.mark.parametrize("options", OPTIONS)
@distributed(world_sizes=(1, 2, 3))
def test_a_training_that_tells_of_no_backward_averages_in_the_step(
    options: ExchangeOptions,
) -> None:
    pipeline = _train(options, {}, tells=False)
    _check(pipeline, lambda step, rank: ())


@distributed(world_sizes=(2, 3))
def test_it_launches_nothing() -> None:
    model = build(MODEL, dtype=torch.float64)
    optimizer = optimizer_for("adamw", model)
    pipeline = new_pipeline(model, optimizer)
    for step in range(2):
        with pipeline.forward():
            loss = _loss(model, step, dist.get_rank())
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline.complete_parameters()
    before = dict(pipeline.collectives.ledger)
    if dist.get_rank() == 0:
        _loss(model, EXTRA, 0).backward()
        assert pipeline.parts[0].progress.state is StepState.EMPTY
        optimizer.zero_grad()  # does not wait for ranks that never come
    assert dict(pipeline.collectives.ledger) == before
    pipeline.detach()
