"""What local steps need in memory, as docs/local_steps.md has it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_dear.collectives.factory import alone, new_collectives
from lightning_dear.compression import resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed

SIZE = 512


def held_by(outer: OuterHalf) -> int:
    """Bytes of all tensors that fragments hold, each storage once."""
    storages: dict[int, int] = {}

    def add(value: Any, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif depth < 12 and isinstance(value, dict):
            for key, one in [*value.items()]:
                add(key, depth + 1)
                add(one, depth + 1)
        elif depth < 12 and isinstance(value, list | tuple):
            for one in value:
                add(one, depth + 1)
        elif depth < 12 and type(value).__module__.startswith("lightning_dear"):
            for name, one in [*vars(value).items()] if hasattr(value, "__dict__") else ():
                if name not in ("_replica", "_options", "_notes", "collectives", "_collectives"):
                    add(one, depth + 1)

    for fragment in outer.fragments:
        add([getattr(fragment, name) for name in ("_buffers", "_exchange", "anchor", "stepper")])
    return sum(storages.values())


@pytest.mark.parametrize("compressor", ["none", "int8"])
@distributed(world_sizes=(2, 3))
def test_memory_is_that_of_the_formula(compressor: str, world_size: int) -> None:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)))
    optimizer = SGD(model.parameters(), lr=0.1)
    collectives = new_collectives(torch.device("cpu"))
    pipeline = Pipeline(model, [optimizer], alone(collectives), ThresholdFusion())
    outer = partial(SGD, lr=1.0, momentum=0.5, nesterov=True)
    steps = LocalSteps(every=8, fragments=4, delay=1, mix=0.5, outer=outer)
    how = ExchangeOptions(compressor=resolve_compressor(compressor)), ThresholdFusion()
    half = OuterHalf.of(pipeline, steps, collectives, *how)
    seen: list[float] = []
    numel = 4 * SIZE * SIZE
    for _ in range(10):
        with pipeline.forward():
            loss = model(torch.randn(3, SIZE)).square().mean()
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        half.after_step(optimizer)
        seen.append(held_by(half) / 4 / numel)
    anchor, part, residual = 1, 3 / world_size, 0.0
    message = (2 * world_size - 1) / world_size / 4
    if compressor == "int8":
        # Residuals, before and after a step; and encoded messages, a quarter as long, stay.
        residual, message = 2.0, 1 / 4
        encoded = 2 / 4 * 1.02
        residual += encoded
    at_rest = anchor + part + residual
    assert seen[-1] == pytest.approx(at_rest, rel=0.05)  # after step 10 nothing is under way
    assert max(seen[6:]) == pytest.approx(at_rest + message, rel=0.05)
    half.detach()
