"""Local steps have the bits of a reference in one process, whatever arrives when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.gloo import PairwiseCollectives
from lightning_dear.compression import resolve_compressor
from lightning_dear.engine.batch_weights import BatchWeights
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.planning import ThresholdFusion
from tests.distributed.harness import distributed
from tests.distributed.rank import on_hosts
from tests.local_steps.reference import Law, Reference, Step

LAYERS = 4
NESTEROV = partial(SGD, lr=1.0, momentum=0.5, nesterov=True)
FRAGMENTS = {
    1: [["0", "1", "2", "3"]],
    2: [["0", "1"], ["2", "3"]],
    4: [["0"], ["1"], ["2"], ["3"]],
}


def new_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(9, 9) for _ in range(LAYERS)))


def step(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> None:
    """An inner step on a batch of its own for each rank."""
    loss(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss(model: nn.Module, rank: int, number: int) -> Tensor:
    data = torch.randn(5, 9, generator=torch.Generator().manual_seed(1000 * rank + number))
    return model(data).square().mean()


class Ours:
    """The engine on this rank."""

    def __init__(
        self, steps: LocalSteps, new_inner: Any, compressor: Any = None, samples: Any = None
    ) -> None:
        self.samples = samples
        self.model = new_model()
        self.optimizer = new_inner(self.model.parameters())
        alone = PairwiseCollectives(None, None, None)
        what = self.model, [self.optimizer], alone, ThresholdFusion()
        self.pipeline = Pipeline(*what, weighs=samples is not None)
        codec = resolve_compressor(compressor)
        how = ExchangeOptions(compressor=codec), ThresholdFusion(bucket_cap_mb=0.0004)
        self.outer = OuterHalf.of(self.pipeline, steps, new_collectives(torch.device("cpu")), *how)

    def train(self, number: int) -> None:
        if self.samples is not None:
            self.pipeline.training.weights.weigh(self.samples(dist.get_rank(), number))
        with self.pipeline.forward():
            found = loss(self.model, dist.get_rank(), number)
        found = found * self.pipeline.training.weights.loss_factor()
        with self.pipeline.backward():
            found.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.train(number)
            self.outer.after_step(self.optimizer)

    @property
    def anchor(self) -> dict[str, Tensor]:
        return {n: v for one in self.outer.fragments for n, v in one.anchor.items()}


def assert_same(ours: Ours, reference: Reference) -> None:
    theirs = dict(reference.replicas[dist.get_rank()].named_parameters())
    for name, own in ours.model.named_parameters():
        assert torch.equal(own, theirs[name]), f"replica's {name} after {reference.count}"
        assert torch.equal(ours.anchor[name], reference.anchor[name]), f"anchor's {name}"


def compare(law: Law, inner_step: Step, samples: Any = None) -> None:
    """Trains two rounds and some steps, and compares all bits after each of them."""
    new_inner = partial(AdamW, lr=0.01)
    reference = Reference(new_model(), new_inner, dist.get_world_size(), law)
    how = {"delay": law.delay, "mix": law.mix, "outer": law.outer}
    steps = LocalSteps(every=law.every, fragments=law.fragments, **how)
    ours = Ours(steps, new_inner, samples=samples)
    for number in range(1, 2 * law.every + 4):
        ours.run([number])
        reference.run(1, inner_step)
        assert_same(ours, reference)
    ours.outer.finish()
    reference.flush()
    for name, own in ours.model.named_parameters():
        assert torch.equal(own, reference.anchor[name]), (law, name)
    ours.outer.detach()
    ours.pipeline.detach()


@pytest.mark.parametrize(
    ("every", "fragments"),
    [(4, 1), (4, 2), (4, 4), pytest.param(8, 2, marks=pytest.mark.slow)],
)
@distributed(world_sizes=(2, 3), timeout_s=120)
def test_bits_of_the_reference(every: int, fragments: int) -> None:
    for delay, mix in product(range(every), (0.0, 0.5, 1.0)):
        law = Law(every, FRAGMENTS[fragments], delay, mix, NESTEROV)
        compare(law, step)


def uneven(rank: int, number: int) -> float:
    """Numbers of samples: other ones for each rank and step, and at times none."""
    return float((number * 7 + rank * 3) % 5)


def weighed_step(model: nn.Module, optimizer: Optimizer, rank: int, number: int) -> None:
    if uneven(rank, number):
        step(model, optimizer, rank, number)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (4, 2), (4, 4)])
@distributed(world_sizes=(2, 3), timeout_s=120)
def test_bits_of_the_reference_by_samples(every: int, fragments: int, is_late: bool) -> None:
    """Also if rank 0 hears of the other ranks' samples only when it must wait for them."""
    if is_late and dist.get_rank() == 0:
        BatchWeights.is_known = property(lambda _: False)  # type: ignore[assignment]
    for delay, mix in product(range(every), (0.0, 0.5)):
        law = Law(every, FRAGMENTS[fragments], delay, mix, NESTEROV, uneven)
        compare(law, weighed_step, uneven)


@distributed(world_sizes=(2, 3))
def test_equal_samples_have_the_bits_of_none() -> None:
    steps, ends = LocalSteps(every=4, fragments=2, delay=1), []
    for samples in (None, lambda *_: 3.0):
        ours = Ours(steps, partial(AdamW, lr=0.01), samples=samples)
        ours.run(range(1, 8))
        ours.outer.finish()
        ends.append([one.detach().clone() for one in ours.model.parameters()])
        ours.outer.detach()
        ours.pipeline.detach()
    assert all(map(torch.equal, *ends))


@distributed(world_sizes=(2, 3))
def test_ranks_really_differ_between_merges() -> None:
    ours = Ours(LocalSteps(every=4, fragments=1, delay=0), partial(SGD, lr=0.1))
    ours.run(range(1, 4))
    weights: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(weights, ours.model[0].weight.detach().clone())
    assert not torch.equal(weights[0], weights[1])
    ours.run([4])
    dist.all_gather_object(weights, ours.model[0].weight.detach().clone())
    assert all(torch.equal(one, weights[0]) for one in weights)
    ours.outer.detach()


@pytest.mark.parametrize("compressor", ["none", "int8"])
@distributed(world_sizes=(4,))
def test_two_hosts_of_two_ranks(compressor: str) -> None:
    """Sums of hosts come first: close to the reference, and alike on all ranks."""
    new_inner, names = partial(SGD, lr=0.1), FRAGMENTS[2]
    steps = LocalSteps(every=4, fragments=names, delay=1, mix=0.5, outer=NESTEROV)
    reference = Reference(new_model(), new_inner, 4, Law(4, names, 1, 0.5, NESTEROV))
    with on_hosts(2):
        ours = Ours(steps, new_inner, compressor)
    (fragment, *_) = ours.outer.fragments
    assert fragment._options.collectives.hops == 2
    ours.run(range(1, 14))
    reference.run(13, step)
    ours.outer.finish()
    reference.flush()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, [one.detach() for one in ours.model.parameters()])
    assert all(map(torch.equal, everyone[0], everyone[3]))
    tolerance = 1e-6 if compressor == "none" else 5e-3
    for name, own in ours.model.named_parameters():
        assert torch.allclose(own, reference.anchor[name], atol=tolerance)
