"""Lightning's own services for a DDP strategy: it splits the data and reduces what is logged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, new_trainer
from tests.lightning.nets import Net


class _NumberNet(Net):
    """Is fed sample numbers, which it keeps and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.numbers += batch[1].tolist()
        self.log("mean", float(self.global_rank), sync_dist=True, on_step=True, on_epoch=False)
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=False)
        return self.loss([batch[0], batch[1] % 3])


@distributed(world_sizes=[2, 3])
def test_ranks_see_different_samples_and_logs_are_reduced() -> None:
    world_size = dist.get_world_size()
    num_samples = 2 * world_size
    samples = [(torch.randn(7), number) for number in range(num_samples)]
    net, trainer = _NumberNet(), new_trainer(dear(), max_epochs=2)
    trainer.fit(net, DataLoader(samples, batch_size=2, shuffle=True))
    assert isinstance(trainer.strategy, DDPStrategy)
    assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, net.numbers)
    first = [number for numbers in everyone for number in numbers[:2]]
    second = [number for numbers in everyone for number in numbers[2:]]
    assert sorted(first) == sorted(second) == list(range(num_samples))
    assert first != second
    assert trainer.callback_metrics["mean"] == (world_size - 1) / 2
    assert trainer.callback_metrics["rank"] == dist.get_rank()
