"""When ranks exchange the weights of their batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.distributed.harness import distributed
from tests.training.models import batch, build, loss_of
from tests.training.three_ways import new_pipeline


@distributed(world_sizes=[2, 3])
def test_weights_travel_while_backward_runs() -> None:
    """Launched before the first gradient is there, once a step, after the step's last forward."""
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = new_pipeline(model, optimizer, weighs=True)
    weights, ledger = pipeline.training.weights, pipeline.collectives.ledger
    for step in range(3):
        before = 0
        for part in range(2):
            with pipeline.forward():
                loss = loss_of(model, *batch("mlp", step, dist.get_rank()))
            weights.weigh(1 + dist.get_rank() + part)
            # The gathers of the last step have been launched by now.
            before = ledger["all_gather"]
            factor = weights.loss_factor()
            with pipeline.backward(synchronize=part == 1):
                sent = ledger["all_gather"] - before
                assert sent == part * 8 * (dist.get_world_size() - 1)
                (loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
