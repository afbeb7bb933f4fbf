"""`weights="samples"`: the end weights are those of one process on all ranks' samples together."""

from __future__ import annotations

import re
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

from lightning_dear.callbacks import CompressionSchedule
from lightning_dear.compression import Signum
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


# --- what is refused ------------------------------------------------------------------------------


class Bad(Module):
    """Rank 1 weighs a batch in a way that is not valid."""

    def __init__(self, weight: float, accumulates: int) -> None:
        super().__init__(Case(steady, accumulates=accumulates))
        self.weight = weight

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        strategy.weigh(self.weight if self.global_rank == 1 and batch_idx == 3 else 1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 2.0**54])
@pytest.mark.parametrize("accumulates", [1, 2])
@distributed(world_sizes=[2])
def test_all_ranks_refuse_a_bad_weight(weight: float, accumulates: int) -> None:
    with pytest.raises(
        ValueError, match=f"Rank 1's .* {re.escape(f'{weight:g}')}. .*strategy.weigh"
    ):
        fit(module := Bad(weight, accumulates), module.case)


class Uneven(ByHand):
    """Rank 1 runs a micro-batch more than rank 0."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        for _ in range(1 + (self.global_rank == 1 and batch_idx == 3)):
            strategy.weigh(len(batch))
            with strategy.block_backward_sync():
                self.manual_backward(loss_of(self.net, batch))
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


@distributed(world_sizes=[2])
def test_all_ranks_refuse_other_numbers_of_batches() -> None:
    with pytest.raises(ValueError, match=r"different numbers of batches .*: \[1, 2\], by rank"):
        fit(module := Uneven(Case(steady)), module.case)


class Plain(ByHand):
    """Two plain backwards of batches of other sizes."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        for part in (batch, batch[:1]):
            strategy.weigh(len(part))
            loss_of(self.net, part).backward()


@distributed(world_sizes=[2])
def test_a_plain_backward_of_another_weight_is_refused() -> None:
    with pytest.raises(RuntimeError, match="plain loss.backward.* weight 1, .* weight 3"):
        fit(module := Plain(Case(lambda *_: 3)), module.case)


class Probing(ByHand):
    """Rank 0 alone looks at a gradient between steps, by a backward that nobody is told of."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            loss_of(self.net, samples(0, 0, steady)).backward()
            # Local, as nothing is on its way.
            self.zero_grad()


@distributed(world_sizes=[1, 2])
def test_a_gradient_that_one_rank_looks_at_counts_nowhere(world_size: int) -> None:
    case = Case(other_each_step, "sgd")
    found = fit(Probing(case), case)
    assert distance(found, expected_of(case, world_size, tokens_of)) < 1e-12


class Hooked(Module):
    """Weighs in hooks before `training_step`, and in validation, which does not count."""

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.weigh(len(batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Weighs, too, as a step does that training and validation share."""
        strategy: Any = self.trainer.strategy
        strategy.weigh(1000)

    def val_dataloader(self) -> Any:
        """As in training."""
        return self.train_dataloader()


class Validated(Module):
    """Weighs in validation alone."""

    validation_step = Hooked.validation_step
    val_dataloader = Hooked.val_dataloader


@pytest.mark.parametrize("kind", [Hooked, Validated])
@distributed(world_sizes=[2])
def test_hooks_weigh_and_validation_does_not(kind: type[Module]) -> None:
    case = Case(other_each_step, "sgd")
    found = fit(kind(case), case, val_check_interval=10)
    assert distance(found, expected_of(case, 2)) < 1e-12


class Turns(ByHand):
    """Two optimizers, each with a batch of its own weight, which are stepped together."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        made: Any = self.optimizers()
        for optimizer, part in zip(made, (batch, batch[:1]), strict=True):
            optimizer.zero_grad()
            strategy.weigh(len(part))
            self.manual_backward(loss_of(self.net, part))
        for optimizer in made:
            optimizer.step()

    @override
    def configure_optimizers(self) -> Any:
        layers = [one for one in self.net if isinstance(one, nn.Linear)]
        parts = layers[:1], layers[1:]
        return [
            torch.optim.SGD([p for one in own for p in one.parameters()], lr=0.1) for own in parts
        ]


class Once(ByHand):
    """Weighs the first batch of the fit alone."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if not batch_idx:
            strategy.weigh(len(batch))
        self.manual_backward(loss_of(self.net, batch))
        self.optimizers().step()  # type: ignore[union-attr]


