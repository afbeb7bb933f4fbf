"""`weights="samples"`: the end weights are those of one process on all ranks' samples together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts
from tests.lightning.fitting import assert_ranks_agree, assert_same, dear, new_trainer
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


def spoilt(net: nn.Module) -> Tensor:
    """A loss whose gradients are nan."""
    return loss_of(net, samples(0, 0, steady)) * torch.nan


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
    """Trains `build()`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case = build(), case

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not len(batch):
            # A batch whose gradients would spoil the others, and that counts as none.
            strategy: Any = self.trainer.strategy
            strategy.weigh(0)
            return spoilt(self.net)
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
        accumulate_grad_batches=case.accumulates if module.automatic_optimization else 1,
        gradient_clip_val=case.clips,
        **options,
    )
    trainer.fit(module)
    return [one.detach().clone() for one in module.net.parameters()]


def windows(case: Case) -> Iterator[list[int]]:
    numbers = iter(range(NUM_BATCHES))
    while window := [*islice(numbers, case.accumulates)]:
        yield window


def expected_of(
    case: Case,
    world_size: int,
    batch_of: Callable[[int, int], Tensor] | None = None,
    leaves_out: Sequence[int] = (),
) -> list[Tensor]:
    """What one process makes of the batches of all ranks, by the law.

    Args:
        case: The training.
        world_size: Number of ranks.
        batch_of: (number, rank) -> batch. None means `samples`.
        leaves_out: Numbers of steps that a GradScaler leaves out.
    """
    batch_of = batch_of or partial(samples, sizes=case.sizes)
    net = build()
    optimizer = optimizer_for(case.optimizer, net)
    for step, window in enumerate(windows(case)):
        if step in leaves_out:
            continue
        batches = [batch_of(n, rank) for n in window for rank in range(world_size)]
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


@pytest.mark.parametrize("name", ["accumulated", "accumulated_clipped", "clipped"])
@distributed(world_sizes=[4])
def test_two_hosts_of_two_ranks(name: str) -> None:
    case = CASES[name]
    with on_hosts(2):
        found = fit(module := Module(case), case)
    strategy: Any = module.trainer.strategy
    assert strategy.pipeline_of().collectives.hops == 2
    assert distance(found, expected_of(case, 4)) < 1e-12
    assert_ranks_agree([found])


# --- what has a weight of its own -----------------------------------------------------------------


class Masked(Module):
    """Its loss is a mean over tokens, not over samples; some batches have none on some ranks."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        tokens = batch[batch[:, 0] > 0.5]
        strategy: Any = self.trainer.strategy
        if not len(tokens) and batch_idx % 2 and self.trainer.world_size == 1:
            # With several ranks Lightning refuses that.
            return None
        with torch.no_grad():
            strategy.weigh(torch.tensor(len(tokens)))
        return loss_of(self.net, tokens) if len(tokens) else spoilt(self.net)


class ByHand(Masked):
    """The same in manual optimization. It does not divide losses by the number of batches."""

    automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        strategy: Any = self.trainer.strategy
        tokens = batch[batch[:, 0] > 0.5]
        is_last = (batch_idx + 1) % self.case.accumulates == 0
        strategy.weigh(len(tokens))
        loss = loss_of(self.net, tokens) if len(tokens) else spoilt(self.net)
        loss = loss / self.case.accumulates
        if not is_last:
            with strategy.block_backward_sync():
                self.manual_backward(loss)
            return
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def tokens_of(number: int, rank: int) -> Tensor:
    batch = samples(number, rank, other_each_step)
    return batch[batch[:, 0] > 0.5]


@pytest.mark.parametrize("kind", [Masked, ByHand])
@pytest.mark.parametrize("accumulates", [1, 3])
@distributed(world_sizes=[1, 3])
def test_tokens(kind: type[Module], accumulates: int) -> None:
    """The number of batches, 51, is a multiple of 3."""
    case = Case(other_each_step, "sgd", accumulates=accumulates)
    found = fit(module := kind(case), case)
    expected = expected_of(case, module.trainer.world_size, tokens_of)
    assert distance(found, expected) < 1e-12
    assert_ranks_agree([found])


class Skipping(Module):
    """Has no loss for some batches, which Lightning allows on one rank."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if is_skipped(batch_idx) else super().training_step(batch, batch_idx)


def is_skipped(number: int) -> bool:
    return number % 5 in (1, 2)


@pytest.mark.parametrize("accumulates", [1, 3])
@distributed(world_sizes=[1])
def test_a_batch_without_a_loss_weighs_0(accumulates: int) -> None:
    case = Case(other_each_step, "sgd", accumulates=accumulates)

    def batch_of(number: int, rank: int) -> Tensor:
        return samples(number, rank, lambda *_: 0 if is_skipped(number) else case.sizes(number, 0))

    assert distance(fit(Skipping(case), case), expected_of(case, 1, batch_of)) < 1e-12


class Overflowing(Module):
    """The last rank's loss is inf in one batch. Other batches of it weigh 0, and are nan."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_last = self.global_rank == self.trainer.world_size - 1
        return loss * torch.inf if is_last and batch_idx == OVERFLOWS else loss


OVERFLOWS = 13
"""A batch that has samples on the last rank."""


@distributed(world_sizes=[3])
def test_a_step_that_overflows_on_one_rank() -> None:
    case = Case(none_on_last, "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    plugins = [TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)]
    found = fit(Overflowing(case), case, plugins=plugins)
    assert scaler.get_scale() == 2.0**9
    assert distance(found, expected_of(case, 3, leaves_out=[OVERFLOWS])) < 1e-12
    assert_ranks_agree([found])


# --- equal batches --------------------------------------------------------------------------------


class Single(Module):
    """In single precision."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.net.float(), batch.float())


@pytest.mark.parametrize("accumulates", [1, 2])
@distributed(world_sizes=[2, 3])
def test_equal_batches_give_the_bits_of_no_weights(accumulates: int) -> None:
    """Whatever their size in a step, if micro-batches of a step are alike."""
    alike = Case(lambda number, _: 1 + number // accumulates % 7, accumulates=accumulates)
    plain = replace(alike, strategy={"weights": None})
    found, expected = (fit(Single(case), case) for case in (alike, plain))
    assert_same(found, expected, "weights")


def sent(case: Case) -> Counter[str]:
    fit(module := Module(case), case, limit_train_batches=NUM_SENT)
    strategy: Any = module.trainer.strategy
    return Counter(strategy.pipeline_of().collectives.ledger)


NUM_SENT = 9


@distributed(world_sizes=[1, 3])
def test_eight_bytes_more_go_to_each_other_rank(world_size: int) -> None:
    weighed, plain = sent(Case(equal)), sent(Case(equal, strategy={"weights": None}))
    weighed.subtract(plain)
    others = NUM_SENT * (world_size - 1)
    # One byte among the flags tells whether there are more batches, since loaders have no length.
    expected = Counter({"all_gather": 8 * others, "other": others}) if others else Counter()
    assert +weighed == expected
