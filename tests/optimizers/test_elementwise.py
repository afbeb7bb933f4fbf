"""Which optimizers are sharded and which refused: known ones by class, others by trying."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.optimizers.tensorwise import ELEMENTWISE, why_not_elementwise
from tests.checkpoint.test_default_dtype import default_dtype


class _Lion(Optimizer):
    """Element-wise, and unknown to us."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.noted = "an attribute of its own"

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=group["lr"])
                    momentum.lerp_(p.grad, 0.01)


class _Normalised(_Lion):
    """Divides by the norm of the whole tensor."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


class _GroupCounter(_Lion):
    """Counts its own steps in the group: it would count buckets."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        group = self.param_groups[0]
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"] / group["count"])


class _RowWise(_Lion):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.mean(1, keepdim=True))


class LARS(torch.optim.SGD):
    """Refused by its name alone."""


def _parameters() -> list[Tensor]:
    return list(nn.Linear(3, 3).parameters())


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_torch_optimizers_are_known_and_pass_the_probe(kind: type[Optimizer]) -> None:
    assert why_not_elementwise(kind(_parameters())) is None
    subclass = type(f"My{kind.__name__}", (kind,), {})
    assert why_not_elementwise(subclass(_parameters())) is None


def test_an_elementwise_stranger_passes_and_is_left_as_it_was() -> None:
    optimizer = _Lion(_parameters())
    groups, state = optimizer.param_groups, optimizer.state
    assert why_not_elementwise(optimizer) is None
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert not state


@pytest.mark.parametrize("kind", [_Normalised, _GroupCounter, _RowWise])
def test_a_stranger_that_needs_whole_tensors_is_refused(kind: type[Optimizer]) -> None:
    assert re.search(f"cannot shard {kind.__name__}", str(why_not_elementwise(kind(_parameters()))))


class _Adaptive(_Lion):
    """Divides by the norm of the whole tensor in the groups that say so."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() if group["adapt"] else p.grad)


@pytest.mark.parametrize("empty", [False, True])
def test_every_group_is_tried_with_its_own_options(empty: bool) -> None:
    first, second = ([] if empty else _parameters()), _parameters()
    assert (
        why_not_elementwise(_Adaptive([{"params": one, "adapt": False} for one in (first, second)]))
        is None
    )
    groups = [{"params": first, "adapt": False}, {"params": second, "adapt": True}]
    assert re.search(
        r"cannot shard _Adaptive: a tensor of shape \(8, 12\) gets other values",
        str(why_not_elementwise(_Adaptive(groups))),
    )


def test_a_learning_rate_that_warms_up_from_zero_says_nothing() -> None:
    for kind in (_Lion, _GroupCounter):
        optimizer = kind(_parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        if kind is _Lion:
            assert why_not_elementwise(optimizer) is None
        else:
            assert re.search(
                "cannot shard _GroupCounter: a tensor of shape", str(why_not_elementwise(optimizer))
            )
    assert why_not_elementwise(_Lion(_parameters(), lr=0.0)) is None


def test_a_stranger_with_a_small_rate_passes_within_a_short_default_dtype() -> None:
    """Its updates would be rounded away."""
    with default_dtype(torch.bfloat16):
        assert why_not_elementwise(_Lion([nn.Parameter(torch.zeros(3))], lr=1e-6)) is None


def test_refused_by_name() -> None:
    optimizers = [torch.optim.LBFGS(_parameters()), LARS(_parameters(), lr=0.1)]
    optimizers += [torch.optim.Adafactor(_parameters())]
    if hasattr(torch.optim, "Muon"):
        optimizers.append(torch.optim.Muon([nn.Linear(3, 3).weight]))
    for optimizer in optimizers:
        assert re.search(
            f"cannot shard {type(optimizer).__name__}.*whole", str(why_not_elementwise(optimizer))
        )
