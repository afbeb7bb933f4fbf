"""The same model at the end: DDP's bits at two ranks, a rank-order reference's at more."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import distributed
from tests.engine.models import OPTIMIZERS
from tests.engine.training import Trace, train_ddp, train_dear


def assert_equal(ours: Trace, theirs: Trace) -> None:
    for step, (left, right) in enumerate(zip(ours[0], theirs[0], strict=True)):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(a, b), f"step {step}, parameter {index}: {(a - b).abs().max()}"


def assert_equal_on_all_ranks(trace: Trace) -> None:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [[t.numpy().tobytes() for t in step] for step in trace[0]])
    assert all(other == everyone[0] for other in everyone)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@distributed(world_sizes=(1, 2))
def test_bits_of_ddp(model: str, optimizer: str) -> None:
    ours = train_dear(model, optimizer, 6)
    theirs = train_ddp(model, optimizer, 6)
    assert_equal(ours, theirs)
    assert ours[1] == theirs[1]
    assert_equal_on_all_ranks(ours)
