"""Hooks and code between backward and step that look at gradients or change them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_dear.collectives.factory import new_collectives
from tests.distributed.harness import distributed
from tests.lightning.fitting import STRATEGIES, TIMEOUT, assert_same, dear, fit
from tests.lightning.nets import Net, copies


class _ClipsInHook(Net):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class _ClipsAllItself(Net):
    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: object, gradient_clip_algorithm: object
    ) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 1e-3)


class _MasksInHook(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            assert parameter.grad is not None
            parameter.grad[:1] = 0.0


class _ClipsByHand(Net):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.change(optimizer)
        optimizer.step()

    def change(self, optimizer: Optimizer) -> None:
        self.clip_gradients(optimizer, 1e-3, "value")


class _MasksByHand(_ClipsByHand):
    def change(self, optimizer: Optimizer) -> None:
        strategy = self.trainer.strategy
        if not hasattr(strategy, "whole_gradients"):
            return self.mask()
        with strategy.whole_gradients():
            self.mask()
        return None

    def mask(self) -> None:
        for parameter in self.parameters():
            parameter.grad[:1] = 0.0


_CASES: list[tuple[Callable[[str], Net], list[type[Callback]]]] = [
    (_ClipsInHook, []),
    (_ClipsAllItself, []),
    (Net, [_MasksInHook]),
    (_ClipsInHook, [_MasksInHook]),
    (_ClipsByHand, []),
    (_MasksByHand, []),
]


@pytest.mark.parametrize(("net", "callbacks"), _CASES)
@distributed(world_sizes=(1, 2))
def test_what_hooks_do_to_gradients_counts(
    net: Callable[[str], Net], callbacks: list[type[Callback]]
) -> None:
    nets = {name: net("mlp") for name in STRATEGIES}
    for name, strategy in STRATEGIES.items():
        fit(strategy(), nets[name], *(callback() for callback in callbacks))
    assert_same(nets["dear"].losses, nets["ddp"].losses, "losses")
    assert_same(copies(nets["dear"]), copies(nets["ddp"]), "weights")


@distributed(world_sizes=(2,))
def test_hooks_that_gradients_are_gathered_for_are_named() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(dear(), _ClipsInHook("mlp"), _MasksInHook())
        fit(dear(gradients_in_hooks=False), Net("mlp"))
        fit(dear(), Net("mlp"))
    texts = [str(one.message) for one in seen if "gathers the mean gradient" in str(one.message)]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0)
    if texts:
        assert "_ClipsInHook.on_before_optimizer_step" in texts[0]
        assert "_MasksInHook.on_after_backward" in texts[0]
        assert "gradients_in_hooks=False" in texts[0]


class _SeesNothing(Net):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())
        self.losses.append(self.trainer.strategy.grad_norm())


@distributed(world_sizes=(2,))
def test_without_gradients_in_hooks_the_norm_is_still_right() -> None:
    net = _SeesNothing("mlp")
    fit(dear(gradients_in_hooks=False), net)
    assert all(float(norm) > 0 for norm in net.losses)


@distributed(world_sizes=(2,))
def test_many_fits_open_no_more_sockets_than_one() -> None:
    descriptors = []
    for _ in range(5):
        fit(dear(), Net("mlp"))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    # New groups would open several with each fit; torch itself opens or closes one now and then.
    assert descriptors[4] - descriptors[1] < 3


@distributed(world_sizes=(2,))
def test_a_fit_after_a_failure_on_one_rank_starts_with_fresh_groups() -> None:
    fit(dear(), Net("mlp"))
    if dist.get_rank() == 0:
        new_collectives(torch.device("cpu"), TIMEOUT).discard()
    else:
        new_collectives(torch.device("cpu"), TIMEOUT)
    fit(dear(), Net("mlp"))
