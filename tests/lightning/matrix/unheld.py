"""Rows: parameters that no optimizer of the training holds, and optimizers of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.lightning.matrix.nets import ManualNet, RowNet
from tests.lightning.matrix.rows import Feature
from tests.lightning.matrix.seen import Seen

row = partial(Feature, section="Optimisation")


class _Apart(RowNet):
    """Scales and shifts outputs by parameters that `configure_optimizers` does not return."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.net.register_forward_hook(lambda *said: said[2] * self.scale + self.shift)
        self.own = torch.optim.SGD([self.scale], lr=0.1, momentum=0.9)
        self.early = torch.optim.Adam([self.shift], lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.net)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.note(
            "what stays", [one.grad for one in (self.scale, self.shift) if one.grad is not None]
        )

    def step(self, optimizer: Optimizer) -> None:
        """Notes the gradient, steps, and clears it."""
        held = optimizer.param_groups[0]["params"]
        self.note(type(optimizer).__name__, [one.grad for one in held])
        optimizer.step()
        optimizer.zero_grad()


class _Automatic(_Apart):
    """Steps one behind backward and the other behind the batch; with accumulation, in time."""

    every = 1

    def is_last(self, batch_idx: int) -> bool:
        return batch_idx % self.every == self.every - 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.number = batch_idx
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.is_last(self.number):
            self.step(self.early)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_last(batch_idx):
            self.step(self.own)


class _Accumulating(_Automatic):
    every = 2


class _Kept(_Apart):
    """Nothing steps them, and nothing clears their gradients: they add up."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("sums", [self.scale.grad, self.shift.grad])


class _Manual(_Apart, ManualNet):
    """Two backwards, and steps before the training's own and behind it."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        self.step(self.early)
        optimizer.step()
        self.step(self.own)


def _differ(seen: Seen) -> None:
    assert all(
        len(entries) >= 3 for name, entries in seen.series.items() if name in ("SGD", "Adam")
    )


FEATURES = (
    row(
        name="an optimizer that configure_optimizers does not return, for parameters of its own",
        net=_Automatic,
        check=_differ,
        remark="their gradients are averaged after backward, as under DDP",
    ),
    row(
        name="an optimizer of its own while accumulating",
        net=_Accumulating,
        trainer={"accumulate_grad_batches": 2},
        num_steps=3,
        check=_differ,
    ),
    row(name="an optimizer of its own in manual optimisation", net=_Manual, check=_differ),
    row(
        name="gradients of parameters that nothing steps or clears",
        net=_Kept,
        remark="freeze them: the messages cost as much as others",
    ),
)
