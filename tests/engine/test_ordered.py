"""Training through a backend that must keep one order, though its waits block the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dear.collectives.factory import new_collectives
from lightning_dear.collectives.work import Collectives
from lightning_dear.compression import OkTopk, resolve_compressor
from lightning_dear.engine.pipeline import Pipeline
from lightning_dear.exchange.options import ExchangeOptions
from tests.distributed.harness import distributed
from tests.training import three_ways
from tests.training.linear import Run, gradients_of
from tests.training.models import MayLeaveOut, distance, weights
from tests.training.ordered import OrderedCollectives, new_ordered
from tests.training.three_ways import SMALL_BUCKETS

CPU = torch.device("cpu")
NUM_STEPS = 6
LATE_STEPS = (2, 4)
NOBODYS_STEP = 3
MAX_NORM = 0.5

GRADIENTS = ExchangeOptions("gradients")
ALL_REDUCED = ExchangeOptions("gradients", decouple=False)
INT8 = ExchangeOptions("parameters", compressor=resolve_compressor("int8"))
INT8_GRADIENTS = replace(INT8, gather="gradients")
STATIC = ExchangeOptions("gradients", compressor=OkTopk(mode="static", density=0.05))


@dataclass(frozen=True)
class Case:
    """What is trained how.

    Attributes:
        options: What travels.
        num_optimizers: Which share every layer.
        is_late: Whether in some steps the last rank runs another backward than the others.
        accumulates: Whether a backward that sends nothing comes before.
        leaves_out: Whether rank 0 leaves out a layer, and all do in one step.
        clips: Whether the mean is clipped by norm.
    """

    options: ExchangeOptions | None = None
    num_optimizers: int = 1
    is_late: bool = False
    accumulates: bool = False
    leaves_out: bool = False
    clips: bool = False

    def rounds(self, step: int, rank: int) -> list[list[int]]:
        """Numbers of the batches of each backward that is sent, and of those before it."""
        in_time = [10 * step, 10 * step + 1] if self.accumulates else [10 * step]
        is_late = self.is_late and step in LATE_STEPS and rank == dist.get_world_size() - 1
        late = [10 * step + 2] if is_late else []
        # Of several optimizers nothing is sent before their steps.
        return [in_time, late] if self.num_optimizers == 1 else [[*in_time, *late]]

    def loss(self, model: nn.Module, number: int, rank: int) -> Tensor:
        """Of a batch of a rank's own."""
        step, generator = number // 10, torch.Generator().manual_seed(1000 * number + rank)
        uses_extra = not self.leaves_out or (step != NOBODYS_STEP and (rank > 0 or step == 0))
        return model(torch.randn(6, 7, generator=generator), uses_extra).square().mean()


EVERYTHING = Case(is_late=True, accumulates=True, leaves_out=True, clips=True)
PLAIN = {
    "dense": Case(),
    "late": Case(is_late=True),
    "unused": Case(leaves_out=True),
    "accumulated": Case(accumulates=True),
    "clipped": Case(clips=True),
    "everything": EVERYTHING,
    "two optimizers": Case(num_optimizers=2),
    "two optimizers, everything": replace(EVERYTHING, num_optimizers=2),
    "gradients": Case(GRADIENTS),
    "gradients, everything": replace(EVERYTHING, options=GRADIENTS),
    "all-reduced": Case(ALL_REDUCED),
    "all-reduced, everything": replace(EVERYTHING, options=ALL_REDUCED),
}
CODED = {
    "int8": Case(INT8),
    "int8, late": Case(INT8, is_late=True),
    "int8, everything": replace(EVERYTHING, options=INT8_GRADIENTS),
    "int8, two optimizers": Case(INT8, 2, leaves_out=True),
    "oktopk": Case(STATIC),
    "oktopk, late": Case(STATIC, is_late=True),
    "oktopk, everything": replace(EVERYTHING, options=STATIC),
}


def _new_training(case: Case) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model, count = MayLeaveOut(), case.num_optimizers
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[n::count], lr=0.1, momentum=0.9) for n in range(count)]
    return model, optimizers


def _train(case: Case, collectives: Collectives) -> list[Tensor]:
    model, optimizers = _new_training(case)
    rank = dist.get_rank()
    pipeline = Pipeline(model, optimizers, collectives, SMALL_BUCKETS, options=case.options)
    for step in range(NUM_STEPS):
        in_time, *late = case.rounds(step, rank)
        for numbers in (in_time, *late):
            for number in numbers:
                with pipeline.forward():
                    loss = case.loss(model, number, rank)
                with pipeline.backward(synchronize=number == numbers[-1]):
                    loss.backward()
        for part in pipeline.parts:
            if case.clips:
                part.mean.clip_by_norm(MAX_NORM)
            part.optimizer.step()
        for one in optimizers:
            one.zero_grad()
    pipeline.detach()
    return weights(model)


