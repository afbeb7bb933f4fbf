"""What Lightning users do around a step: closures, schedulers, accumulation, `zero_grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import distributed
from tests.lightning.fitting import (
    STRATEGIES,
    WeightRecorder,
    assert_ranks_agree,
    assert_same,
    fit,
)
from tests.lightning.nets import Net, copies


def _check(new_net: Callable[[], Net], num_steps: int | None = None, **options: Any) -> Net:
    """The same fit under both strategies; returns our module. Weights in every step, losses."""
    nets = {name: new_net() for name in STRATEGIES}
    recorders = {name: WeightRecorder() for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        trainer = fit(strategy(), nets[name], recorders[name], **options)
        if num_steps is not None:
            assert trainer.global_step == num_steps, name
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(recorders["dear"].seen, recorders["ddp"].seen, "weights")
    assert_ranks_agree(recorders["dear"].seen)
    return nets["dear"]


class _ClosureNet(Net):
    """Overrides `optimizer_step` and calls the optimizer itself."""

    def __init__(self) -> None:
        super().__init__("mlp", "adamw")
        self.num_calls = 0
        self.returned: list[Tensor] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        def closure() -> Any:
            self.num_calls += 1
            return optimizer_closure()

        self.returned.append(optimizer.step(closure).clone())


@distributed(world_sizes=[1, 2])
def test_the_closure_is_called_once_and_its_loss_returned() -> None:
    net = _check(_ClosureNet, limit_train_batches=5)
    assert net.num_calls == 5
    assert_same(net.returned, net.losses, "what step() returned")


class _SkippingNet(Net):
    """Runs the closure in every batch, but steps in every second one only."""

    phase = 1

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        if batch_idx % 2 == self.phase:
            optimizer.step()


class _SkippingLaterNet(_SkippingNet):
    """The first step, which is recorded, is one with a closure."""

    phase = 0


@pytest.mark.parametrize("net", [_SkippingNet, _SkippingLaterNet])
@distributed(world_sizes=[2])
def test_a_step_apart_from_its_closure(net: type[Net]) -> None:
    _check(net)


class _PeekingNet(Net):
    """Evaluates with gradients enabled between steps and inside a training step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.loss(batch)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        before = copies(self)
        for _ in range(2):
            self.losses.append(self.loss(batch).detach())
        assert_same(copies(self), before, "weights after an evaluation")


@distributed(world_sizes=[2])
def test_forwards_with_gradients_enabled_do_not_update() -> None:
    _check(lambda: _PeekingNet("gpt"), model="gpt")


class _ScheduledNet(Net):
    def __init__(self, interval: str) -> None:
        super().__init__("mlp", "adamw")
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


@pytest.mark.parametrize("interval", ["step", "epoch"])
@distributed(world_sizes=[1, 2])
def test_the_learning_rate_of_a_step_is_that_of_its_time(interval: str) -> None:
    _check(lambda: _ScheduledNet(interval), num_samples=16, max_epochs=2)


@distributed(world_sizes=[1, 2])
def test_accumulation_with_a_shorter_last_window() -> None:
    world_size = dist.get_world_size()
    num_batches = 5  # windows of three and of two
    num_samples = 2 * num_batches * world_size
    options = {"accumulate_grad_batches": 3, "max_epochs": 2, "num_samples": num_samples}
    _check(lambda: Net("conv", "adamw"), 4, model="conv", **options)


@distributed(world_sizes=[2])
def test_accumulation_when_nobody_looks() -> None:
    nets = {name: Net("gpt") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name], model="gpt", num_samples=32, accumulate_grad_batches=3)
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights after fit")


class _ManualNet(Net):
    """Manual optimisation: reads weights right behind the step, in the same training step."""

    def __init__(self, optimizer: str = "adamw", max_backwards: int = 1) -> None:
        super().__init__("gpt", optimizer)
        self.automatic_optimization = False
        self.max_backwards = max_backwards

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        num_backwards = 1 + batch_idx % self.max_backwards
        for _ in range(num_backwards):
            loss = self.loss(batch)
            self.losses.append(loss.detach())
            self.manual_backward(loss / num_backwards)
        optimizer.step()
        self.losses += [self.loss(batch).detach(), *copies(self)]


@distributed(world_sizes=[2])
def test_manual_optimisation() -> None:
    _check(_ManualNet, model="gpt")


@distributed(world_sizes=[2])
def test_manual_optimisation_with_one_backward_or_two() -> None:
    """DDP sums over ranks after each backward, ours once: equal up to the order of additions."""
    nets = {name: _ManualNet("sgd", 2) for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name], model="gpt")
    for ours, theirs in zip(nets["dear"].losses, nets["ddp"].losses, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert_ranks_agree([copies(nets["dear"])])


class _ZeroGradNet(Net):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.way == "module":
            self.zero_grad()
        elif self.way == "module, zeros":
            self.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad(set_to_none=self.way == "none")


@pytest.mark.parametrize("way", ["none", "zeros", "module", "module, zeros"])
@distributed(world_sizes=[1, 2])
def test_every_way_to_clear_gradients(way: str) -> None:
    _check(lambda: _ZeroGradNet(way))


@pytest.mark.parametrize("way", ["none", "zeros", "module, zeros"])
@distributed(world_sizes=[2])
def test_every_way_to_clear_gradients_when_accumulating(way: str) -> None:
    _check(lambda: _ZeroGradNet(way), accumulate_grad_batches=2)


@distributed(world_sizes=[1])
def test_one_rank_trains_what_ddp_trains() -> None:
    net = _check(lambda: Net("conv", "adamw"), model="conv")
    assert not torch.equal(net.losses[0], net.losses[-1])
    nets = {}
    for name, strategy in (("dear", STRATEGIES["dear"]()), ("auto", "auto")):
        nets[name] = Net("conv", "adamw")
        fit(strategy, nets[name], model="conv", use_distributed_sampler=False)
    assert_same(copies(nets["dear"]), copies(nets["auto"]), "weights without any strategy")


@distributed(world_sizes=[2])
def test_double_and_bf16_mixed_precision() -> None:
    for precision in ("bf16-mixed", "64-true"):
        _check(lambda: Net("mlp", "adamw"), precision=precision)


@distributed(world_sizes=[2])
def test_fitting_twice_and_switching_strategies() -> None:
    """A module that one fit has released trains on under another trainer."""
    nets = {name: Net("mlp", "sgd") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        trainer = fit(strategy(), nets[name])
        trainer.fit_loop.max_epochs = 2
        trainer.fit(nets[name], trainer.train_dataloader)
        fit(STRATEGIES["ddp"](), nets[name])
    assert_same(nets["dear"].losses, nets["ddp"].losses, "loss")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")
