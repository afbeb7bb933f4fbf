"""Ranks that have launched different messages find out in that step, on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import distributed
from tests.training.models import build, optimizer_for
from tests.training.three_ways import new_pipeline, train_steps


@distributed(world_sizes=(2, 3))
def test_a_message_of_one_rank_alone_is_named_in_that_step() -> None:
    """Rank 0 sends its buffers once more; others do not receive them, and it does not wait."""
    model = build("mlp")
    pipeline = new_pipeline(model, optimizer_for("sgd", model))

    def between(step: int) -> None:
        if step == 2 and dist.get_rank() == 0:
            pipeline.collectives.launch_broadcast(torch.ones(3), 7)

    said = r"float32, 3 elements, group 1 was launched 1 times on rank 0, 0 times on rank 1"
    with pytest.raises(RuntimeError, match=f"^Ranks have launched different messages.*{said}"):
        train_steps(pipeline, model, range(5), between=between)
    assert pipeline.parts[0].num_steps == 2
