"""Parameters that a step does not use: everywhere, on one rank, in some steps, in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    WeightRecorder,
    assert_differ,
    assert_ranks_agree,
    assert_same,
    ddp,
    dear,
    fit,
)
from tests.lightning.nets import Net

Use = Callable[[int, int], list[int]]
"""(step, rank) -> numbers of the branches that are used."""


def _everywhere_unused(step: int, rank: int) -> list[int]:
    return [0, 2]


def _unused_on_one_rank(step: int, rank: int) -> list[int]:
    return [0, 1, 2] if rank == 0 else [2]


def _changing(step: int, rank: int) -> list[int]:
    return [step % 3]


def _changing_by_rank(step: int, rank: int) -> list[int]:
    return [(step + rank) % 3]


def _used_late(step: int, rank: int) -> list[int]:
    return [0] if step < 3 else [1, 2]


def _rank_zero_never(step: int, rank: int) -> list[int]:
    return [2] if rank == 0 else [0, 1]


USES = {
    use.__name__: use
    for use in (
        _everywhere_unused,
        _unused_on_one_rank,
        _changing,
        _changing_by_rank,
        _used_late,
        _rank_zero_never,
    )
}


class _BranchNet(Net):
    def __init__(self, use: Use, optimizer: str) -> None:
        super().__init__("mlp", optimizer)
        torch.manual_seed(1)
        self.use = use
        self.net = nn.ModuleDict(
            {
                "branches": nn.ModuleList(nn.Linear(7, 50) for _ in range(3)),
                "head": nn.Linear(50, 3),
                "never": nn.Linear(70, 70),
            }
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        used = self.use(self.trainer.global_step, self.trainer.global_rank)
        hidden = sum(self.net["branches"][number](batch[0]) for number in used)
        return nn.functional.cross_entropy(self.net["head"](hidden), batch[1].flatten())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("use", USES)
@distributed(world_sizes=[2])
def test_unused_parameters_as_under_ddp(use: str, optimizer: str) -> None:
    strategies = {"ddp": ddp(find_unused_parameters=True), "dear": dear()}
    nets = {name: _BranchNet(USES[use], optimizer) for name in strategies}
    recorders = {name: WeightRecorder() for name in strategies}
    for name, strategy in strategies.items():
        fit(strategy, nets[name], recorders[name])
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(recorders["dear"].seen, recorders["ddp"].seen, "weights")
    assert_ranks_agree(recorders["dear"].seen)


@pytest.mark.parametrize("use", USES)
@distributed(world_sizes=[3])
def test_ranks_agree_when_parameters_are_unused(use: str) -> None:
    recorder = WeightRecorder()
    strategy = dear(find_unused_parameters=True)
    fit(strategy, _BranchNet(USES[use], "adamw"), recorder, num_samples=36)
    assert_ranks_agree(recorder.seen)


class _OutsideNet(Net):
    """In every second step the loss hangs on a parameter alone that the optimizer does not hold."""

    def __init__(self) -> None:
        super().__init__("mlp", "adamw")
        self.outside = nn.Parameter(torch.ones(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.outside.sum() if batch_idx % 2 else super().training_step(batch, batch_idx)


@distributed(world_sizes=[1, 2])
def test_a_step_without_any_gradient_changes_nothing() -> None:
    """Not even by momentum or weight decay, whose state stays as it is."""
    strategies = {"ddp": ddp(find_unused_parameters=True), "dear": dear()}
    recorders = {name: WeightRecorder() for name in strategies}
    for name, strategy in strategies.items():
        fit(strategy, _OutsideNet(), recorders[name])
    seen = recorders["dear"].seen
    assert_same(seen, recorders["ddp"].seen, "weights")
    assert_same(seen[1], seen[0], "weights after a step without gradients")
    assert_differ(seen[2], seen[1])
