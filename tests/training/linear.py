"""A model whose gradients are known beforehand, and what of them arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import FusionPlanner
from tests.training.three_ways import SMALL_BUCKETS, new_pipeline

SHAPES = ((61, 31), (31,), (7, 131), (1,), (301,))
SOMETIMES = 2
"""Number of the parameter that some steps leave out."""


class Known(nn.Module):
    """Its loss is the sum of all parameters times given numbers, which are thus the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return sum((w * g).sum() for w, g in pairs if g is not None)  # type: ignore[return-value]


def gradients_of(step: int, rank: int, leaves_out: bool = False) -> list[Tensor | None]:
    """Other ones on each rank, of a scale that differs between tensors, heavy-tailed."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made: list[Tensor | None] = [
        (torch.randn(shape, generator=generator, dtype=torch.float32) ** 3) * 10.0 ** (number - 2)
        for number, shape in enumerate(SHAPES)
    ]
    if leaves_out:
        made[SOMETIMES] = None
    return made


class Run:
    """Sums up what arrives: SGD with learning rate 1 from zeros, so that -weights is the sum.

    Args:
        options: How to exchange.
        fusion: Which tensors to put together.
        momentum: Of the optimizer; not 0 where somebody looks at its state.
        weighs: (step, rank) -> weight of the batch. None means that all ranks count alike.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        fusion: FusionPlanner = SMALL_BUCKETS,
        momentum: float = 0.0,
        weighs: Callable[[int, int], float] | None = None,
    ) -> None:
        self.model = Known()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=momentum)
        self.weighs = weighs
        self.pipeline: Pipeline = new_pipeline(
            self.model, self.optimizer, fusion, options=options, weighs=weighs is not None
        )
        self.part = self.pipeline.parts[0]
        self.together = self.pipeline.options.ranks_together(self.pipeline.collectives)
        self.num_steps = 0
        self.expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.magnitudes = [0.0] * len(SHAPES)

    def backward(self, leaves_out: bool = False, scale: float = 1.0, step: int = -1) -> None:
        """Forward and backward of a step's own batch, or of step `step`'s."""
        step = self.num_steps if step < 0 else step
        with self.pipeline.forward():
            loss = self.model(gradients_of(step, dist.get_rank(), leaves_out))
        if self.weighs is not None:
            self.pipeline.training.weights.weigh(self.weighs(step, dist.get_rank()))
        loss = loss * self.pipeline.training.weights.loss_factor()
        with self.pipeline.backward():
            (loss * scale).backward()

    def step(
        self,
        leaves_out: bool = False,
        before: Callable[[], None] = lambda: None,
        scale: float = 1.0,
    ) -> None:
        """One step; `before` is called between backward and the optimizer's step."""
        self.backward(leaves_out, scale)
        before()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count(self.num_steps, leaves_out)
        self.num_steps += 1

    def count(self, step: int, leaves_out: bool = False) -> None:
        """Adds a batch's mean gradient to what should arrive."""
        size = dist.get_world_size()
        counts = [self.weighs(step, rank) if self.weighs else 1.0 for rank in range(size)]
        for rank, own in enumerate(counts):
            for number, one in enumerate(gradients_of(step, rank, leaves_out)):
                if one is not None and own:
                    mean = one.double() * own / sum(counts)
                    self.expected[number] += mean
                    self.magnitudes[number] += float(mean.norm())

    def resume(self, other: Run) -> None:
        """Goes on with the weights of `other`, and what arrived and should have."""
        other.pipeline.complete_parameters()
        self.model.load_state_dict(other.model.state_dict())
        self.num_steps, self.magnitudes = other.num_steps, list(other.magnitudes)
        self.expected = [one.clone() for one in other.expected]

    def error(self, rate: float = 1.0, masters: Sequence[Tensor] | None = None) -> float:
        """|sum of what arrived + what is still to be sent - sum of the gradients| / magnitude.

        What arrived is read from `masters`, if there are any, or else from the weights.
        """
        distances = self._distances(rate, masters)
        return sum(one**2 for one in distances) ** 0.5 / sum(self.magnitudes)

    def errors(self, rate: float = 1.0) -> list[float]:
        """The same of each tensor for itself."""
        distances = self._distances(rate, None)
        return [one / whole for one, whole in zip(distances, self.magnitudes, strict=True)]

    def _distances(self, rate: float, masters: Sequence[Tensor] | None) -> list[float]:
        self.pipeline.complete_parameters()
        kept = self.part.plans.residuals.taken().kept
        own, owned = (kept.get((whose, "residual"), {}) for whose in ("worker", "owner"))
        distances = []
        for number, weight in enumerate(self.model.weights):
            total = -(weight if masters is None else masters[number]).detach().double()
            if weight in own:
                # Ranks of a host have what these keep together.
                total += summed(own[weight].double()).view(weight.shape) / rate / self.together
            if weight in owned:
                total += owned[weight].double().view(weight.shape) / rate
            distances.append(float((total - self.expected[number]).norm()))
        return distances


def summed(own: Tensor) -> Tensor:
    """Sum over all ranks."""
    dist.all_reduce(own)
    return own


def unscale(run: Run, scale: float) -> None:
    """Divides gradients by a loss scale, between backward and step."""

    def divide(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= scale

    run.part.mean.unscale(divide)
