"""Small trainings on the simulated device, and what one process makes of the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_dear.collectives.work import Collectives
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.planning import NoFusion
from lightning_dear.telemetry.clock import StreamClock
from lightning_dear.telemetry.timeline import Timeline
from tests.streams.device import DEVICE, Cuda
from tests.streams.ranks import Found, Rank, on_simulated_cuda
from tests.training.models import batch, build, loss_of, optimizer_for, weights
from tests.training.three_ways import SMALL_BUCKETS

NUM_STEPS = 4
FIRST_STEADY = 2
"""From this step on nothing is new, and the host is not to wait."""

WIDTHS = {"mlp": 3, "conv": 10, "gpt": 67}
"""Of what models put out."""


class Skipping(nn.Module):
    """A model with a layer behind it that need not be used.

    Args:
        model: The model.
        width: Of what it puts out.
    """

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.extra = model, nn.Linear(width, width)
        self.uses_extra = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x)
        return x + self.extra(x) if self.uses_extra else x


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        model: Its name.
        optimizer: Its name; "plain": SGD without momentum; "signs": Rprop; "two": one for matrices,
            and another; "apart": plain SGD for matrices, and one that the pipeline does not know.
        options: What travels.
        dtype: Of the parameters.
        num_batches: Of each step, whose gradients add up.
        max_norm: What gradients are clipped to.
        is_scaled: Whether the loss is, by a GradScaler.
        lacks: Whether the last rank does not use a layer from the second step on.
        between: What is done in the middle: "replan", "checkpoint", "validation" or nothing.
        has_timeline: Whether one is recorded, in the steady steps too.
        is_hooked: Whether a hook before each step halves the gradients.
        weighs: Whether batches have weights: "other" ones on each rank, or also "none", which is 0.
    """

    model: str = "mlp"
    optimizer: str = "adamw"
    options: ExchangeOptions | None = None
    dtype: torch.dtype = torch.float32
    num_batches: int = 1
    max_norm: float | None = None
    is_scaled: bool = False
    lacks: bool = False
    between: str = ""
    has_timeline: bool = False
    is_hooked: bool = False
    weighs: str = ""

    def build(self) -> tuple[nn.Module, list[Optimizer]]:
        """The model, the same on every rank, and its optimizers."""
        model = build(self.model, dtype=self.dtype)
        if self.lacks:
            model = Skipping(model, WIDTHS[self.model])
        return model, optimizers_for(self.optimizer, model)

    def own(self, model: nn.Module) -> list[Optimizer]:
        """Optimizers that the pipeline does not know."""
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        return [torch.optim.SGD(vectors, lr=0.05)] if self.optimizer == "apart" else []

    def scaler(self) -> Any:
        """Of the loss; does nothing where it is not scaled."""
        return torch.amp.GradScaler("cpu", init_scale=256.0, enabled=self.is_scaled)

    def data(self, step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
        """One of a step's batches."""
        return batch(self.model, step * self.num_batches + part, rank, self.dtype)

    def weight(self, step: int, part: int, rank: int) -> int:
        """Weight of a batch."""
        if self.weighs == "none" and rank == 1 and (step + part) % 2:
            return 0
        return 1 + (step + 2 * part + 3 * rank) % 4

    def factors(self, step: int, rank: int, size: int) -> tuple[list[float], float]:
        """Factors of the losses of a rank's batches, and of the sum of their gradients."""
        if not self.weighs:
            return [1.0] * self.num_batches, 1.0 / size
        parts = range(self.num_batches)
        own = [self.weight(step, part, rank) for part in parts]
        total = sum(self.weight(step, part, one) for part in parts for one in range(size))
        first = own[0] or 1
        return [one / first for one in own], self.num_batches * first / total if any(own) else 0.0

    def uses_extra(self, step: int, rank: int, size: int) -> bool:
        """Whether a rank uses the last layer."""
        return step == 0 or rank < size - 1


def optimizers_for(name: str, model: nn.Module) -> list[Optimizer]:
    """The optimizers of that name."""
    parameters = list(model.parameters())
    if name == "plain":
        return [torch.optim.SGD(parameters, lr=0.05)]
    if name == "apart":
        return [torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.05)]
    if name == "signs":
        return [torch.optim.Rprop(parameters, lr=0.01)]
    if name == "two":
        return [
            torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.05, momentum=0.9),
            torch.optim.AdamW([p for p in parameters if p.ndim <= 1], lr=0.01),
        ]
    return [optimizer_for(name, model)]


