"""Where gradients cannot be seen: a warning or an error instead of another model."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lightning_dear.collectives import new_collectives
from lightning_dear.support import warn_about_gradient_hooks
from tests.distributed.harness import distributed
from tests.lightning.fitting import TIMEOUT, dear, fit
from tests.lightning.nets import Net


class _ClipsInHook(Net):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class _MasksInHook(Callback):
    def on_after_backward(self, *args: object) -> None:
        pass


class _ClipsByHand(Net):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


def test_hooks_that_look_at_gradients_are_named() -> None:
    with pytest.warns(
        UserWarning, match="under strategy='dear' a parameter's .grad is None"
    ) as seen:
        warn_about_gradient_hooks([_MasksInHook()], _ClipsInHook("mlp"))
    text = " ".join(str(one.message) for one in seen)
    assert "_ClipsInHook.on_before_optimizer_step" in text
    assert "_MasksInHook.on_after_backward" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_gradient_hooks([Callback()], Net("mlp"))


@distributed(world_sizes=(1, 2))
def test_clipping_by_hand_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_gradients does not work under strategy='dear' yet"):
        fit(dear(), _ClipsByHand("mlp"))


@distributed(world_sizes=(2,))
def test_many_fits_open_no_more_sockets_than_one() -> None:
    descriptors = []
    for _ in range(4):
        fit(dear(), Net("mlp"))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[3] == descriptors[0]


@distributed(world_sizes=(2,))
def test_a_fit_after_a_failure_on_one_rank_starts_with_fresh_groups() -> None:
    fit(dear(), Net("mlp"))
    if dist.get_rank() == 0:
        new_collectives(torch.device("cpu"), TIMEOUT).discard()
    else:
        new_collectives(torch.device("cpu"), TIMEOUT)
    fit(dear(), Net("mlp"))
