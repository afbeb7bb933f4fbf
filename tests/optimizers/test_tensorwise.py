"""Which optimizers may step tensors one by one, and which options of gathering are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.optimizers.tensorwise import why_not_tensorwise
from lightning_dear.planning import NoFusion
from tests.checkpoint.test_default_dtype import default_dtype
from tests.training.whole_tensor import LARS

ALONE = PairwiseCollectives(None, None, None)


class _Base(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    def used(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class CountsItself(_Base):
    """Counts its steps in an attribute: once a step, whoever makes the parts of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for p in self.used():
            p.sub_(p.grad / self.num_steps)


class GlobalNorm(_Base):
    """Divides by the norm over all tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.square().sum() for p in self.used())
        for p in self.used():
            p.sub_(p.grad / norm)


class CountsInState(_Base):
    """Counts its steps in the state, under no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1
        for p in self.used():
            p.sub_(p.grad / self.state["count"])


class NeedsGradients(_Base):
    """Does not skip parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


@pytest.mark.parametrize("kind", [LARS, CountsItself, torch.optim.AdamW])
def test_each_tensor_on_its_own_is_accepted_and_left_as_it_was(kind: Any) -> None:
    optimizer = kind(nn.Linear(3, 3).parameters())
    subclass = type("Mine", (kind,), {})(nn.Linear(3, 3).parameters())
    for one in (optimizer, subclass):
        groups = [dict(group) for group in one.param_groups]
        assert why_not_tensorwise(one) is None
        assert [dict(group) for group in one.param_groups] == groups
        assert not one.state


def test_a_stranger_with_a_small_rate_passes_within_a_short_default_dtype() -> None:
    """Its updates would be rounded away."""
    stranger = type("Mine", (torch.optim.SGD,), {})
    parameters = nn.Linear(3, 3).parameters()
    with default_dtype(torch.bfloat16):
        assert why_not_tensorwise(stranger(parameters, lr=1e-6)) is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (GlobalNorm, "gets other values if it is stepped by itself"),
        (CountsInState, "gets other values if it is stepped by itself"),
        (NeedsGradients, r"must skip parameters whose \.grad is None"),
        (torch.optim.LBFGS, "LBFGS does not allow that"),
    ],
)
def test_what_couples_tensors_is_refused(kind: Any, why: str) -> None:
    assert re.search(why, str(why_not_tensorwise(kind(nn.Linear(3, 3).parameters()))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "weights"}, "valid names: parameters, gradients"),
        ({"decouple": False}, "Pass gather='gradients' with it"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangeOptions(**options)


def test_all_reduces_of_two_optimizers_are_refused() -> None:
    model = nn.Linear(3, 3)
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with pytest.raises(ValueError, match="decouple=False works with one optimizer"):
        Pipeline(
            model,
            optimizers,
            ALONE,
            NoFusion(),
            options=ExchangeOptions("gradients", decouple=False),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="or gather='parameters'"):
        Pipeline(model, [optimizer], ALONE, NoFusion(), options=ExchangeOptions("gradients"))


def test_the_other_mode_is_named_where_an_optimizer_is_not_elementwise() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="Use gather='gradients'"):
        Pipeline(model, [LARS(model.parameters())], ALONE, NoFusion())
