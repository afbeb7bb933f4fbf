"""Optimizers of users that are not element-wise in ways that a careless test would not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class OnSphere(nn.Parameter):
    """Rows of norm 1: a class of its own, with an attribute, which optimizers look at."""

    radius: float

    @staticmethod
    def of(values: Tensor, radius: float = 1.0) -> OnSphere:
        """A parameter that begins at these values, put on the sphere."""
        values = radius * nn.functional.normalize(values, dim=-1)
        one: OnSphere = values.as_subclass(OnSphere).requires_grad_()  # type: ignore[assignment]
        one.radius = radius
        return one


class ByTensor(SGD):
    """SGD whose gradient, or new value, is made of the whole tensor where `changes` says so.

    The closure is called first, and torch's own step then.
    """

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            for p in used:
                self.before(p)
        super().step()
        with torch.no_grad():
            for p in used:
                self.after(p)
        return loss

    def before(self, p: Tensor) -> None:
        """Called with each parameter in front of torch's step."""

    def after(self, p: Tensor) -> None:
        """Called with each parameter behind torch's step."""


class Plain(ByTensor):
    """SGD after all."""


def _centre(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.sub_(p.grad.mean(tuple(range(1, p.ndim)), keepdim=True))


class CentralConvolutions(ByTensor):
    """Gradient centralization for convolutions only."""

    def before(self, p: Tensor) -> None:
        if p.ndim > 3:
            _centre(p)


class Central3d(ByTensor):
    """The same for tensors of three dimensions."""

    def before(self, p: Tensor) -> None:
        if p.ndim == 3:
            _centre(p)


class ClipsNorm(ByTensor):
    """Clips each tensor's gradient by its norm, which has to be large for that."""

    bound = 20.0

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_((self.bound / (p.grad.norm() + 1e-6)).clamp(max=1.0))


class ClipsLargeNorm(ClipsNorm):
    """With a bound that ordinary gradients do not reach."""

    bound = 1e5


class ForgetsSmall(ByTensor):
    """Leaves a tensor alone whose gradient is small as a whole."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        if p.grad.norm() < 1e-6:
            p.grad.zero_()


class SkipsZeros(ByTensor):
    """Leaves a tensor's momentum alone if its whole gradient is 0."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        if not p.grad.any():
            p.grad = None


class LargeBlocks(ByTensor):
    """Rounds the gradient in blocks of 256, where a tensor is as large as 8-bit optimizers ask."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        if p.numel() >= 4096:
            flat = p.grad.flatten()
            for block in flat.split(256):
                scale = block.abs().max().clamp(min=1e-20) / 127
                block.copy_((block / scale).round() * scale)
            p.grad.copy_(flat.view(p.grad.shape))


class _Later(ByTensor):
    """Scales a tensor's gradient by its norm, once it has been stepped often."""

    first = 0

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        own = self.state[p]
        own["num_steps"] = own.get("num_steps", 0) + 1
        if own["num_steps"] >= self.first:
            p.grad.div_(p.grad.norm() + 1e-6)


class LaterSteps(_Later):
    """From the tenth step on."""

    first = 10


class KeepsNorm(ByTensor):
    """Keeps the norm of a tensor's gradient, for later."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        own = self.state[p]
        own["norm"] = 0.9 * own.get("norm", torch.zeros(())) + 0.1 * p.grad.norm()


class ByPlace(ByTensor):
    """A smaller step for each further parameter of a group."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        places = [
            number for g in self.param_groups for number, q in enumerate(g["params"]) if q is p
        ]
        p.grad.mul_(0.9 ** places[0])


class Draws(ByTensor):
    """Adds noise."""

    def before(self, p: Tensor) -> None:
        assert p.grad is not None
        p.grad.add_(torch.randn_like(p), alpha=1e-3)


class ByLoss(ByTensor):
    """Steps as far as the loss says, of which every rank has another."""

    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(float(loss))
        SGD.step(self)
        return loss


class Global(ByTensor):
    """Divides by the norm over all tensors, as D-adaptation and Prodigy look at all of them."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(p.grad.square().sum() for p in used)
        for p in used:
            p.grad.div_(total.sqrt() + 1e-6)
        SGD.step(self)
        return loss


class Sharpness(SGD):
    """Calls its closure twice, for the gradient beside the weights."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        loss = torch.enable_grad()(closure)()
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.05 * p.grad.sign() for p in used]
        with torch.no_grad():
            for p, move in zip(used, moves, strict=True):
                p.add_(move)
            torch.enable_grad()(closure)()
            for p, move in zip(used, moves, strict=True):
                p.sub_(move)
        super().step()
        return loss


class Lookahead(Optimizer):
    """Wraps an optimizer, whose steps it makes."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


NOT_ELEMENTWISE: tuple[Callable[..., Optimizer], ...] = (
    *(CentralConvolutions, Central3d, ClipsNorm, ClipsLargeNorm, ForgetsSmall, SkipsZeros),
    *(LargeBlocks, LaterSteps, KeepsNorm),
)
"""Of which each tensor can be stepped by itself."""

NEITHER: tuple[Callable[..., Optimizer], ...] = (Draws, ByLoss, Global)
"""Of which none can."""