def _reference(case: Case) -> list[Tensor]:
    """In one process: of each round every rank's gradient, times 1/P, added in rank order."""
    model, optimizers = _new_training(case)
    parameters, size = list(model.parameters()), dist.get_world_size()
    for step in range(NUM_STEPS):
        total: dict[Tensor, Tensor] = {}
        for turn in range(len(case.rounds(step, 0))):
            mean: dict[Tensor, Tensor] = {}
            for rank in range(size):
                model.zero_grad()
                for number in case.rounds(step, rank)[turn]:
                    case.loss(model, number, rank).backward()
                _add(mean, {p: p.grad / size for p in parameters if p.grad is not None})
            _add(total, mean)
        for parameter in parameters:
            parameter.grad = total.get(parameter)
        for one in optimizers:
            if case.clips:
                own = [p for group in one.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(own, MAX_NORM)
            one.step()
    return weights(model)


def _add(total: dict[Tensor, Tensor], more: dict[Tensor, Tensor]) -> None:
    for parameter, one in more.items():
        total[parameter] = total[parameter] + one if parameter in total else one


def _check_alike(own: list[Tensor]) -> None:
    """All ranks hold the same weights, bit for bit. Collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [one.numpy().tobytes() for one in own])
    assert all(one == everyones[0] for one in everyones)


@pytest.mark.parametrize("name", PLAIN)
@distributed(world_sizes=(2, 3))
def test_numbers_are_those_of_one_process_and_launches_have_one_order(name: str) -> None:
    case, collectives = PLAIN[name], OrderedCollectives()
    ours, there = _train(case, collectives), _reference(case)
    collectives.check_order()
    _check_alike(ours)
    assert distance(ours, there) < 1e-6
    # Sums of two numbers have one order; norms add up other parts.
    if dist.get_world_size() == 2 and not case.clips:
        assert all(map(torch.equal, ours, there))


@pytest.mark.parametrize("name", CODED)
@distributed(world_sizes=(2, 3))
def test_encoded_numbers_are_those_of_gloo_and_launches_have_one_order(name: str) -> None:
    case, collectives = CODED[name], OrderedCollectives()
    ours = _train(case, collectives)
    collectives.check_order()
    _check_alike(ours)
    theirs = _train(case, new_collectives(CPU))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("options", [None, ALL_REDUCED, STATIC], ids=["dense", "all", "oktopk"])
@distributed(world_sizes=(2, 3))
def test_all_ranks_have_another_round_in_the_step_in_which_one_is_late(
    options: ExchangeOptions | None,
) -> None:
    collectives = OrderedCollectives()
    _train(Case(options, is_late=True), collectives)
    launches = Counter((name, dtype) for name, _, _, dtype in collectives.noted.launched)
    # Before the second forward ranks tell each other whether they have written buffers.
    assert launches["all_reduce", "torch.uint8"] == NUM_STEPS + len(LATE_STEPS) + 1


@pytest.mark.parametrize("options", [INT8_GRADIENTS, STATIC], ids=["int8", "oktopk"])
@distributed(world_sizes=(2, 3))
def test_nothing_is_lost_of_a_late_gradient_that_is_encoded(options: ExchangeOptions) -> None:
    with mock.patch.object(three_ways, "new_collectives", new_ordered):
        run = Run(options)
    late_rank = dist.get_world_size() - 1
    for step in range(NUM_STEPS):
        run.backward()
        run.count(step)
        if step in LATE_STEPS:
            if dist.get_rank() == late_rank:
                run.backward(step=100 + step)
            for number, one in enumerate(gradients_of(100 + step, late_rank)):
                run.expected[number] += one.double() / dist.get_world_size()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.num_steps += 1
    assert run.error() < 1e-5
    _check_alike(weights(run.model))
    run.pipeline.collectives.check_order()


@distributed(world_sizes=(2,))
def test_what_looks_up_counts_is_refused() -> None:
    model, optimizers = _new_training(Case())
    options = ExchangeOptions("gradients", compressor=resolve_compressor("oktopk"))
    with pytest.raises(ValueError, match=r"works only on CPUs.*OkTopk\(mode='static'\)"):
        Pipeline(model, optimizers, new_ordered(), SMALL_BUCKETS, options=options)


@distributed(world_sizes=(2,))
def test_messages_with_tags_are_refused() -> None:
    collectives = new_ordered()
    for name in ("isend", "irecv"):
        with pytest.raises(AssertionError, match=f"{name}: there are no messages with tags"):
            getattr(collectives.calls, name)(torch.ones(1), 0, group=collectives.reduce_group)


@distributed(world_sizes=(2,))
def test_another_order_on_one_rank_is_found() -> None:
    collectives, numbers = new_ordered(), torch.ones(2)
    launches = [
        lambda: collectives.launch_all_reduce(numbers, 0),
        lambda: collectives.launch_all_gather(numbers, 0),
    ]
    # To wait for one before the next would never end.
    works = [launch() for launch in launches[:: 1 if dist.get_rank() else -1]]
    for work in works:
        work.wait()
    with pytest.raises(AssertionError, match="launch 0 is, by rank:"):
        collectives.check_order()
