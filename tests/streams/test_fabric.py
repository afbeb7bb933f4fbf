"""Fabric's own forward, backward, accumulation and clipping over simulated NCCL."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.compression import Int8
from lightning_dear.fabric import DearFabricStrategy
from lightning_dear.fabric.module import DearModule
from tests.streams.ranks import Rank, on_simulated_cuda
from tests.streams.test_trainings import LONG_PAST
from tests.streams.trainings import FIRST_STEADY, NUM_STEPS, Training, reference
from tests.training.models import distance, loss_of, weights
from tests.training.three_ways import SMALL_BUCKETS


class _Strategy(DearFabricStrategy):
    """On one rank that is a thread: torch.distributed knows no such ranks."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        devices = [torch.device("cpu")]
        super().__init__(
            None,
            devices,
            LightningEnvironment(),
            fusion=SMALL_BUCKETS,
            bucket_cap_mb=None,
            **options,
        )
        self._rank = rank

    def train(self, module: nn.Module, optimizer: Optimizer) -> DearModule:
        """As `setup_module_and_optimizers`."""
        pipeline = self._new_pipeline(module, [optimizer], self._rank.collectives())
        return self._remember(DearModule(module, pipeline))


def _train(training: Training, rank: Rank, **options: Any) -> list[Tensor]:
    model, (optimizer,) = training.build()
    rank.device.put(*model.parameters(), *model.buffers())
    strategy = _Strategy(rank, **options)
    wrapped = strategy.train(model, optimizer)
    for step in range(NUM_STEPS):
        if step == FIRST_STEADY:
            rank.device.forget()
        optimizer.zero_grad()
        for part in range(training.num_batches):
            is_last = part == training.num_batches - 1
            inputs = training.data(step, part, rank.number)
            rank.device.put(*inputs)
            with nullcontext() if is_last else wrapped.no_sync():
                loss = loss_of(wrapped, *inputs)
                strategy.backward(loss, wrapped)
        if training.max_norm is not None:
            strategy.clip_gradients_norm(
                wrapped, optimizer, training.max_norm, error_if_nonfinite=False
            )
        strategy.optimizer_step(optimizer)
    syncs = [told for told in rank.device.syncs if LONG_PAST not in told]
    assert not syncs, syncs
    wrapped.end()
    return weights(model)


@pytest.mark.parametrize(
    "training",
    [
        Training("conv"),
        Training(num_batches=2),
        Training(optimizer="sgd", max_norm=0.1),
    ],
    ids=["dense", "accumulation", "clipping"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_numbers_are_those_of_one_process(training: Training, size: int) -> None:
    found = on_simulated_cuda(lambda rank: _train(training, rank), size)
    found.check()
    first, *rest = found.results
    assert all(all(map(torch.equal, first, other)) for other in rest)
    assert distance(first, reference(training, size)) < (1e-6 if training.max_norm else 1e-12)


@pytest.mark.parametrize("gather", ["parameters", "gradients"])
def test_what_is_encoded_is_in_order(gather: str) -> None:
    found = on_simulated_cuda(
        lambda rank: _train(Training(), rank, compressor=Int8(), gather=gather), 2
    )
    found.check()
