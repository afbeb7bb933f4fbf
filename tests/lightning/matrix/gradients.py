"""Rows: accumulation, clipping, and looking at gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_dear import DearStrategy
from tests.lightning.matrix.nets import RowNet, conv, gpt, mlp
from tests.lightning.matrix.rows import NORM_ORDER, Apart, Feature
from tests.lightning.matrix.seen import Seen

CLIP = 0.02
GATHERED = "costs one more all-gather"
row = partial(Feature, section="Gradients")


class _ClippingHook(RowNet):
    """Clips by norm in one step, by value in the next."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        algorithm = "norm" if self.trainer.global_step % 2 == 0 else "value"
        self.clip_gradients(optimizer, CLIP, gradient_clip_algorithm=algorithm)


class _NormLogger(RowNet):
    """Notes the gradient's norm as its strategy's users are told to."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, DearStrategy):
            norm = self.trainer.strategy.grad_norm()
        else:
            norm = grad_norm(self, 2)["grad_2.0_norm_total"]
        self.note("gradient norm", [norm])


def _gradients(module: RowNet) -> list[Tensor]:
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return gradients


class _Reader(RowNet):
    """Notes every gradient before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("gradients", _gradients(self))


class _Changer(RowNet):
    """Masks and scales gradients before the step, some of them by putting another in place."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, parameter in enumerate(self.parameters()):
            if number % 3 == 0:
                parameter.grad.mul_(0.5)
            elif number % 3 == 1:
                parameter.grad = parameter.grad.sign()
            else:
                parameter.grad = None if self.trainer.global_step % 2 else parameter.grad


class _HandClipper(RowNet):
    """Clips with torch's own function before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("norm", [torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)])


class _AfterBackward(Callback):
    """Reads and changes gradients behind every backward."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note("gradients", _gradients(pl_module))
        for parameter in pl_module.parameters():
            parameter.grad.clamp_(-CLIP, CLIP)


def _after_backward(folder: Path) -> Sequence[Callback]:
    return [_AfterBackward()]


class _Saliency(RowNet):
    """On rank 0 alone, in some steps: a plain backward for the gradient of the input."""

    def _look(self, batch: list[Tensor], times: int) -> None:
        for _ in range(times if self.global_rank == 0 else 0):
            self.loss(batch).backward()
            self.note("saliency", [p.grad for p in self.parameters()])
            self.zero_grad()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self._look(batch, batch_idx % 3)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.zero_grad()
        self._look(batch, batch_idx % 2)


class _Probe(RowNet):
    """Between steps, on all ranks: the gradients of another loss, by a plain backward."""

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.zero_grad()
        (-2 * self.loss(batch)).backward()
        self.note("probe", [parameter.grad for parameter in self.parameters()])
        self.zero_grad()


class _Clearing(RowNet):
    """Clears gradients in its own way, another one in every step."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            self.zero_grad()
        elif batch_idx % 4 == 1:
            self.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad(set_to_none=batch_idx % 4 == 2)


def _accumulating(folder: Path) -> Sequence[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]


def _norms_exceed(seen: Seen) -> None:
    assert all(norm > CLIP for (norm,) in seen.series["norm"])


def _read(seen: Seen) -> None:
    """In `on_after_backward` and `on_before_optimizer_step`, all ranks hold the mean."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen.series["gradients"])
    for other in everyone:
        for ours, theirs in zip(everyone[0], other, strict=True):
            assert all(map(torch.equal, ours, theirs))


FEATURES = (
    row(
        name="accumulation",
        net=gpt,
        data="gpt",
        trainer={"accumulate_grad_batches": 2},
        num_steps=3,
    ),
    row(
        name="accumulation with a shorter last window",
        net=conv,
        data="conv",
        trainer={"accumulate_grad_batches": 3, "max_epochs": 2},
        num_batches=5,
        num_steps=4,
    ),
    row(
        name="GradientAccumulationScheduler",
        net=gpt,
        data="gpt",
        callbacks=_accumulating,
        trainer={"max_epochs": 3},
        num_batches=5,
        num_steps=5 + 3 + 2,
    ),
    row(name="loss.backward() on rank 0 alone, for a look at gradients", net=_Saliency),
    row(name="loss.backward() of another loss between steps", net=_Probe),
    row(name="clearing gradients in every way", net=_Clearing),
    row(
        name="clearing gradients in every way while accumulating",
        net=_Clearing,
        trainer={"accumulate_grad_batches": 2},
    ),
    row(
        name="clipping by norm",
        net=mlp,
        trainer={"gradient_clip_val": CLIP},
        apart=(NORM_ORDER,),
    ),
    row(
        name="clipping by norm while accumulating",
        net=mlp,
        trainer={"gradient_clip_val": CLIP, "accumulate_grad_batches": 2},
        apart=(NORM_ORDER,),
    ),
    row(
        name="clipping by value",
        net=gpt,
        data="gpt",
        trainer={"gradient_clip_val": CLIP / 10, "gradient_clip_algorithm": "value"},
    ),
    row(
        name="configure_gradient_clipping",
        net=_ClippingHook,
        apart=(NORM_ORDER,),
        remark="call `self.clip_gradients`",
    ),
    row(
        name="logging the gradient norm",
        net=_NormLogger,
        apart=(Apart(NORM_ORDER.reason, NORM_ORDER.distance, series=("gradient norm",)),),
        remark="call `trainer.strategy.grad_norm()` in `on_before_optimizer_step`",
    ),
    row(
        name="reading .grad in on_before_optimizer_step",
        net=_Reader,
        check=_read,
        remark=GATHERED,
    ),
    row(
        name="changing .grad in on_before_optimizer_step",
        net=_Changer,
        remark=GATHERED,
    ),
    row(
        name="clip_grad_norm_ in on_before_optimizer_step",
        net=_HandClipper,
        check=_norms_exceed,
        remark=f"{GATHERED}; `gradient_clip_val` costs less",
    ),
    row(
        name="reading and changing .grad in on_after_backward",
        net=mlp,
        callbacks=_after_backward,
        check=_read,
        remark=GATHERED,
    ),
)