class OnDevice:
    """A training on one rank: its parts, and what is done in a step.

    Args:
        training: What is trained.
        rank: Where.
        collectives: What sends; None: the real ones, over the simulated NCCL.

    Attributes:
        training: See above.
        rank: See above.
        model: On the device.
        optimizers: Of the model.
        pipeline: The real one.
    """

    def __init__(
        self, training: Training, rank: Rank, collectives: Collectives | None = None
    ) -> None:
        self.training, self.rank = training, rank
        self.model, self.optimizers = training.build()
        rank.device.put(*self.model.parameters(), *self.model.buffers())
        collectives = collectives or rank.collectives()
        self.pipeline = Pipeline(
            self.model,
            self.optimizers,
            collectives,
            SMALL_BUCKETS,
            options=training.options,
            clock=StreamClock(DEVICE, Cuda(), in_threads=collectives.wait_blocks_host),
            weighs=bool(training.weighs),
        )
        self._scaler = training.scaler()
        self._own = training.own(self.model)
        for optimizer in self.optimizers if training.is_hooked else ():
            optimizer.register_step_pre_hook(self._halve)

    def _halve(self, *_: Any) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def step(self, step: int) -> None:
        """One optimizer step."""
        training, pipeline = self.training, self.pipeline
        self.zero_grad()
        for part in range(training.num_batches):
            with pipeline.forward():
                loss = self.loss(step, part)
            weights = pipeline.training.weights
            if training.weighs:
                weights.weigh(training.weight(step, part, self.rank.number))
            loss = loss * factor if (factor := weights.loss_factor()) != 1.0 else loss
            with pipeline.backward(synchronize=part == training.num_batches - 1):
                self._scaler.scale(loss).backward()
        for optimizer in self._own:
            optimizer.step()
            optimizer.zero_grad()
        for optimizer in self.optimizers:
            if training.is_scaled:
                pipeline.of(optimizer).mean.unscale(self._scaler.unscale_)
            if training.max_norm is not None:
                pipeline.of(optimizer).mean.clip_by_norm(training.max_norm)
            self._scaler.step(optimizer)
        self._scaler.update()
        if step == 0 and training.has_timeline:
            pipeline.training.instruments.record_in(Timeline())

    def zero_grad(self) -> None:
        """Of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def loss(self, step: int, part: int = 0) -> Tensor:
        """Of one of this rank's batches."""
        training, rank = self.training, self.rank
        if isinstance(self.model, Skipping):
            self.model.uses_extra = training.uses_extra(step, rank.number, rank.size)
        inputs = training.data(step, part, rank.number)
        rank.device.put(*inputs)
        return loss_of(self.model, *inputs)

    def between(self) -> None:
        """What happens between two steps."""
        parts = self.pipeline.parts
        if self.training.between == "replan":
            parts[0].replan(NoFusion().plan(parts[0].tensors, self.rank.size))
        elif self.training.between == "checkpoint":
            for part in parts:
                part.optimizer_state_dict()
            self.model.state_dict()
        elif self.training.between == "validation":
            self.model.eval()
            with torch.inference_mode():
                self.loss(0)
            self.model.train()

    def end(self) -> list[Tensor]:
        """Weights, and behind them the model's buffers."""
        self.pipeline.training.instruments.record_in(None)
        self.pipeline.detach()
        return [*weights(self.model), *(buffer.clone() for buffer in self.model.buffers())]


@contextmanager
def quiet(rank: Rank) -> Iterator[None]:
    """What is done in it makes the host wait without being counted."""
    before = rank.device.syncs.copy()
    yield
    rank.device.syncs.clear()
    rank.device.syncs.update(before)


def train(
    training: Training,
    rank: Rank,
    collectives: Collectives | None = None,
    hook: Callable[[OnDevice, int], None] = lambda trained, step: None,
) -> list[Tensor]:
    """Trains on one rank, `hook` being called before each step.

    Returns:
        See `OnDevice.end`.
    """
    trained = OnDevice(training, rank, collectives)
    for step in range(NUM_STEPS):
        if step == FIRST_STEADY:
            trained.between()
            rank.device.forget()
        hook(trained, step)
        trained.step(step)
    with quiet(rank):
        return trained.end()


def run(training: Training, size: int, **options: Any) -> Found[list[Tensor]]:
    """Trains on all ranks; see `on_simulated_cuda`."""
    return on_simulated_cuda(lambda rank: train(training, rank), size, **options)


# --- the same in one process ----------------------------------------------------------------------


@cache
def reference(training: Training, size: int, ranks_a_host: int = 0) -> Sequence[Tensor]:
    """Every rank's gradient in turn, times 1/P, added in rank order; fp32 weights are stepped.

    In two hops each host's gradients are added first, and then the hosts' sums.

    Args:
        training: What is trained.
        size: Number of ranks.
        ranks_a_host: Of two hops; 0: one hop.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, optimizers = training.build()
    optimizers += training.own(model)
    stepped = list(model.parameters())
    if training.dtype != torch.float32:
        masters, _ = training.build()
        masters.float()
        stepped, optimizers = (
            list(masters.parameters()),
            optimizers_for(training.optimizer, masters),
        )
    scale = 256.0 if training.is_scaled else 1.0
    for step in range(NUM_STEPS):
        means = _means(training, model, step, size, scale, ranks_a_host or size)
        for parameter, mean in zip(stepped, means, strict=True):
            parameter.grad = None if mean is None else mean.to(parameter.dtype) / scale
            if training.is_hooked and parameter.grad is not None:
                parameter.grad.mul_(0.5)
        if training.max_norm is not None:
            clip_grad_norm_(stepped, training.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for parameter, new in zip(model.parameters(), stepped, strict=True):
            parameter.data.copy_(new.data)
    torch.set_num_threads(num_threads)
    return weights(model)


def _means(
    training: Training, model: nn.Module, step: int, size: int, scale: float, ranks_a_host: int
) -> list[Tensor | None]:
    sums: list[list[Tensor | None]] = [
        [None for _ in model.parameters()] for _ in range(size // ranks_a_host)
    ]
    for rank in range(size):
        if isinstance(model, Skipping):
            model.uses_extra = training.uses_extra(step, rank, size)
        model.zero_grad()
        factors, share = training.factors(step, rank, size)
        for part, factor in enumerate(factors):
            if factor:
                loss = loss_of(model, *training.data(step, part, rank))
                (loss * factor * scale).backward()
        for number, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                own, of_host = parameter.grad * share, sums[rank // ranks_a_host]
                of_host[number] = _added(of_host[number], own)
    model.zero_grad()
    total, *others = sums
    for of_host in others:
        total = [_added(one, _as_precise(own)) for one, own in zip(total, of_host, strict=True)]
    return total


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


def _as_precise(of_host: Tensor | None) -> Tensor | None:
    """Sums of hosts are added up in fp32, if not in more."""
    if of_host is None:
        return None
    return of_host.to(torch.promote_types(of_host.dtype, torch.float32))
