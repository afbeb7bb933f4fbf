"""Rows: manual optimisation, with one optimizer and with two."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dear import DearStrategy
from tests.lightning.matrix.gradients import CLIP
from tests.lightning.matrix.nets import ManualNet
from tests.lightning.matrix.rows import NORM_ORDER, SEVERAL, Apart, Feature
from tests.training.models import optimizer_for

row = partial(Feature, section="Optimisation")
TWICE = Apart(
    "DDP averages after every backward, `dear` once before the step: another order of summation",
    2e-5,
    SEVERAL,
)


class ManualPlain(ManualNet):
    """Reads weights right behind the step, in the same training step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        optimizer.step()
        self.note("behind the step", [self.loss(batch), *self.parameters()])


class _Clamped(ManualNet):
    """Clamps the weights in the optimizer's groups right behind the step, as a WGAN does."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        optimizer.step()
        held = optimizer.param_groups[0]["params"]
        self.note("behind the step", held)
        with torch.no_grad():
            for parameter in held:
                parameter.clamp_(-0.2, 0.2)


class _TwoBackwards(ManualNet):
    """One backward or two before a step, by turns; the last one marked or not."""

    is_marked = False

    def last_backward(self) -> Any:
        strategy = self.trainer.strategy
        is_ours = isinstance(strategy, DearStrategy)
        return strategy.last_backward() if is_ours and self.is_marked else nullcontext()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2:
            self.backward_of(batch, 0.5)
        with self.last_backward():
            self.backward_of(batch, 0.5)
        optimizer.step()


class _Marked(_TwoBackwards):
    is_marked = True


class _MarkedOnce(_TwoBackwards):
    """One backward a step, marked: the same sums as DDP's."""

    is_marked = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.last_backward():
            self.backward_of(batch)
        optimizer.step()
        optimizer.zero_grad()


class _WithoutStep(ManualNet):
    """Steps behind every second backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.backward_of(batch)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class _Closure(ManualNet):
    """Forward and backward in a closure."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            return self.backward_of(batch)

        self.note("returned", [optimizer.step(closure=closure)])


class _Clipping(ManualNet):
    """Clips by norm or by value, by turns."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        algorithm = "value" if batch_idx % 2 else "norm"
        self.clip_gradients(optimizer, CLIP, gradient_clip_algorithm=algorithm)
        optimizer.step()


class _Whole(ManualNet):
    """Notes every gradient and clips with torch's own function, behind the last backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        strategy = self.trainer.strategy
        is_ours = isinstance(strategy, DearStrategy)
        with strategy.whole_gradients() if is_ours else nullcontext():
            self.note("gradients", [parameter.grad for parameter in self.parameters()])
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        optimizer.step()


class _Scheduled(ManualNet):
    """Steps its learning rate scheduler by hand."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(batch)
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Gan(ManualNet):
    """A generator and a discriminator in turns, toggled or not."""

    toggles = True

    def last_backward(self, *optimizers: Any) -> Any:
        """Unmarked."""
        return nullcontext()

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, _new_gan)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, discriminator = self.net["generator"], self.net["discriminator"]
        real = batch[0]
        for optimizer, sign in zip(self.optimizers(), (-1.0, 1.0), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            fake = generator(real.flip(-1))
            loss = sign * (discriminator(fake).mean() - discriminator(real).mean())
            self.losses.append(loss.detach().clone())
            with self.last_backward(optimizer):
                self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [self.new_optimizer(self.net[name]) for name in ("generator", "discriminator")]


class UntoggledGan(Gan):
    toggles = False


class _MarkedGan(UntoggledGan):
    """Says of every backward which optimizer steps next."""

    def last_backward(self, *optimizers: Any) -> Any:
        strategy = self.trainer.strategy
        is_ours = isinstance(strategy, DearStrategy)
        return strategy.last_backward(*optimizers) if is_ours else nullcontext()


def _new_gan() -> nn.Module:
    def part(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, outputs), nn.Tanh())

    return nn.ModuleDict({"generator": part(7), "discriminator": part(1)})


class _Shared(ManualNet):
    """Weights under one optimizer, biases of the same modules under another."""

    clips = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.backward_of(batch)
        if self.clips:
            self.clip_gradients(first, CLIP, gradient_clip_algorithm="norm")
            self.clip_gradients(second, CLIP, gradient_clip_algorithm="value")
        first.step()
        if batch_idx % 2:
            second.step()

    def configure_optimizers(self) -> Any:
        other = {"sgd": "adamw", "adamw": "sgd"}[self.optimizer_name]
        matrices = nn.ParameterList(p for p in self.parameters() if p.dim() > 1)
        vectors = nn.ParameterList(p for p in self.parameters() if p.dim() == 1)
        return [optimizer_for(self.optimizer_name, matrices), optimizer_for(other, vectors)]


class _SharedClipping(_Shared):
    clips = True


FEATURES = (
    row(name="manual optimisation", net=partial(ManualPlain, model="gpt"), data="gpt"),
    row(name="weights clamped behind a manual step (WGAN)", net=_Clamped),
    row(name="two backwards before one step", net=_TwoBackwards, apart=(TWICE,)),
    row(
        name="two backwards before one step, the last one marked",
        net=_Marked,
        apart=(TWICE,),
        remark="`with self.trainer.strategy.last_backward():` lets it overlap",
    ),
    row(name="one backward, marked as the last", net=_MarkedOnce),
    row(name="a backward without a step", net=_WithoutStep, apart=(TWICE,), num_steps=3),
    row(name="a closure in manual optimisation", net=_Closure),
    row(name="self.clip_gradients in manual optimisation", net=_Clipping, apart=(NORM_ORDER,)),
    row(
        name="reading and changing .grad in manual optimisation",
        net=_Whole,
        remark="in `with self.trainer.strategy.whole_gradients():`",
    ),
    row(name="a learning rate scheduler stepped by hand", net=_Scheduled),
    row(
        name="two optimizers with toggle_optimizer (GAN)",
        net=Gan,
        reference="ddp, unused",
        num_steps=12,
    ),
    row(
        name="two optimizers without toggle_optimizer (GAN)",
        net=UntoggledGan,
        reference="ddp, unused",
        num_steps=12,
    ),
    row(
        name="two optimizers without toggle_optimizer, each backward marked (GAN)",
        net=_MarkedGan,
        reference="ddp, unused",
        num_steps=12,
        remark="`with self.trainer.strategy.last_backward(optimizer):`",
    ),
    row(
        name="two optimizers that share modules",
        net=_Shared,
        remark="weights in one, biases in the other",
    ),
    row(name="two optimizers, each clipped", net=_SharedClipping, apart=(NORM_ORDER,)),
)
