"""Optimizers that need to see whole tensors, and a training loop for them: ours or DDP's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dear.exchange.options import ExchangeOptions
from tests.training.delays import Delays
from tests.training.models import batch, build, loss_of, optimizer_for, two_groups, weights
from tests.training.three_ways import SMALL_BUCKETS, Trace, new_pipeline


class LARS(Optimizer):
    """Scales each tensor's step by the ratio of its norm to its gradient's; counts in the group."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.add(p, alpha=group["weight_decay"])
                ratio = p.norm() / (gradient.norm() + 1e-3) / group["count"] ** 0.5
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(0.9).add_(gradient * ratio, alpha=group["lr"])
                p.sub_(momentum)
        return loss


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


MAKE: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "lars": lambda model: [LARS(two_groups(model))],
    "adamw": lambda model: [optimizer_for("adamw", model)],
    "adamw_foreach": lambda model: [optimizer_for("adamw_foreach", model)],
    "adamw_fused": lambda model: [optimizer_for("adamw_fused", model)],
    "sgd": lambda model: [optimizer_for("sgd", model)],
    "adagrad": lambda model: [optimizer_for("adagrad", model)],
}
if hasattr(torch.optim, "Adafactor"):
    MAKE["adafactor"] = lambda model: [torch.optim.Adafactor(two_groups(model), lr=0.02)]
    MAKE["adafactor_foreach"] = lambda model: [
        torch.optim.Adafactor(two_groups(model), lr=0.02, foreach=True)
    ]
if hasattr(torch.optim, "Muon"):
    MAKE["muon"] = _muon


def train(
    options: ExchangeOptions | None,
    make: str,
    num_steps: int = 5,
    model_name: str = "mlp",
    dtype: torch.dtype = torch.float32,
    delays: Delays | None = None,
) -> Trace:
    """Under ours with `options`, or under DDP; the learning rate falls after every step."""
    model = build(model_name, dtype=dtype)
    optimizers = MAKE[make](model)
    pipeline = wrapped = None
    if options is None:
        wrapped = DistributedDataParallel(model)
    else:
        pipeline = new_pipeline(
            model, optimizers[0], SMALL_BUCKETS, delays, optimizers[1:], options=options
        )
    seen, losses = [], []
    for step in range(num_steps):
        data = batch(model_name, step, dist.get_rank(), dtype)
        if pipeline is None:
            assert wrapped is not None
            loss = loss_of(wrapped, *data)
            loss.backward()
        else:
            with pipeline.forward():
                loss = loss_of(model, *data)
            if step:
                seen.append(weights(model))
            with pipeline.backward():
                loss.backward()
        step_all(optimizers)
        if pipeline is None and step < num_steps - 1:
            seen.append(weights(model))
        losses.append(loss.detach())
    if pipeline is not None:
        pipeline.detach()
    return [*seen, weights(model)], losses


def step_all(optimizers: Sequence[Optimizer]) -> None:
    """Steps and clears each, then lowers its learning rates, as schedulers do behind a step."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """All tensors of an optimizer's state, by parameter and key."""
    state = optimizer.state_dict()["state"]
    return [state[i][key] for i in sorted(state) for key in sorted(state[i])]
