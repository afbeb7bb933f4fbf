"""All-reduced buckets where things go otherwise than planned: refused, broken off, limited."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner
from tests.distributed.harness import distributed
from tests.engine.test_all_reduced import ALL
from tests.training.models import batch, build, loss_of
from tests.training.three_ways import SMALL_BUCKETS, new_pipeline

WIDTH = 40


def _loss(layers: Sequence[nn.Module], step: int) -> Tensor:
    activation = torch.full((2, WIDTH), 1.0 + step + dist.get_rank())
    for layer in layers:
        activation = layer(activation)
    return activation.square().mean()


def _step(pipeline: Pipeline, layers: Sequence[nn.Module], step: int) -> None:
    with pipeline.forward():
        loss = _loss(layers, step)
    with pipeline.backward():
        loss.backward()
    pipeline.parts[0].optimizer.step()
    pipeline.parts[0].optimizer.zero_grad()


def _new(fusion: FusionPlanner) -> tuple[nn.Sequential, Pipeline]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))
    return net, new_pipeline(net, torch.optim.AdamW(net.parameters(), lr=0.01), fusion)


@pytest.mark.parametrize("fusion", [ALL, SMALL_BUCKETS], ids=["all_reduced", "sharded"])
@distributed(world_sizes=(2,), timeout_s=30)
def test_state_is_saved_after_a_backward_that_ranks_broke_off_at_different_layers(
    fusion: FusionPlanner,
) -> None:
    net, pipeline = _new(fusion)
    for step in range(2):
        _step(pipeline, net, step)

    def broken_off(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    with pipeline.forward():
        number = (1, 8)[dist.get_rank()]
        activation = net[:number](torch.ones(2, WIDTH))
        activation.register_hook(broken_off)
        loss = net[number:](activation).square().mean()
    with pytest.raises(KeyboardInterrupt), pipeline.backward():
        loss.backward()
    pipeline.abandon()
    pipeline.complete_parameters()
    assert len(pipeline.parts[0].optimizer_state_dict()["state"]) == 20


@pytest.mark.parametrize("fusion", [ALL, SMALL_BUCKETS], ids=["all_reduced", "sharded"])
@distributed(world_sizes=(2,), timeout_s=30)
def test_state_is_saved_between_a_backward_that_one_rank_used_less_in_and_the_step(
    fusion: FusionPlanner,
) -> None:
    net, pipeline = _new(fusion)
    for step in range(2):
        _step(pipeline, net, step)
    with pipeline.forward():
        loss = _loss([net[0], *(net[1:9] if dist.get_rank() else ()), net[9]], 2)
    with pipeline.backward():
        loss.backward()
    assert len(pipeline.parts[0].optimizer_state_dict()["state"]) == 20
    pipeline.parts[0].optimizer.step()
    pipeline.complete_parameters()


@distributed(world_sizes=(1,))
def test_at_one_rank_what_was_not_stepped_may_be_used_as_under_plain_torch() -> None:
    net = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    pipeline = new_pipeline(net, torch.optim.SGD(net.parameters(), lr=0.1), SMALL_BUCKETS)
    for _ in range(2):
        with pipeline.forward():
            first, second = (layer(torch.ones(1, 4)).square().sum() for layer in net)
        for loss in (first, second):
            with pipeline.backward():
                loss.backward()
            pipeline.parts[0].optimizer.step()
            pipeline.parts[0].optimizer.zero_grad()


@distributed(world_sizes=(2,))
def test_where_they_are_refused_people_are_told() -> None:
    def steps(message: str, options: ExchangeOptions | None, num_optimizers: int) -> None:
        model = build("mlp")
        parameters = list(model.parameters())
        optimizers = [
            torch.optim.SGD(parameters[n::num_optimizers], lr=0.1) for n in range(num_optimizers)
        ]
        pipeline = new_pipeline(model, optimizers[0], ALL, more=optimizers[1:], options=options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pipeline.forward():
                loss = loss_of(model, *batch("mlp", 0, dist.get_rank()))
            with pipeline.backward():
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        told = [str(one.message) for one in seen if message in str(one.message)]
        assert len(told) == (num_optimizers if dist.get_rank() == 0 else 0)
        assert all("all-reduces" in one for one in told)
        assert all(part.plan.all_reduced == () for part in pipeline.parts)
        assert new_collectives(torch.device("cpu")).ledger["all_reduce"] == 0
        pipeline.detach()

    steps("or none", ExchangeOptions("gradients"), 1)
    steps("in another order", None, 2)
