"""`weights="samples"`: the end weights are those of one process on all ranks' samples together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from tests.distributed.harness import distributed
from tests.lightning.fitting import assert_ranks_agree, dear, new_trainer
from tests.training.models import distance

NUM_BATCHES = 51
"""Of an epoch: with windows of 2 the last one is shorter."""

NUM_FEATURES = 5

Sizes = Callable[[int, int], int]
"""(number of the batch, rank) -> number of its samples."""

STEADY = (8, 3, 1, 6)


def steady(_: int, rank: int) -> int:
    return STEADY[rank]


def other_each_step(number: int, rank: int) -> int:
    return 1 + (number * 7 + rank * 3) % 9


def none_on_last(number: int, rank: int) -> int:
    is_last = rank == dist.get_world_size() - 1
    return 0 if is_last and number % 3 != 1 else other_each_step(number, rank)


def none_at_times(number: int, rank: int) -> int:
    return 0 if number % 4 == 2 else other_each_step(number, rank)


def equal(number: int, _: int) -> int:
    return 1 + number % 3


def samples(number: int, rank: int, sizes: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(number * 100 + rank)
    shape = sizes(number, rank), NUM_FEATURES
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Batches(IterableDataset[Tensor]):
    """This rank's batches."""

    def __init__(self, sizes: Sizes, rank: int) -> None:
        self.sizes, self.rank = sizes, rank

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(NUM_BATCHES):
            yield samples(number, self.rank, self.sizes)


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(NUM_FEATURES, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 1)
    return nn.Sequential(*layers).double()


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(net(batch), batch.sin().sum(1, keepdim=True))


def optimizer_for(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        sizes: Numbers of samples.
        optimizer: Its name.
        strategy: Options of the strategy.
        accumulates: Number of batches of a step.
        clips: Largest norm of the mean gradient. None means that it is not clipped.
    """

    sizes: Sizes
    optimizer: str = "adamw"
    strategy: dict[str, Any] = field(default_factory=dict)
    accumulates: int = 1
    clips: float | None = None


class Module(LightningModule):
    """Trains `build()`; `has_loss` says whether a batch has a loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case = build(), case
        self.seen: list[list[Tensor]] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    @override
    def configure_optimizers(self) -> Any:
        return optimizer_for(self.case.optimizer, self.net)

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.case.sizes, self.global_rank), batch_size=None)


def fit(module: Module, case: Case, **options: Any) -> list[Tensor]:
    """The end weights under ours."""
    given = {"weights": "samples", **case.strategy}
    trainer = new_trainer(
        dear(**given),
        accumulate_grad_batches=case.accumulates,
        gradient_clip_val=case.clips,
        **options,
    )
    trainer.fit(module)
    return [one.detach().clone() for one in module.net.parameters()]


def windows(case: Case) -> Iterator[list[int]]:
    numbers = iter(range(NUM_BATCHES))
    while window := [*islice(numbers, case.accumulates)]:
        yield window


def expected_of(case: Case, world_size: int) -> list[Tensor]:
    """What one process makes of the batches of all ranks, by the law."""
    net = build()
    optimizer = optimizer_for(case.optimizer, net)
    for window in windows(case):
        batches = [samples(n, rank, case.sizes) for n in window for rank in range(world_size)]
        total = sum(map(len, batches))
        optimizer.zero_grad()
        for batch in batches:
            if len(batch):
                share = len(window) / case.accumulates * len(batch) / total
                (loss_of(net, batch) * share).backward()
        if case.clips is not None and total:
            clip_grad_norm_(net.parameters(), case.clips)
        optimizer.step()
    return [one.detach() for one in net.parameters()]


CASES = {
    "steady": Case(steady),
    "sgd": Case(steady, "sgd"),
    "other_each_step": Case(other_each_step),
    "none_on_last": Case(none_on_last, "sgd"),
    "none_at_times": Case(none_at_times),
    "clipped": Case(other_each_step, "sgd", clips=0.05),
    "accumulated": Case(other_each_step, accumulates=2),
    "accumulated_none": Case(none_on_last, accumulates=2),
    "accumulated_clipped": Case(none_on_last, "sgd", accumulates=3, clips=0.05),
    "gathered": Case(none_on_last, strategy={"gather": "gradients"}),
    "all_reduced": Case(none_on_last, strategy={"gather": "gradients", "decouple": False}),
}


@pytest.mark.parametrize("name", CASES)
@distributed(world_sizes=[1, 3])
def test_end_weights_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    found = fit(module := Module(case), case)
    assert distance(found, expected_of(case, module.trainer.world_size)) < 1e-12
    assert_ranks_agree([found])
