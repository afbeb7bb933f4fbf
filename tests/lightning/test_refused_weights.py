"""What `weights="samples"` refuses, on all ranks and by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_dear.compression import Signum
from tests.distributed.harness import distributed
from tests.lightning.fitting import SHORT, dear
from tests.lightning.test_weights import (
    ByHand,
    Case,
    Masked,
    Module,
    equal,
    expected_of,
    fit,
    loss_of,
    other_each_step,
    samples,
    steady,
    tokens_of,
)
from tests.training.models import distance


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


class Second(ByHand):
    """Does not weigh the second micro-batch of a step."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx % 2 == 0:
            strategy.weigh(len(batch))
        with strategy.block_backward_sync():
            self.manual_backward(loss_of(self.net, batch))
        if batch_idx % 2:
            self.optimizers().step()  # type: ignore[union-attr]


class Unused(ByHand):
    """Weighs a batch that has no backward, and not the next one."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if not batch_idx:
            strategy.weigh(len(batch))
            return
        self.manual_backward(loss_of(self.net, batch))


@distributed(world_sizes=[1, 2])
def test_a_weight_that_is_not_used_is_not_kept() -> None:
    with pytest.raises(RuntimeError, match=r"no weight. Call strategy.weigh"):
        fit(module := Unused(Case(steady)), module.case)


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
        (Second, RuntimeError, "no weight. Call strategy.weigh"),
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
        fit(module := LeavesOut(Case(steady, strategy={"timeout": SHORT})), module.case)


@distributed(world_sizes=[1])
def test_weigh_needs_weights() -> None:
    case = Case(steady, strategy={"weights": None})
    with pytest.raises(RuntimeError, match="needs weights='samples'"):
        fit(Masked(case), case)


def test_votes_are_refused() -> None:
    with pytest.raises(ValueError, match="'signsgd': each rank has one vote"):
        dear(weights="samples", compressor="signsgd")
    with pytest.raises(ValueError, match="'signum': each rank has one vote"):
        dear(weights="samples", compressor={"vectors": Signum(), "*": "int8"})


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
