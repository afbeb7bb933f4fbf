"""`DearStrategy(split=)`: weights of one process on the global batches, and what it gains."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.harness import distributed
from tests.lightning.fitting import dear, new_trainer
from tests.lightning.nets import copies


class _Pause(torch.autograd.Function):
    """Takes some time in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class Regression(LightningModule):
    """Trains on a mean over the batch, slowly if asked to.

    Args:
        sample_s: Seconds of each sample in forward, and again in backward.
    """

    def __init__(self, sample_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.sample_s = sample_s
        self.sizes: list[int] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        output = _Pause.apply(self.net(batch[0]), self.sample_s * len(batch[0]))
        return nn.functional.mse_loss(output, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(number: int) -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randn(number, 5).double(), torch.randn(number, 1).double())


def alone(number: int, total: int, num_epochs: int, drop_last: bool = False) -> list[Tensor]:
    """Weights of one process that trains on the global batches, in Lightning's order."""
    module, own = Regression(), samples(number)
    optimizer = module.configure_optimizers()
    order = DistributedSampler(own, 1, 0)
    for epoch in range(num_epochs):
        order.set_epoch(epoch)
        for inputs, targets in DataLoader(own, total, sampler=order, drop_last=drop_last):
            optimizer.zero_grad()
            nn.functional.mse_loss(module.net(inputs), targets).backward()
            optimizer.step()
    return copies(module)


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@distributed(world_sizes=[1, 2, 3])
def test_shares_train_as_one_process_on_the_global_batches(world_size: int) -> None:
    shares = [3, 1, 2][:world_size]
    module = Regression()
    trainer = new_trainer(dear(split=shares), max_epochs=3)
    loader = DataLoader(samples(7 * 4 * world_size + world_size + 1), 4, shuffle=True)
    trainer.fit(module, loader)
    expected = alone(7 * 4 * world_size + world_size + 1, 4 * world_size, 3)
    assert trainer.global_step == 24
    assert furthest(copies(module), expected) < 1e-12


def speed(split: Any, num_batches: int, sample_s: float, **options: Any) -> dict[str, Any]:
    rank = dist.get_rank()
    module = Regression(sample_s * (3 if rank == 1 else 1))
    began: list[float] = []

    class _Clock(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            began.append(time.perf_counter())

    loader = DataLoader(samples(16 * num_batches), 8, shuffle=True, **options)
    trainer = new_trainer(dear(split=split), _Clock())
    trainer.fit(module, loader)
    last = [later - earlier for earlier, later in zip(began[-11:-1], began[-10:], strict=True)]
    return {"seconds": sum(last) / 10, "sizes": module.sizes, "weights": copies(module)}


@distributed(world_sizes=[2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_slower_rank_gets_less(num_workers: int) -> None:
    equal = speed([1, 1], 12, 0.004)
    given = speed([3, 1], 12, 0.004)
    found = speed("auto", 48, 0.004, num_workers=num_workers)
    print(equal["seconds"], given["seconds"], found["seconds"], found["sizes"])
    assert given["sizes"] == [4 if dist.get_rank() else 12] * 12
    assert equal["seconds"] / given["seconds"] >= 1.7
    assert equal["seconds"] / found["seconds"] >= 1.7
    assert furthest(found["weights"], alone(16 * 48, 16, 1)) < 1e-12
