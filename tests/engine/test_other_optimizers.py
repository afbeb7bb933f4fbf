"""Parameters that no optimizer of the training holds, and optimizers that it does not know."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training.models import build, optimizer_for
from tests.training.three_ways import new_pipeline, train_steps


@distributed(world_sizes=(1, 2))
def test_parameters_that_no_optimizer_holds_are_named() -> None:
    model = build("mlp")
    model.spare = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipeline = new_pipeline(model, optimizer)
    texts = [str(one.message) for one in seen if "No optimizer of the" in str(one.message)]
    is_told = dist.get_world_size() > 1 and dist.get_rank() == 0
    assert len(texts) == is_told
    if is_told:
        assert "'layers.2.weight' (4 such parameters)" in texts[0]
    train_steps(pipeline, model, range(2))
    pipeline.detach()


def _train_with_stranger(layer: int = 0) -> Pipeline:
    """The training's optimizer has the first layers, another one `layer`."""
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model.layers[:3]))
    stranger = torch.optim.SGD(model.layers[layer].parameters(), lr=0.1)
    train_steps(pipeline, model, [0], between=lambda _: stranger.step())
    return pipeline


@pytest.mark.parametrize("layer", [0, 4])
@distributed(world_sizes=(2,))
def test_an_optimizer_from_elsewhere_may_not_step_what_the_module_holds(layer: int) -> None:
    with pytest.raises(RuntimeError, match="A SGD that the training does not know"):
        _train_with_stranger(layer)


class _Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
@distributed(world_sizes=(2,))
def test_what_a_step_calls_is_not_from_elsewhere(gather: str) -> None:
    model = build("mlp")
    # With the first object of a class torch wraps its step, which calls all hooks then.
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = _Derived(model.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer, options=ExchangeOptions(gather))
    train_steps(pipeline, model, range(3))
    pipeline.detach()


@distributed(world_sizes=(1,))
def test_on_one_rank_it_may() -> None:
    _train_with_stranger().detach()
