"""Between backward and step: complex gradients, and what is no norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.training.three_ways import new_pipeline


@distributed(world_sizes=(2,))
def test_what_is_no_norm_is_refused() -> None:
    model = nn.Linear(2, 1)
    pipeline = new_pipeline(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    with pipeline.forward():
        loss = model(torch.ones(1, 2)).sum()
    with pipeline.backward():
        loss.backward()
    for norm_type in (0.0, -math.inf):
        with pytest.raises(ValueError, match="must not be 0 or -inf"):
            pipeline.of(optimizer).mean.norm(norm_type)
    pipeline.detach()


@distributed(world_sizes=(2,))
def test_complex_gradients_are_clipped_by_norm_alone() -> None:
    model = nn.ParameterList([torch.ones(5, dtype=torch.cfloat), torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = new_pipeline(model, optimizer, NoFusion())
    for _ in range(2):
        optimizer.zero_grad()
        with pipeline.forward():
            loss = model[0].abs().sum() + model[1].sum()
        with pipeline.backward():
            loss.backward()
        mean = pipeline.of(optimizer).mean
        with pytest.raises(TypeError, match="no order to clip by value"):
            mean.clip_by_value(0.5)
        assert float(mean.clip_by_norm(1.0)) == pytest.approx(math.sqrt(8))
        assert float(mean.norm()) == pytest.approx(1.0)
        optimizer.step()
    pipeline.detach()