class LeavesOut(ByHand):
    """A rank leaves out a backward, and the weight of its batch, but not the step."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx != 3 or self.global_rank != self.trainer.world_size - 1:
            strategy.weigh(len(batch))
            self.manual_backward(loss_of(self.net, batch))
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


class Mixed(Module):
    """Weighs some batches alone."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        if batch_idx % 2 == 0:
            strategy.weigh(100)
        return super().training_step(batch, batch_idx)


class Unweighed(ByHand):
    """Does not say what a batch weighs."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(loss_of(self.net, batch))


class Late(ByHand):
    """Weighs another batch after the gradients of a first one have been sent."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        for part in (batch, batch[:1]):
            strategy.weigh(len(part))
            with strategy.last_backward():
                self.manual_backward(loss_of(self.net, part))


class Several(ByHand):
    """Has two optimizers, and accumulates."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.weigh(len(batch))
        with strategy.block_backward_sync():
            self.manual_backward(loss_of(self.net, batch))

    @override
    def configure_optimizers(self) -> Any:
        layers = [one for one in self.net if isinstance(one, nn.Linear)]
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in layers]


class Sizeless(Module):
    """Has batches without a tensor."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader([{"text": "a"}, {"text": "b"}], batch_size=None)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, samples(batch_idx, 0, equal))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Unweighed, RuntimeError, "no weight. Call strategy.weigh"),
        (Late, RuntimeError, "weighed after the step's gradients had been sent"),
        (Several, RuntimeError, "With several optimizers"),
        (Once, RuntimeError, "no weight. Call strategy.weigh"),
        (Mixed, ValueError, "no weight, and earlier ones had"),
        (Sizeless, ValueError, "no number of samples in this batch"),
    ],
)
@distributed(world_sizes=[1, 2])
def test_what_is_refused(kind: type[Module], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit(module := kind(Case(steady)), module.case)


@distributed(world_sizes=[2])
def test_two_optimizers_share_the_weights_of_a_batch() -> None:
    """Without buckets, on one rank, a step has one batch, and its weight does not matter."""
    with pytest.raises(RuntimeError, match="With several optimizers"):
        fit(module := Turns(Case(steady)), module.case)


@distributed(world_sizes=[2])
def test_a_rank_that_leaves_out_a_weight_raises() -> None:
    words = "no weight. Call strategy.weigh" if dist.get_rank() else "Rank 1|rank 1"
    with pytest.raises(RuntimeError, match=words):
        fit(module := LeavesOut(Case(steady)), module.case)


@distributed(world_sizes=[1])
def test_weigh_needs_weights() -> None:
    case = Case(steady, strategy={"weights": None})
    with pytest.raises(RuntimeError, match="needs weights='samples'"):
        fit(Masked(case), case)


def test_votes_are_refused() -> None:
    with pytest.raises(ValueError, match="'signsgd': each rank has one vote"):
        dear(weights="samples", compressor="signsgd")
    schedule = CompressionSchedule(compressors={"*": Signum()})
    with pytest.raises(ValueError, match="'signum': each rank has one vote"):
        dear(weights="samples", compressor="int8", compression_schedule=schedule)


class Ambiguous(Module):
    """Has a second tensor of another length."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["x"], batch_idx)

    @override
    def train_dataloader(self) -> Any:
        batch = {"x": samples(0, 0, steady), "y": torch.zeros(3), "z": "text"}
        return DataLoader([batch], batch_size=None)


@distributed(world_sizes=[1])
def test_a_batch_that_is_ambiguous_warns() -> None:
    with pytest.warns(UserWarning, match="other lengths than the first one, whose length 8"):
        fit(module := Ambiguous(Case(steady)), module.case)
