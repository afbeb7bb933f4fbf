"""Local steps over simulated NCCL: in order, with the bits of the reference in one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_dear.collectives.factory import alone
from lightning_dear.compression import TopK, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.base import GradientsNotFinite
from lightning_dear.exchange.options import ExchangeOptions
from lightning_dear.local_steps import LocalSteps, OuterHalf
from lightning_dear.planning import ThresholdFusion
from lightning_dear.telemetry.clock import StreamClock
from tests.local_steps.reference import Law, Reference
from tests.streams.device import DEVICE, Cuda
from tests.streams.ranks import Rank, on_simulated_cuda

NESTEROV = partial(SGD, lr=1.0, momentum=0.5, nesterov=True)
NUM_STEPS = 11


@dataclass(frozen=True)
class Case:
    """A training with local steps.

    Attributes:
        fragments: Number of fragments, of four layers.
        delay: In steps.
        mix: See `LocalSteps`.
        compressor: Its name.
        norm: Whether there is a BatchNorm.
        weighs: Whether ranks count by samples.
        spoils: What weights of rank 1 become in step 6. None means that they stay.
    """

    fragments: int = 2
    delay: int = 1
    mix: float = 0.5
    compressor: str | TopK = "none"
    norm: bool = False
    weighs: bool = False
    spoils: float | None = None

    def names(self) -> list[list[str]]:
        each = 4 // self.fragments
        firsts = range(0, 4, each)
        return [[str(layer) for layer in range(first, first + each)] for first in firsts]

    def samples(self, rank: int, number: int) -> float:
        return float((number * 7 + rank * 3) % 5) if self.weighs else 1.0


def new_model(case: Case) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(9, 9) for _ in range(4)]
    for layer in layers:
        for one in layer.parameters():
            one.data.copy_(torch.randn(one.shape, generator=generator) / 4)
    if case.norm:
        layers.insert(4, nn.BatchNorm1d(9, affine=False))
    return nn.Sequential(*layers)


def batch_of(rank: int, number: int) -> Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(1000 * rank + number))


def train(case: Case, rank: Rank) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the anchor, and the module's values before the flush."""
    model = new_model(case)
    rank.device.put(*model.parameters(), *model.buffers())
    optimizer = AdamW(model.parameters(), lr=0.01, foreach=False)
    collectives = rank.collectives()
    how = {"clock": StreamClock(DEVICE, Cuda()), "weighs": case.weighs}
    fusion = ThresholdFusion(bucket_cap_mb=0.0004)
    pipeline = Pipeline(model, [optimizer], alone(collectives), fusion, **how)
    steps = LocalSteps(
        every=4, fragments=case.names(), delay=case.delay, mix=case.mix, outer=NESTEROV
    )
    options = ExchangeOptions(compressor=resolve_compressor(case.compressor))
    outer = OuterHalf.of(pipeline, steps, collectives, options, fusion)
    for number in range(1, NUM_STEPS + 1):
        batch, weights = batch_of(rank.number, number), pipeline.training.weights
        rank.device.put(batch)
        if case.weighs:
            weights.weigh(case.samples(rank.number, number))
        with pipeline.forward():
            loss = model(batch).square().mean()
        loss = loss * factor if (factor := weights.loss_factor()) != 1.0 else loss
        with pipeline.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if case.spoils is not None and number == 6 and rank.number == 1:
            with torch.no_grad():
                model[1].weight.fill_(case.spoils)
        outer.after_step(optimizer)
    before = [one.detach().clone() for one in model.parameters()]
    outer.finish()
    pipeline.complete_parameters("end")
    after = [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
    outer.detach()
    pipeline.detach()
    return after, before


def reference_of(case: Case, size: int) -> Reference:
    law = Law(4, case.names(), case.delay, case.mix, NESTEROV, case.samples)
    made = Reference(new_model(case), partial(AdamW, lr=0.01, foreach=False), size, law)

    def step(model: nn.Module, inner: Optimizer, rank: int, number: int) -> None:
        if case.samples(rank, number):
            model(batch_of(rank, number)).square().mean().backward()
            inner.step()
            inner.zero_grad()

    made.run(NUM_STEPS, step)
    return made


EXACT = {
    f"{one.fragments} fragments, delay {one.delay}, mix {one.mix}, {one.weighs}": one
    for one in (
        *(Case(2, delay) for delay in range(4)),
        Case(1, 0, 0.0),
        Case(4, 3),
        Case(4, 2, 1.0),
        Case(2, 0, weighs=True),
        Case(2, 3, weighs=True),
    )
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_bits_of_the_reference(name: str, size: int) -> None:
    case = EXACT[name]
    found = on_simulated_cuda(lambda rank: train(case, rank), size)
    found.check()
    reference = reference_of(case, size)
    for number, (_, before) in enumerate(found.results):
        theirs = reference.replicas[number].parameters()
        assert all(map(torch.equal, before, theirs)), f"replica of rank {number}"
    reference.flush()
    for after, _ in found.results:
        assert all(map(torch.equal, after, reference.anchor.values()))


OTHERS = {
    "int8": Case(compressor="int8"),
    "int8, delay 3": Case(4, 3, compressor="int8"),
    "topk": Case(compressor=TopK(density=0.1, halves="reduce")),
    "buffers": Case(norm=True),
    "nan": Case(spoils=math.nan),
    "nan, delay 3, int8": Case(4, 3, compressor="int8", spoils=math.nan),
}


@pytest.mark.parametrize(("size", "ranks_a_host"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_agree(name: str, size: int, ranks_a_host: int) -> None:
    case = OTHERS[name]
    how: dict[str, Any] = {"ranks_a_host": ranks_a_host}
    found = on_simulated_cuda(lambda rank: train(case, rank), size, **how)
    found.check()
    (first, _), *others = found.results
    assert all(bool(one.isfinite().all()) for one in first)
    for after, _ in others:
        assert all(map(torch.equal, first, after))


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_values_that_a_compressor_cannot_send_raise_on_all_ranks(size: int, delay: int) -> None:
    """Otherwise the anchor would become nan, and stay so."""

    def body(rank: Rank) -> str:
        with pytest.raises(GradientsNotFinite) as error:
            train(Case(4, delay, compressor="fp16", spoils=1e9), rank)
        return str(error.value)

    for said in on_simulated_cuda(body, size).results:
        assert "compressor='fp16' cannot send" in said
