"""Collectives that must keep one order (NCCL's) are launched in one order, over all groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_dear.collectives.work import Work
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from tests.distributed.harness import distributed
from tests.training import three_ways as training
from tests.training.models import MayLeaveOut
from tests.training.three_ways import new_native, new_pipeline

REDUCES = {"launch_reduce_scatter", "launch_all_to_all", "launch_all_reduce"}
LAUNCHES = {*REDUCES, "launch_all_gather", "launch_max", "launch_broadcast"}
GRADIENTS = ExchangeOptions("gradients")
ALL_REDUCED = ExchangeOptions("gradients", decouple=False)
CASES = [(None, 1), (None, 2), (GRADIENTS, 1), (ALL_REDUCED, 1)]
IDS = ["parameters", "two_optimizers", "gradients", "all_reduced"]


def log_launches(collectives: Any) -> list[tuple[str, int]]:
    """What is launched from now on, and its number where it has one."""
    log = []

    def logged(name: str, launch: Callable[..., Work]) -> Callable[..., Work]:
        def noting(*args: Any) -> Work:
            log.append((name, args[-1] if isinstance(args[-1], int) else -1))
            return launch(*args)

        return noting

    for name in LAUNCHES:
        setattr(collectives, name, logged(name, getattr(collectives, name)))
    return log


def _step(pipeline: Pipeline, model: nn.Module, uses_extra: bool) -> None:
    with pipeline.forward():
        loss = model(torch.randn(5, 7), uses_extra).square().mean()
    with pipeline.backward():
        loss.backward()
    for part in pipeline.parts:
        part.optimizer.step()
        part.optimizer.zero_grad()


@pytest.mark.parametrize(("options", "num_optimizers"), CASES, ids=IDS)
@distributed(world_sizes=(2,))
def test_a_rank_that_lacks_a_gradient_launches_in_the_order_of_the_others(
    options: ExchangeOptions | None, num_optimizers: int
) -> None:
    torch.manual_seed(0)
    model = MayLeaveOut(width=40)
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD(parameters[n::num_optimizers], lr=0.1) for n in range(num_optimizers)
    ]
    with mock.patch.object(training, "new_collectives", new_native):
        pipeline = new_pipeline(
            model, optimizers[0], NoFusion(), more=optimizers[1:], options=options
        )
    log = log_launches(pipeline.collectives)
    for step in range(3):
        _step(pipeline, model, uses_extra=step == 0 or dist.get_rank() == 1)
    pipeline.complete_parameters()
    mine, theirs = pipeline.collectives.all_gather_object(log)
    assert mine == theirs
    names = [name for name, _ in log]
    # Before the first forward all ranks get rank 0's buffers.
    assert names.pop(0) == "launch_broadcast"
    assert names.count("launch_broadcast") == 3
    for number, name in enumerate(names):
        if name == "launch_broadcast":
            assert names[number - 1] in REDUCES
            assert names[number + 1] == "launch_max"
    pipeline.detach()
