"""What is left has the weight of its own step, whatever a schedule does to learning rates."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.checkpoint.residual_keeper import RateFollower, ResidualKeeper
from lightning_dear.compression import OkTopk
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion, SingleFusion
from tests.distributed.harness import distributed
from tests.training.linear import SHAPES, SOMETIMES, Known
from tests.training.three_ways import new_pipeline

RATES = (1.0, 0.5, 0.5, 2.0, 0.25, 1.0, 0.125, 0.25, 2.0, 0.5, 1.0, 1.0)
"""Powers of two, with which nothing is rounded."""


class Scheduled:
    """SGD with two parameter groups whose learning rates change differently.

    Args:
        lr_rescale: See `OkTopk`.
        **options: Others of it.
    """

    def __init__(self, lr_rescale: bool = True, **options: Any) -> None:
        self.model = Known()
        self.expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        weights = list(self.model.weights)
        groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 4.0}]
        self.optimizer = torch.optim.SGD(groups, lr=1.0)
        codec = OkTopk(density=0.05, lr_rescale=lr_rescale, **options)
        exchange = ExchangeOptions("gradients", codec=codec)
        self.pipeline = new_pipeline(self.model, self.optimizer, SingleFusion(), options=exchange)
        self.part = self.pipeline.parts[0]

    def set_rates(self, step: int) -> None:
        first, second = self.optimizer.param_groups[:2]
        first["lr"], second["lr"] = RATES[step % 12], 4 * RATES[(5 * step + 1) % 12]

    def rate_of(self, number: int) -> float:
        return float(self.optimizer.param_groups[number >= 2]["lr"])

    def step(self, step: int, synchronize: bool = True) -> None:
        generator, world_size = torch.Generator().manual_seed(step), dist.get_world_size()
        of_ranks = [
            [torch.randint(-64, 65, shape, generator=generator) / 8 for shape in SHAPES]
            for _ in range(world_size)
        ]
        # Multiples of the number of ranks, of which 1/P is exact.
        own: list[Tensor | None] = [one * world_size for one in of_ranks[dist.get_rank()]]
        is_trained = [weight.requires_grad for weight in self.model.weights]
        with self.pipeline.forward():
            pairs = zip(own, is_trained, strict=True)
            loss = self.model([one if has_gradient else None for one, has_gradient in pairs])
        with self.pipeline.backward(synchronize=synchronize):
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for number, ones in enumerate(zip(*of_ranks, strict=True)):
            if is_trained[number]:
                self.expected[number] += self.rate_of(number) * sum(ones).double()

    def check(self) -> None:
        """What weights were moved by, and will be by what is left, is all that there was."""
        self.pipeline.complete_parameters()
        held = self.part.plans.residuals.taken().worker["residual"]
        for number, weight in enumerate(self.model.weights):
            left = held[weight].double()
            dist.all_reduce(left)
            to_come = self.rate_of(number) * left.view(weight.shape)
            assert torch.equal(to_come - weight.detach().double(), self.expected[number]), number


def _resumed(run: Scheduled, **options: Any) -> Scheduled:
    state = copy.deepcopy(run.part.optimizer_state_dict())
    resumed = Scheduled(**options)
    # Of a training that is forgotten: other learning rates.
    resumed.step(99)
    resumed.pipeline.complete_parameters()
    resumed.expected = run.expected
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(state)
    return resumed


@distributed(world_sizes=(1, 3))
def test_what_is_left_weighs_what_it_weighed() -> None:
    """Over schedules, checkpoints before and after them, another plan and a frozen tensor."""
    _check_weighs_what_it_weighed(tau_prime=3)
    _check_weighs_what_it_weighed(mode="static")


def _check_weighs_what_it_weighed(**options: Any) -> None:
    run = Scheduled(**options)
    for step in range(14):
        if step == 2:
            run = _resumed(run, **options)
        run.set_rates(step)
        if step == 4:
            run = _resumed(run, **options)
        if step == 6:
            run.part.replan(NoFusion().plan(run.part.tensors, dist.get_world_size()))
        if step == 8:
            run.model.weights[SOMETIMES].requires_grad_(False)
            # So that there is another plan.
            run.model.register_parameter("new", nn.Parameter(torch.zeros(3)))
            run.optimizer.add_param_group({"params": [run.model.new]})
        if step == 11:
            run.model.weights[SOMETIMES].requires_grad_(True)
        # Now and then nothing is sent before the optimizer is called.
        run.step(step, synchronize=step not in (3, 10))
        run.check()


def test_a_rate_of_zero_changes_nothing() -> None:
    weights = [torch.zeros(1) for _ in range(3)]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    follower, (first, _) = RateFollower(optimizer), optimizer.param_groups
    assert follower.changes() == {}
    first["lr"] = 0.0
    assert follower.changes() == {}
    first["lr"] = 0.5
    assert follower.changes() == {weights[0]: 2.0, weights[1]: 2.0}
    assert follower.changes() == {}
    follower.start_anew([{"lr": 2.0}, {"lr": 0.0}])
    assert follower.changes() == {weights[0]: 4.0, weights[1]: 4.0}
    first["lr"] = torch.tensor(2.0)
    assert follower.changes() == {weights[0]: 0.25, weights[1]: 0.25}


def test_it_is_warned_of_where_steps_do_not_follow_gradients() -> None:
    keeper = SimpleNamespace(
        _coded=[SimpleNamespace(configured=OkTopk(lr_rescale=True))],
        _optimizer=torch.optim.Adam([torch.zeros(1)]),
        _collectives=SimpleNamespace(rank=0),
    )
    with pytest.warns(UserWarning, match="those of Adam may not follow how large gradients are"):
        ResidualKeeper._check_rescaling(keeper)  # type: ignore[arg-type]


@distributed(world_sizes=(2,))
def test_it_is_not_done_unless_it_is_asked_for() -> None:
    run = Scheduled(lr_rescale=False)
    run.step(0)
    run.pipeline.complete_parameters()
    before = run.part.plans.residuals.taken().worker["residual"]
    run.set_rates(4)
    run.part.optimizer_state_dict()
    after = run.part.plans.residuals.taken().worker["residual"]
    assert all(torch.equal(after[one], left) for one, left in before.items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_rescale": 1}, "lr_rescale of oktopk must be true or false, got 1"),
        (
            {"lr_rescale": True, "error_feedback": False, "allow_biased": True},
            "oktopk rescales what it has not sent",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OkTopk(**options)  # type: ignore[arg-type]
