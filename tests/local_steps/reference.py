"""Local steps in one process: the law once more, in plain torch, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

Step = Callable[[Module, Optimizer, int, int], object]
"""(model, optimizer, rank, step from 1) makes one inner step."""


@dataclass
class Law:
    every: int
    fragments: Sequence[Sequence[str]]
    delay: int
    mix: float
    outer: Callable[[Any], Optimizer]
    samples: Callable[[int, int], float] = lambda rank, number: 1.0


class Reference:
    """P replicas of a model, their anchor, and the outer optimizers: one for each fragment."""

    def __init__(self, model: Module, new_inner: Callable[[Any], Optimizer], world: int, law: Law):
        self.law, self.world, self.count = law, world, 0
        self.replicas = [deepcopy(model) for _ in range(world)]
        self.inner = [new_inner(one.parameters()) for one in self.replicas]
        self.anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.shadows = [
            {n: Parameter(v.clone()) for n, v in self.anchor.items() if _is_in(n, names)}
            for names in law.fragments
        ]
        self.outer = [law.outer(list(one.values())) for one in self.shadows]
        self.flights: dict[int, dict[str, Tensor]] = {}

    def run(self, num_steps: int, step: Step) -> None:
        law, interval = self.law, self.law.every // len(self.law.fragments)
        for _ in range(num_steps):
            self.count += 1
            for rank, (model, inner) in enumerate(zip(self.replicas, self.inner, strict=True)):
                step(model, inner, rank, self.count)
            for n in range(self.count + law.delay):
                if (n + 1) * interval - law.delay == self.count:
                    self.send(n % len(law.fragments))
            for n in range(self.count):
                if (n + 1) * interval == self.count and self.count > law.delay:
                    self.merge(n % len(law.fragments), law.mix)

    def send(self, fragment: int) -> None:
        assert fragment not in self.flights
        thetas = [dict(one.named_parameters()) for one in self.replicas]
        of_round = range(max(1, self.count - self.law.every + 1), self.count + 1)
        own = [sum(self.law.samples(rank, n) for n in of_round) for rank in range(self.world)]
        scales = [one / sum(own) if one else 0.0 for one in own]
        self.flights[fragment] = {
            name: sum(
                (self.anchor[name] - theta[name].detach()) * scale
                for theta, scale in zip(thetas, scales, strict=True)
            )
            for name in self.shadows[fragment]
        }

    @torch.no_grad()
    def merge(self, fragment: int, mix: float) -> None:
        mean = self.flights.pop(fragment)
        for name, shadow in self.shadows[fragment].items():
            shadow.grad = mean[name]
        self.outer[fragment].step()
        for name, shadow in self.shadows[fragment].items():
            self.anchor[name] = shadow.detach().clone()
            for replica in self.replicas:
                theta = dict(replica.named_parameters())[name]
                theta.copy_(torch.lerp(self.anchor[name], theta, mix))

    def flush(self) -> None:
        interval = self.law.every // len(self.law.fragments)
        just = set()
        if self.law.delay == 0 and self.count % interval == 0:
            just = {(self.count // interval - 1) % len(self.law.fragments)}
        for fragment in [*self.flights]:
            self.merge(fragment, self.law.mix)
        for fragment in set(range(len(self.shadows))) - just:
            self.send(fragment)
            self.merge(fragment, 0.0)


def _is_in(name: str, owners: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in owners)
